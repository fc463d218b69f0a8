"""What all tests share."""

import gc
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run, and no clock: the machine may be busy.
settings.register_profile("project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

# Imports and collection make objects that stay: going through the youngest after every 700 takes a sixth of their time.
gc.set_threshold(100_000, 20, 50)

# Inductor compiles programs that try out the vector instructions of the processor, in ten seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A suite in the background of a shell ignores Ctrl-C, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the seconds and the number of tests of each folder, where the slowest tests are asked for."""
    if not terminalreporter.config.getoption("durations"):
        return
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            folder = "/".join(PurePosixPath(report.nodeid.partition("::")[0]).parent.parts[:3])
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    terminalreporter.section("seconds per folder")
    for folder, total_s in seconds.most_common():
        terminalreporter.write_line(f"{total_s:8.1f} s {tests[folder]:6d} tests  {folder}")


_frozen: list[object] = []  # the module and the number of imported ones when objects were last frozen


@pytest.fixture(autouse=True)
def frozen(request: pytest.FixtureRequest) -> None:
    """What earlier modules and imports left stays: the garbage collector, which plans call, goes through the rest only."""
    if [request.path, len(sys.modules)] != _frozen:
        _frozen[:] = request.path, len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that repeat their bits, also on a GPU: what is compared with eager PyTorch needs them."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have a deterministic implementation", UserWarning)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def fresh_compilers() -> Iterator[None]:
    """Dynamo without what it compiled before the module."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Dynamo without what it compiled before, and budgets of which no graph has taken a part.

    What it compiled of the test's own functions is a global beside them, with the graphs and their arenas.
    """
    import torch

    from planner.train.backend import backend

    torch._dynamo.reset()
    backend.BUDGETS.clear()
    yield
    torch._dynamo.reset()
    for name in [name for name in vars(request.module) if name.startswith(("__compiled_fn", "__resume_at"))]:
        setattr(request.module, name, None)  # Dynamo itself deletes the name


@pytest.fixture
def half_way() -> Iterator[None]:
    """HALF_WAY of ``tests.support.budgets`` is a budget."""
    from tests.support.budgets import half_way_known

    with half_way_known():
        yield


@pytest.fixture
def solves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves in the background have the priority of the test: they run on idle cores only, and other tests leave none."""
    from planner.plans import background

    monkeypatch.setattr(background, "_lower_priority", lambda process: None)

"""Run all tests and benchmarks that need a GPU: ``make gpu``.

It uses the present Python and installs nothing: a machine with a GPU has its own PyTorch. Each step has a time limit, can be
run alone (``--steps probe``), writes a log while it runs, and ends with all processes that it has started.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.command import add_names
from planner.studies.tables import join_markdown

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step: the arguments of ``python -m``, with ``{out}`` for the folder of results, and its time limit."""

    words: tuple[str, ...]
    limit_s: float


def find_gpu_tests() -> tuple[str, ...]:
    """Return the test files with tests for a GPU: collecting all others takes longer than running these."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marks = "pytest.mark.gpu", '"_cuda"'  # or a fixture with the mark
    return tuple(str(file.relative_to(ROOT)) for file in files if any(mark in file.read_text() for mark in marks))


_TESTS = ("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--durations=20", *find_gpu_tests())
_PLANS = ("benchmarks", "gpu.plans", "--fresh")
_TWO_MODELS = ("--models", "gpt2,resnet50")
STEPS: Mapping[str, GpuStep] = {
    "host": GpuStep(
        ("benchmarks", "gpu.host", "--fresh", *_TWO_MODELS, "--out", "{out}/host"), 210.0
    ),  # with a minute to compile the library
    "probe": GpuStep(("benchmarks", "gpu.probe"), 60.0),
    "tests": GpuStep(_TESTS, 240.0),
    "plans": GpuStep((*_PLANS, *_TWO_MODELS, "--ways", "recompute,reserved,expandable,device", "--out", "{out}/plans"), 240.0),
    "ways": GpuStep((*_PLANS, *_TWO_MODELS, "--ways", "offload,cuda-graph,inductor", "--out", "{out}/ways"), 300.0),
    "arena": GpuStep((*_PLANS, "--models", "resnet50,unet", "--ways", "arena,reserved", "--out", "{out}/arena"), 150.0),
    "eager": GpuStep(
        (
            *("benchmarks", "eager", "--fresh", "--device", "cuda", "--models", "tree,experts,gpt2-small,resnet50-full"),
            *("--ways", "dtr", "--out", "{out}/eager"),
        ),
        150.0,
    ),
    "capped": GpuStep(("benchmarks", "gpu.capped"), 80.0),
    "allocator": GpuStep(("benchmarks", "gpu.allocator", "--out", "{out}/allocator"), 120.0),
}


def run(name: str, step: GpuStep, out: Path) -> tuple[int | None, tuple[str, ...]]:
    """Run a step, with its output in ``NAME.log``, and end all its processes.

    Returns:
        Its exit code, None after a timeout, and its line of the table.
    """
    began = time.perf_counter()
    log = out / f"{name}.log"
    words = [sys.executable, "-m", *(word.format(out=out.absolute()) for word in step.words)]
    with log.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ended = "not ended" if code is None else f"exit code {code}"
    return code, (name, ended, f"{time.perf_counter() - began:.0f} s", lines[-1][:100] if lines else "")


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; return 1 if one of them failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder to write to (default: %(default)s)")
    add_names(parser, "--steps", STEPS)
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was run", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"
    where = f"{torch.cuda.get_device_name()}, {versions}"
    results = []
    for name in options.steps:
        print(f"{name}: at most {STEPS[name].limit_s:.0f} s, into {options.out / name}.log", flush=True)
        results.append(run(name, STEPS[name], options.out))
        table = join_markdown([("step", "ended", "took", "last line"), *(line for _, line in results)]) + f"\n{where}\n"
        (options.out / "table.md").write_text(table)  # after each step: the next one may not end
    print(table, end="")
    return int(any(code != 0 for code, _ in results))

"""Run on a GPU what needs one: ``make gpu``.

It runs in the Python at hand and installs nothing: a machine with a GPU brings its own PyTorch. Each step has a limit of its own,
can be called alone (``--steps probe``), prints into a log of its own as it goes, and ends with all processes that it has started.
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

from planner.studies.tables import as_markdown

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Step:
    """A step: what ``python -m`` is called with, ``{out}`` for the folder of results, and how long it may take."""

    words: tuple[str, ...]
    limit_s: float


def gpu_tests() -> tuple[str, ...]:
    """Return the files that have tests for a GPU: to collect all others takes longer than to run these."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marks = "pytest.mark.gpu", '"_cuda"'  # or a fixture that is so marked
    return tuple(str(file.relative_to(ROOT)) for file in files if any(mark in file.read_text() for mark in marks))


_TESTS = ("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=20", *gpu_tests())
STEPS: Mapping[str, Step] = {
    "probe": Step(("benchmarks.gpu.probe",), 60.0),
    "tests": Step(_TESTS, 240.0),
    "plans": Step(("benchmarks.gpu.plans", "--fresh", "--out", "{out}/plans"), 240.0),
    "ways": Step(("benchmarks.gpu.plans", "--fresh", "--ways", "offload,cuda-graph,inductor", "--out", "{out}/ways"), 300.0),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a step ended; `code` is None where its time was up."""

    name: str
    code: int | None
    seconds: float
    last: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """A row of the table."""
        return self.name, "not ended" if self.code is None else f"exit code {self.code}", f"{self.seconds:.0f} s", self.last


def run(name: str, step: Step, out: Path) -> Ended:
    """Run a step, with what it prints in ``NAME.log``; none of its processes is left."""
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
    return Ended(name, code, time.perf_counter() - began, lines[-1][:100] if lines else "")


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; 1 if one of them did not end well, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(STEPS), help="with commas (default: %(default)s)")
    options = parser.parse_args(words)
    names = options.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}: choose from {', '.join(STEPS)}")
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was run", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"
    where = f"{torch.cuda.get_device_name()}, {versions}"
    ended = []
    for name in names:
        print(f"{name}: at most {STEPS[name].limit_s:.0f} s, into {options.out / name}.log", flush=True)
        ended.append(run(name, STEPS[name], options.out))
        table = as_markdown([("step", "ended", "took", "last line"), *(step.cells for step in ended)]) + f"\n{where}\n"
        (options.out / "table.md").write_text(table)  # after each step: the next may never end
    print(table, end="")
    return int(any(step.code != 0 for step in ended))


if __name__ == "__main__":
    sys.exit(main())

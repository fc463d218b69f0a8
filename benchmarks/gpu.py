"""What a GPU has to show, in one go: ``make gpu`` runs the tests that need one, then what ``make results-gpu`` measures.

It runs in whatever Python it is called with, and installs nothing: a machine with a GPU brings its own PyTorch. Rows, tables
and figures go into one archive, to be unpacked into results/, and what each step printed into a file beside it.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.report.tables import as_markdown

# Each gets the folder that stands for results/.
STEPS: Mapping[str, tuple[str, ...]] = {
    "tests": ("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"),
    "training": ("benchmarks.training", "--device", "cuda", "--out", "{results}/training/cuda"),
    "compiled": ("benchmarks.compiled", "--device", "cuda", "--out", "{results}/compiled/cuda"),
    "compare": ("benchmarks.compare", "--suites", "cuda", "--out", "{results}/compare"),
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


def run(name: str, words: Sequence[str], log: Path, *, limit_s: float) -> Ended:
    """Run ``python -m words``, with what it prints in `log`."""
    began = time.perf_counter()
    with log.open("w") as file:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *words], stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
            code: int | None = ended.returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Ended(name, code, time.perf_counter() - began, lines[-1][:100] if lines else "")


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps; 1 if one of them did not end well, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(STEPS), help="with commas (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all of them (default: %(default)s)")
    options = parser.parse_args(words)
    names = options.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}: choose from {', '.join(STEPS)}")
    import torch

    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was run", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.perf_counter() + options.limit
    ended = []
    with tempfile.TemporaryDirectory() as results:
        for name in names:
            step = [word.format(results=results) for word in STEPS[name]]
            ended.append(run(name, step, options.out / f"{name}.log", limit_s=max(1.0, until - time.perf_counter())))
            with tarfile.open(options.out / "results.tar.gz", "w:gz") as archive:  # after each step: the next may never end
                archive.add(results, arcname="results")
    where = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"
    )
    table = as_markdown([("step", "ended", "took", "last line"), *(step.cells for step in ended)]) + f"\n{where}\n"
    (options.out / "table.md").write_text(table)
    print(table, end="")
    return int(any(step.code != 0 for step in ended))


if __name__ == "__main__":
    sys.exit(main())

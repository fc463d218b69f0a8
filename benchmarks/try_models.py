"""Models of many kinds under plans, beside eager PyTorch and checkpointing: ``make try-models`` writes results/models/.

By hand, of Hugging Face, timm, torchvision, diffusers and PEFT; all small, with random weights. Each is tried in a process
of its own; one that is refused, fails or does not end is a row too. Models that are in the CSV are not tried again. It fails
if a plan's results are not eager's to the last bit, or if it takes more than its budget.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from benchmarks import try_model
from benchmarks.common import PROVENANCE, command_line, one_thread, provenance
from benchmarks.models_table import failures, table
from benchmarks.try_model import FAILED, MISSING, PLANNED, RAN, Row, sources
from graphs.errors import OutputError
from graphs.io.files import write_text
from planner import options
from planner.studies.rows import read_csv, write_csv

PACKAGES = ("transformers", "timm", "torchvision", "diffusers", "peft")
COLUMNS = (*try_model.COLUMNS, *PROVENANCE, *PACKAGES)
_LIMIT_S = 600.0


def try_one(source: str, model: str, *, repeats: int) -> list[Row]:
    """The rows of one model, by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        words = (sys.executable, "-m", "benchmarks.try_model", source, model, str(out), "--repeats", str(repeats))
        # One thread: two that wait for each other double what other processes disturb. Nothing is downloaded.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        try:
            ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            message = f"exit code {ended.returncode}: {last}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            message = f"not ended after {_LIMIT_S:.0f} s"
        rows = [Row(**row) for row in json.loads(out.read_text())] if out.exists() else []
    return [*rows, Row(source, model, "process", FAILED, message)] if message else rows


def said(rows: Sequence[Row]) -> str:
    """What came of one model, in one line."""
    planned = [row for row in rows if row.way.startswith(PLANNED) and row.status == RAN]
    others = [f"{row.way}: {row.status}: {row.message}" for row in rows if row.status != RAN]
    return "; ".join((f"{sum(row.different == 0 for row in planned)} of {len(planned)} plans like eager", *others))


def main(words: Sequence[str] | None = None) -> int:
    """Try what is not in the CSV; write rows and table after each model. 1 if a plan did what it must not."""
    names = [f"{source}/{model}" for source, models in sources().items() for model in models]
    parser = command_line(__doc__, models=names, out="results/models")
    parser.add_argument("--repeats", type=options.count, default=9, help="steps timed of each way (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="try all of these models anew")
    arguments = parser.parse_args(words)
    one_thread()
    file = arguments.out / "rows.csv"
    about = {**provenance(), **{package: _version(package) for package in PACKAGES}}
    try:
        known = read_csv(file, COLUMNS)
    except OutputError as error:
        parser.error(str(error))
    for name in arguments.models:
        there = [row for row in known if _name(row) == name]
        if there and not arguments.fresh and all(row["status"] != MISSING for row in there):
            continue
        began = time.perf_counter()
        rows = try_one(*name.split("/"), repeats=arguments.repeats)
        print(f"{name}: {said(rows)}; {time.perf_counter() - began:.0f} s", flush=True)
        known = [row for row in known if _name(row) != name]
        known += [{**asdict(row), **about} for row in rows]
        known.sort(key=lambda row: names.index(_name(row)))
        write_csv(file, COLUMNS, known)
    write_text(arguments.out / "table.md", table(file))
    print(table(file), end="")
    failed = failures(file)
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def _name(row: Mapping[str, object]) -> str:
    return f"{row['source']}/{row['model']}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())

"""From the call of ``planner.compile`` to the end of the first step, with memory capped: ``make bench-first-step``.

Each model is trained for 5 steps of SGD: by eager PyTorch without a cap, and then, with the memory of the process capped
(RLIMIT_DATA) half way between the plan's budget and what eager PyTorch takes, by a plan, by a plan with large pages
(THP_MEM_ALLOC_ENABLE=1), by eager PyTorch and by eager PyTorch with its blocks checkpointed. Each time in a process of its
own, with one thread. Rows that are in the CSV are not made again.
It fails if a plan does not train under the cap, or not to the bits of the run without one; memory and seconds that are over
what they should be are marked in the table.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

from benchmarks.common import columns_of, command_line, exit_code, one_thread, provenance, write
from benchmarks.first_step_cases import CASES
from benchmarks.first_step_rows import FAILED, LARGE_PAGES, RAN, UNCAPPED, WAYS, Row, failures
from benchmarks.first_step_table import table
from graphs.errors import OutputError
from planner.studies.rows import read_rows, write_csv

RUN = "benchmarks.first_step_run"  # the module that trains one model in one way
COLUMNS = columns_of(Row)
_LIMIT_S = 600.0


def train(model: str, known: Mapping[str, Row], about: Mapping[str, object]) -> list[Row]:
    """Return the rows of one model, those among `known` as they are; only the first where eager PyTorch cannot train it.

    Args:
        known: by way.
        about: what all rows have in common, by column.
    """
    uncapped = known.get(UNCAPPED)
    if uncapped is None or uncapped.status != RAN:
        uncapped, known = replace(train_in_process(model, UNCAPPED, about), planning_steps=CASES[model].planning_steps), {}
    peak_bytes, static_bytes, growth_bytes = uncapped.eager_peak_bytes, uncapped.static_bytes, uncapped.eager_growth_bytes
    if peak_bytes is None or static_bytes is None or growth_bytes is None:
        return [uncapped]
    budget_bytes = int(CASES[model].share * peak_bytes)
    capped = {
        **about,
        "eager_peak_bytes": peak_bytes,
        "static_bytes": static_bytes,
        "eager_growth_bytes": growth_bytes,
        "budget_bytes": budget_bytes,
        "room_bytes": (budget_bytes - static_bytes + growth_bytes) // 2,
        "planning_steps": uncapped.planning_steps,
    }
    return [uncapped, *(known.get(way) or train_in_process(model, way, capped) for way in WAYS if way != UNCAPPED)]


def train_in_process(model: str, way: str, about: Mapping[str, object]) -> Row:
    """Return the row of a process that trains `model` in one way."""
    row = replace(Row(model, way, FAILED), **about)  # type: ignore[arg-type]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        words = [sys.executable, "-m", RUN, model, way, str(out)]
        if row.room_bytes is not None:
            words += ["--budget", str(row.budget_bytes), "--room", str(row.room_bytes)]
        # One thread: two that wait for each other double what other processes disturb. Nothing is downloaded.
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        variables["THP_MEM_ALLOC_ENABLE"] = str(int(way == LARGE_PAGES))
        try:
            ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            row = replace(row, message=f"exit code {ended.returncode}: {last}" if ended.returncode else "")
        except subprocess.TimeoutExpired:
            row = replace(row, message=f"not ended after {_LIMIT_S:.0f} s")
        if out.exists():
            found = json.loads(out.read_text())
            row = replace(row, **{name: value for name, value in found.items() if value not in (None, "")})
    print(f"{model}, {way}: {row.status} {row.message}".strip() + f"; {time.perf_counter() - began:.0f} s", flush=True)
    return row


def rss_after_importing(module: str) -> int:
    """Return the RSS of a process that has imported `module`."""
    code = f"import {module}; from benchmarks.process_memory import status_bytes; print(status_bytes('VmRSS'))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def environment() -> dict[str, object]:
    """Return what all rows are made on and with, and what imports take there, by column."""
    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = "not installed"
    torch_rss_bytes, dynamo_rss_bytes = map(rss_after_importing, ("torch", "torch._dynamo"))
    imports = {"torch_rss_bytes": torch_rss_bytes, "dynamo_rss_bytes": dynamo_rss_bytes}
    return {**provenance(), "transformers": transformers, **imports}


def main(words: Sequence[str] | None = None) -> int:
    """Train what is not in the CSV; write rows and table after each model. 1 if a plan did not do what it must."""
    parser = command_line(__doc__, models=CASES, out="results/first_step")
    parser.add_argument("--fresh", action="store_true", help="train all of these models anew")
    arguments = parser.parse_args(words)
    if sys.platform != "linux":
        parser.error(f"memory is capped and measured as on Linux, and this is {sys.platform}")
    one_thread()
    file = arguments.out / "rows.csv"
    try:
        rows = read_rows(file, Row)
    except OutputError as error:
        parser.error(str(error))
    known = {} if arguments.fresh else {model: {r.way: r for r in rows if r.model == model} for model in arguments.models}
    missing = [model for model in arguments.models if len(known.get(model, {})) < len(WAYS)]
    about = environment() if missing else {}
    for model in missing:
        rows = [row for row in rows if row.model != model] + train(model, known.get(model, {}), about)
        rows.sort(key=lambda row: tuple(CASES).index(row.model))
        write_csv(file, COLUMNS, map(asdict, rows))
    write(arguments.out, COLUMNS, map(asdict, rows), table(rows))
    return exit_code(failures(rows))


if __name__ == "__main__":
    sys.exit(main())

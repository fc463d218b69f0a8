"""Recomputing, offloading, both in one program, and what others do: ``make bench-offload`` writes results/offload/.

Steps are traced with fake tensors and timed by the roofline of a device. Rows that are in the CSV are not made again, so that
it can be stopped and taken up: all of it is some hours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import columns_of, command_line, write
from benchmarks.offload_case import METHODS, Case
from benchmarks.offload_rows import Row
from benchmarks.offload_table import table
from planner import options
from planner.choices import choices_of
from planner.settings import TraceSettings
from planner.studies.rows import read_rows, write_csv
from planner.workload.tracing import Tracing
from planner.workload.workload import parse_spec

MODELS: Mapping[str, str] = {
    "gpt2-medium": "zoo:gpt2,layers=24,width=1024,heads=16,batch=8,seq=1024,dtype=bfloat16",
    "resnet50": "zoo:resnet50,batch=256",
    "llama-16": "zoo:llama,layers=16,width=2048,seq=16384",
    # Layers as those of Llama 3.1 8B.
    "llama-8b-4k": "zoo:llama,layers=8,kv_heads=8,hidden=14336,seq=4096",
    "llama-8b-16k": "zoo:llama,layers=8,kv_heads=8,hidden=14336,seq=16384",
    "llama-8b-64k": "zoo:llama,layers=8,kv_heads=8,hidden=14336,seq=65536",
    "vit-l": "zoo:vit,layers=24,width=1024,heads=16,batch=64,dtype=bfloat16",
    "unet": "zoo:unet,batch=16",
}
_BETWEEN = ("least + 75%", "least + 50%", "least + 25%", "least + 10%")
_ALL = ("gpt2-medium", "llama-8b-4k", "llama-8b-16k", "llama-8b-64k", "vit-l", "resnet50", "unet")


@dataclass(frozen=True, slots=True)
class Suite:
    """A device, the link to its host (None: as planned for by default), and the budgets of each of its models."""

    device: str
    link: str | None
    budgets: Mapping[str, Sequence[str]]


SUITES: Mapping[str, Suite] = {
    "h200-50GB/s": Suite(
        "h200", "50GB/s", {"gpt2-medium": ("60%", "50%"), "resnet50": ("60%", "40%"), "llama-16": ("60%", "40%")}
    ),
    "h200": Suite("h200", None, dict.fromkeys(_ALL, _BETWEEN)),
    "h100": Suite("h100", None, dict.fromkeys(_ALL, _BETWEEN)),
    "a100": Suite("a100", None, dict.fromkeys(_ALL, _BETWEEN)),
    "rtx4090": Suite("rtx4090", None, dict.fromkeys(_ALL, _BETWEEN)),
}
HOST = "256GB"
LIMIT_S = 60.0
TOLERANCE = 1e-3
COLUMNS = columns_of(Row)


def _place(row: Row) -> tuple[int, ...]:
    """Of `row` among others: as suites, models, budgets and methods are listed."""
    suite = SUITES[row.suite]
    budgets = suite.budgets[row.model]
    listed = ((row.suite, tuple(SUITES)), (row.model, tuple(MODELS)), (row.budget, budgets), (row.method, METHODS))
    return tuple(names.index(name) for name, names in listed)


def solve_suite(name: str, models: Sequence[str], file: Path) -> None:
    """Solve what is missing of a suite, and write the CSV after each row."""
    suite = SUITES[name]
    choices = choices_of(["offload"], suite.link, HOST)
    assert choices is not None
    for model in [model for model in models if model in suite.budgets]:
        graph = Tracing(TraceSettings(roofline=suite.device)).graph(parse_spec(MODELS[model]))
        rows = read_rows(file, Row)
        case = Case(name, model, graph, choices, suite.budgets[model], LIMIT_S, TOLERANCE)
        for row in case.rows({row.key for row in rows}):
            rows = sorted([*rows, row], key=_place)
            write_csv(file, COLUMNS, map(asdict, rows))


def main(words: Sequence[str] | None = None) -> None:
    """Solve what is missing; write rows and table."""
    parser = command_line(__doc__, models=MODELS, out="results/offload")
    parser.add_argument("--suites", type=options.names, default=",".join(SUITES), help="with commas (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="make the rows of these suites and models anew")
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.suites if name not in SUITES]:
        parser.error(f"there is no suite {unknown[0]!r}: choose from {', '.join(SUITES)}")
    file = arguments.out / "rows.csv"
    if arguments.fresh:
        kept = [row for row in read_rows(file, Row) if row.suite not in arguments.suites or row.model not in arguments.models]
        write_csv(file, COLUMNS, map(asdict, kept))
    for name in arguments.suites:
        solve_suite(name, arguments.models, file)
    rows = read_rows(file, Row)
    write(arguments.out, COLUMNS, map(asdict, rows), table(rows))


if __name__ == "__main__":
    main()

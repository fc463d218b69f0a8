"""The resident memory of training beside the budget: ``make bench-resident`` writes results/resident/.

Each row trains in a process of its own with one thread, by a plan with or without an arena. What the process has in memory when
the step is gone, less static memory, is the interpreter: Python, PyTorch and the planner. Linux only.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from benchmarks.command import benchmark
from benchmarks.resident_case import ARENA, MODELS, PLAN, ResidentRow, measured
from graphs.units import format_bytes
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, stream
from planner.studies.rows import listed, missing_keys
from planner.studies.tables import Column, markdown

BUDGETS = ("90%", "80%")
WAYS = (PLAN, ARENA)
_LIMIT_S = 600.0
_WITHIN = 0.02


def measure(name: str, known: Sequence[ResidentRow]) -> Iterator[ResidentRow]:
    """Yield the rows of a model that are not `known`."""
    for budget, way in missing_keys(product(BUDGETS, WAYS), known, "budget", "way"):
        yield from stream(measured, name, budget, way, variables=ALONE, limit_s=_LIMIT_S)


def failures(rows: Sequence[ResidentRow]) -> Iterator[str]:
    """Yield a line for each arena whose process takes more than the budget and the interpreter by over 2%."""
    for row in rows:
        if row.way == ARENA and row.excess > _WITHIN:
            yield f"{row.model} {row.budget}: resident {format_bytes(row.highest_bytes)}, {row.excess:.1%} too much"


TABLE = (
    *("model", "budget", "way"),
    Column("is", "budget_bytes", format_bytes),
    Column("interpreter", "interpreter_bytes", format_bytes),
    Column("highest resident", "highest_bytes", format_bytes),
    Column("beyond both", "excess", "{:+.1%}"),
)


STUDY = Study(
    ResidentRow,
    measure,
    whole=False,
    order=listed(model=MODELS, budget=BUDGETS, way=WAYS),
    pages={"table.md": partial(markdown, columns=TABLE)},
    failures=failures,
)
main = benchmark(STUDY, __doc__, models=MODELS, out="results/resident")


if __name__ == "__main__":
    sys.exit(main())

"""The resident memory of training beside the budget: ``make bench-resident`` writes results/resident/.

Each row trains in a process of its own with one thread, by a plan with or without an arena. What the process has in memory when
the step is gone, less static memory, is the interpreter: Python, PyTorch and the planner. Linux only.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.command import carry_out, command_line
from benchmarks.resident_case import ARENA, MODELS, PLAN, ResidentRow, measured
from graphs.units import format_bytes
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, stream
from planner.studies.rows import listed
from planner.studies.tables import Column, markdown

BUDGETS = ("85%", "70%")
_LIMIT_S = 600.0
_WITHIN = 0.02


def measure(name: str, known: Sequence[ResidentRow]) -> Iterator[ResidentRow]:
    """Yield the rows of a model that are not `known`."""
    made = {(row.budget, row.way) for row in known}
    for budget in BUDGETS:
        for way in (PLAN, ARENA):
            if (budget, way) not in made:
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


def main(words: Sequence[str] | None = None) -> int:
    """Measure the missing models; write rows and table; return 1 if an arena takes too much."""
    arguments = command_line(__doc__, ResidentRow, models=MODELS, out="results/resident").parse_args(words)
    study = Study(
        ResidentRow,
        measure,
        order=listed(model=MODELS, budget=BUDGETS, way=(PLAN, ARENA)),
        pages={"table.md": partial(markdown, columns=TABLE)},
        failures=failures,
    )
    return carry_out(study, arguments, {(name,): name for name in arguments.models})


if __name__ == "__main__":
    sys.exit(main())

"""Training in an arena beside training without, with several optimizers: ``make bench-arena-training``.

Both train by plans for one budget, in turns, in a process with one thread for each row. What they take is counted by PyTorch's
profiler over a whole step with its optimizer, and compared with what was planned.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.arena_training_case import MODELS, OPTIMIZERS, ArenaTrainingRow, measured
from benchmarks.command import Setting, benchmark
from graphs.units import format_bytes
from planner import options
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, stream
from planner.studies.rows import listed
from planner.studies.tables import Column, markdown

_LIMIT_S = 600.0


def measure(name: str, known: Sequence[ArenaTrainingRow], *, repeats: int) -> Iterator[ArenaTrainingRow]:
    """Yield the rows of a model that are not `known`."""
    for optimizer in OPTIMIZERS:
        if optimizer not in {row.optimizer for row in known}:
            yield from stream(measured, name, optimizer, repeats, variables=ALONE, limit_s=_LIMIT_S)


def failures(rows: Sequence[ArenaTrainingRow]) -> Iterator[str]:
    """Yield a line for each row with other bits than eager PyTorch's, or other bytes than planned, and for evaluations beyond."""
    for row in rows:
        if not row.identical:
            yield f"{row.model}, {row.optimizer}: other bits than eager PyTorch's"
        if not row.is_predicted:
            yield f"{row.model}, {row.optimizer}: {row.arena_bytes:,} bytes where {row.predicted_bytes:,} were planned"
        if row.evaluating_bytes > max(row.budget_bytes, row.slab_bytes, row.evaluation_bytes):
            yield f"{row.model}, {row.optimizer}: {row.evaluating_bytes:,} bytes while a batch is evaluated between steps"


TABLE = (
    *("model", "optimizer"),
    Column("budget", "budget_bytes", format_bytes),
    Column("without an arena", "plain_bytes", format_bytes),
    Column("in an arena", "arena_bytes", format_bytes),
    Column("planned", "is_predicted", lambda same: "to 16 bytes" if same else "DIFFERENT"),
    Column("optimizer beside it", "beside_bytes", format_bytes),
    Column("evaluating", "evaluation_bytes", format_bytes),
    Column("with the slab", "evaluating_bytes", format_bytes),
    Column("bits", "identical", lambda same: "identical" if same else "DIFFERENT"),
    Column("step without", "plain_s"),
    Column("in an arena", "arena_ratio"),
    Column("behind evaluations", "evaluated_ratio"),
    Column("planning without", "plain_plan_s"),
    Column("for an arena", "arena_plan_s"),
    Column("addresses with the optimizer", "addresses_s"),
)
STUDY = Study(
    ArenaTrainingRow,
    measure,
    whole=False,
    order=listed(model=MODELS, optimizer=OPTIMIZERS),
    pages={"table.md": partial(markdown, columns=TABLE)},
    failures=failures,
)
main = benchmark(
    STUDY,
    __doc__,
    models=MODELS,
    out="results/arena_training",
    repeats=Setting(20, "steps timed of each", options.count),
)


if __name__ == "__main__":
    sys.exit(main())

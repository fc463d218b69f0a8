"""The models of try-models in an arena and without: ``make bench-arena-models`` writes results/arena_models/.

At half of the way from the least budget to the peak: the bits of eager PyTorch, what the step takes by an independent count (the
slab, and all that PyTorch's profiler sees beside it), and the time of a step in an arena, without one, and of eager PyTorch, in
turns. Each model has a process of its own; refusals and failures are rows too. The benchmark fails if results are not eager's, or
if a step takes more than its budget.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.arena_model import EAGER, IN_ARENA, PLANNED, ArenaModelRow, arena_rows
from benchmarks.try_model import FAILED, RAN
from benchmarks.try_models import in_a_process, trying
from graphs.units import format_bytes
from planner.studies.experiment import Study
from planner.studies.rows import provenance
from planner.studies.tables import Column, bullets, markdown, side_by_side

_LIMIT_S = 300.0


def try_one(case: tuple[str, str], known: Sequence[ArenaModelRow], *, repeats: int) -> Iterator[ArenaModelRow]:
    """Yield the rows of one model."""
    about = provenance()
    yield from (replace(row, **about) for row in in_a_process(arena_rows, ArenaModelRow, case, repeats, _LIMIT_S))


def over(row: ArenaModelRow) -> bool:
    """Return True if a plan takes more than its budget."""
    return row.budget_bytes is not None and (row.taken_bytes or 0) > row.budget_bytes


def summary(rows: Sequence[ArenaModelRow]) -> Iterator[str]:
    """Yield the results of all models, in sentences."""
    arenas = [row for row in rows if row.way == IN_ARENA and row.status == RAN]
    yield (
        f"{len(arenas)} models trained in an arena, by the first plan and by the last: "
        f"{sum(row.different == 0 for row in arenas)} with eager PyTorch's bits, {sum(map(over, arenas))} over the budget"
    )
    outside = [row.counted_bytes for row in arenas if row.counted_bytes is not None]
    if outside:
        yield f"outside of the slab: {format_bytes(min(outside))} to {format_bytes(max(outside))}"
    for name, of in (("planned_ratio", "of the plan without an arena"), ("ratio", "of eager PyTorch")):
        ratios = [getattr(row, name) for row in arenas if getattr(row, name) is not None]
        if ratios:
            yield f"step time over that {of}: {min(ratios):.2f} to {max(ratios):.2f}, {median(ratios):.2f} in the median"


TABLE = (
    Column("model", lambda row: f"{row.source}/{row.model}"),
    Column("budget", "budget_bytes", at=IN_ARENA),
    Column("slab", "arena_bytes", at=IN_ARENA),
    Column("outside", "counted_bytes", at=IN_ARENA),
    Column("taken", "taken_bytes", at=IN_ARENA),
    Column("different results", "different", at=IN_ARENA),
    Column("plan", "ratio", "{:.2f}", at=PLANNED),
    Column("plan in an arena", "ratio", "{:.2f}", at=IN_ARENA),
    Column("arena over none", "planned_ratio", "{:.2f}", at=IN_ARENA),
)


def table(rows: Sequence[ArenaModelRow]) -> str:
    """Return all of it, as Markdown."""
    without = [f"{row.source}/{row.model}, {row.way}: {row.status}: {row.message}" for row in rows if row.status != RAN]
    return "\n".join(
        (
            "# Models of many kinds in an arena\n",
            bullets(summary(rows)),
            "Times are multiples of eager PyTorch's in the same turn.\n",
            markdown(side_by_side(rows, "way", "source", "model"), TABLE),
            "## Not run\n",
            bullets(without) if without else "Nothing.\n",
        )
    )


def failures(rows: Sequence[ArenaModelRow]) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, too much memory, crashes."""
    unsteady = {row.model for row in rows if row.way == EAGER and row.different}
    for row in rows:
        name = f"{row.source}/{row.model}, {row.way}"
        if row.different and row.model not in unsteady:
            yield f"{name}: {row.different} results are not eager's"
        if over(row):
            yield f"{name}: took {format_bytes(row.taken_bytes or 0)}, over its budget of {format_bytes(row.budget_bytes or 0)}"
        if row.status == FAILED:
            yield f"{name}: {row.message}"


def _line(row: ArenaModelRow) -> str:
    return f"{row.source}/{row.model}, {row.way}: {row.status}, {row.different} results are not eager's; {row.message}"


STUDY = Study(ArenaModelRow, try_one, pages={"table.md": table}, failures=failures)
main = trying(STUDY, __doc__, out="results/arena_models", say=_line)


if __name__ == "__main__":
    sys.exit(main())

"""The models of try-models in an arena and without: ``make bench-arena-models`` writes results/arena_models/.

At half of the way from the least budget to the peak: the bits of eager PyTorch, what the step takes by an independent count (the
slab, and all that PyTorch's profiler sees beside it), and the time of a step in an arena, without one, and of eager PyTorch, in
turns. Each model has a process of its own; refusals and failures are rows too. The benchmark fails if results are not eager's, or
if a step takes more than its budget.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import planner
from benchmarks.command import Main
from benchmarks.runner import SEED, Runner, build_fresh, take_turns
from benchmarks.solves import find_least_bytes
from benchmarks.try_models import (
    RAN,
    SETTINGS,
    find_failures,
    format_line,
    format_page,
    get_place,
    has_missing,
    list_names,
    note_failure,
    run_in_process,
)
from graphs.units import format_bytes
from planner.capture.workload.models import Workload
from planner.measure import tracing
from planner.measure.steps import compute_ratio
from planner.plans.summary import summarize
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_value
from planner.studies.tables import Column

EAGER, PLANNED, IN_ARENA = "eager", "planned", "in an arena"
_SHARE = 0.5  # of the way from the least budget to the peak
_LEAST_LIMIT_S = 5.0
_SOLVE_LIMIT_S = 5.0
_TOLERANCE = 0.01
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaModelRow(Made):
    """One way to train one model."""

    source: str = declare_key("where the model is from")
    model: str = declare_key()
    way: str = declare_key("eager, planned, or in an arena")
    status: str = declare_column(
        "ran, refused (with one clear line), failed in another way, or missing: a package is not installed"
    )
    message: str | None = declare_value("of what was refused or failed")
    budget_bytes: int | None = declare_value("half way from the least budget that is found to the peak")
    different: int | None = declare_value(
        "how many results are not eager's to the last bit, by the first plan and by the last one"
    )
    static_bytes: int | None = declare_value("parameters, buffers and inputs")
    counted_bytes: int | None = declare_value("the most that PyTorch's allocator provides at once beside them, by its profiler")
    arena_bytes: int | None = declare_value("the slab")
    swaps: int | None = declare_value("how often a better plan took the place of another")
    time_s: float | None = declare_value("median of a forward and backward pass")
    ratio: float | None = declare_value("median of the multiples of eager's time in the same turn")
    planned_ratio: float | None = declare_value("the same, of the plan's time without an arena")
    seed: int = declare_column("of weights, batches and random state", default=SEED)

    @property
    def taken_bytes(self) -> int | None:
        """All that the step takes; None if it did not run."""
        if self.counted_bytes is None or self.static_bytes is None:
            return None
        return self.static_bytes + self.counted_bytes + (self.arena_bytes or 0)


def try_one(name: str, known: Sequence[ArenaModelRow], *, repeats: int) -> Iterator[ArenaModelRow]:
    """Yield the rows of one model."""
    source, model = name.split("/")
    blank = ArenaModelRow(source=source, model=model, way=EAGER, status=RAN, **collect_provenance())
    return run_in_process(partial(compare_plans, repeats=repeats), blank, _LIMIT_S)


def compare_plans(make: Callable[[], Workload], row: ArenaModelRow, *, repeats: int) -> Iterator[ArenaModelRow]:
    """Yield the rows of a model.

    Args:
        make: the model with a loss function and a batch; random weights.
        row: the columns that its rows share.
        repeats: timed steps of each way, in turn.
    """
    workload = build_fresh(make)
    batch = workload.batch
    reference = Runner.of_eager(workload).train(batch)
    eager = Runner.of_eager(build_fresh(make))
    rows = {EAGER: replace(row, different=len(reference.list_differences(eager.train(batch))))}
    runners = {EAGER: eager}
    graph = tracing.trace(*build_fresh(make), passes=1)
    least = find_least_bytes(graph, _LEAST_LIMIT_S)
    budget_bytes = int(least + _SHARE * (summarize(graph).keep_everything_peak_bytes - least))
    for way in (PLANNED, IN_ARENA):
        row = replace(row, way=way, budget_bytes=budget_bytes)
        try:
            workload = build_fresh(make)
            untrained = Runner.of_eager(workload).copy_state()
            how = {"tolerance": _TOLERANCE, "time_limit_s": _SOLVE_LIMIT_S, "compare_eager": False, "arena": way == IN_ARENA}
            step = planner.compile(*workload, budget=budget_bytes, wait=0, **how)
            runner = Runner(workload, step)
            different = len(reference.list_differences(runner.train(batch)))
            step.wait()
            runner.restore(untrained)
            different += len(reference.list_differences(runner.train(batch)))
            counted = runner.measure_peak_bytes(batch) - runner.count_static_bytes(batch)
            plan = step.plan
            rows[way] = replace(row, different=different, counted_bytes=counted, static_bytes=runner.count_static_bytes(batch))
            rows[way] = replace(rows[way], arena_bytes=plan.arena_bytes, swaps=len(step.history) - 1)
            runners[way] = runner
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            rows[way] = note_failure(row, error)
    yield from rows.values()
    times = take_turns(runners, batch, repeats=repeats)
    for way, own in times.items():
        ratios = {other: compute_ratio(own, times[other])[0] for other in times}
        yield replace(rows[way], time_s=median(own), ratio=ratios[EAGER], planned_ratio=ratios.get(PLANNED))


def is_over(row: ArenaModelRow) -> bool:
    """Return True if a plan takes more than its budget."""
    return row.budget_bytes is not None and (row.taken_bytes or 0) > row.budget_bytes


def summarize_rows(rows: Sequence[ArenaModelRow]) -> Iterator[str]:
    """Yield the results of all models, in sentences."""
    arenas = [row for row in rows if row.way == IN_ARENA and row.status == RAN]
    yield (
        f"{len(arenas)} models trained in an arena, by the first plan and by the last: "
        f"{sum(row.different == 0 for row in arenas)} with eager PyTorch's bits, {sum(map(is_over, arenas))} over the budget"
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


def format_table(rows: Sequence[ArenaModelRow]) -> str:
    """Return all of it, as Markdown."""
    note = "Times are multiples of eager PyTorch's in the same turn.\n"
    return format_page("Models of many kinds in an arena", rows, summarize_rows(rows), note, TABLE)


def list_failures(rows: Sequence[ArenaModelRow]) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, too much memory, crashes."""
    yield from find_failures(
        rows,
        lambda row: (row.taken_bytes or 0) if is_over(row) else None,
        lambda row: f"{row.different} results are not eager's",
    )


STUDY = Study(
    ArenaModelRow, try_one, again=has_missing, order=get_place, pages={"table.md": format_table}, failures=list_failures
)
main = Main(STUDY, __doc__, models=list_names, out="results/arena_models", say=format_line, settings=SETTINGS)

"""Models of many kinds under plans, compared with eager PyTorch and checkpointing: ``make try-models`` writes results/models/.

The models are handwritten, of Hugging Face, timm, torchvision, diffusers and PEFT; all small, with random weights. Each is tried
in its own process; refusals, failures and timeouts are rows too. Rows come after each way to train a model, so that those of a
killed process are not lost. Models in the CSV are skipped. The benchmark fails if a plan's results are not bit-identical to
eager's, or if it exceeds its budget.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any, TypeVar

import planner
from benchmarks.command import Main, Setting, limit_threads
from benchmarks.runner import SEED, Runner, build_fresh, take_turns
from benchmarks.solves import find_least_bytes
from graphs.errors import PlannerError, first_line, typed_line
from graphs.units import format_bytes
from planner.capture.workload.models import Workload
from planner.measure import tracing
from planner.measure.machine import ROOT
from planner.measure.steps import compute_ratio
from planner.plans.summary import summarize
from planner.studies import baselines
from planner.studies.blocks import block_levels
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, ProcessError, iterate_results
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_made, declare_value
from planner.studies.tables import ALL, Column, format_bullets, format_markdown, format_values, get_format, group_side_by_side

PACKAGES = ("transformers", "timm", "torchvision", "diffusers", "peft")
SHARES = (0.7, 0.5, 0.3)  # of the way from the least budget to the peak
_LEAST_LIMIT_S = 5.0
_SOLVE_LIMIT_S = 10.0
_TOLERANCE = 0.01
_LIMIT_S = 600.0

EAGER, PLANNED, CHECKPOINTING, AT_ITS_PEAK = "eager", "planned", "checkpointing", "planned at its peak"
FIRST = ", from the first plan on"
RAN, REFUSED, FAILED, MISSING = "ran", "refused", "failed", "missing"

R = TypeVar("R", bound=Made)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow(Made):
    """One way to train one model."""

    source: str = declare_key("where the model is from")
    model: str = declare_key()
    way: str = declare_key("eager, checkpointing, planned at 50% of the way from the least budget to the peak, or at its peak")
    status: str = declare_column(
        "ran, refused (with one clear line), failed in another way, or missing: a package is not installed"
    )
    message: str | None = declare_value("of what was refused or failed")
    ops: int | None = declare_value("of the captured step")
    least_bytes: int | None = declare_value("the least budget that is found, as the planner says")
    keeping_bytes: int | None = declare_value("the peak of keeping everything, as the planner says")
    budget_bytes: int | None = declare_value("of the plan")
    storages_bytes: int | None = declare_value("the most in storages at once, counted as they come and go")
    peak_bytes: int | None = declare_value("the most of the allocator's, with what kernels take for themselves")
    different: int | None = declare_value(
        "how many losses, gradients, parameters, buffers, random states are not eager's to the last bit"
    )
    first_difference: str | None = declare_value("the name of one of them")
    swaps: int | None = declare_value("how often a better plan took the place of another until then")
    time_s: float | None = declare_value("median of a forward and backward pass")
    ratio: float | None = declare_value("median of the multiples of eager's time in the same turn")
    ratio_of_checkpointing: float | None = declare_value("the same, of checkpointing's time")
    seed: int = declare_column("of weights, batches and random state", default=SEED)
    transformers: str = declare_made("its version, as of the others")
    timm: str = declare_made()
    torchvision: str = declare_made()
    diffusers: str = declare_made()
    peft: str = declare_made()


class Trial:
    """A trial of one model, row by row.

    Args:
        make: the model with a loss function and a batch; random weights.
        row: the columns that its rows share.
        repeats: timed steps of each way, in turn.
    """

    def __init__(self, make: Callable[[], Workload], row: TriedRow, *, repeats: int) -> None:
        self._make = make
        self._row = row
        self._repeats = repeats
        self._rows: dict[str, TriedRow] = {}
        self._runners: dict[str, Runner] = {}

    def run(self) -> Iterator[TriedRow]:
        """Train it in every way; then all that ran take turns for their times. Yields rows as they are known, perhaps twice."""
        plain = build_fresh(self._make)
        self._batch = plain.batch
        self._reference = Runner.of_eager(plain).train(self._batch)
        yield self._measure(EAGER, self._row, lambda: Runner.of_eager(build_fresh(self._make)))
        if self._rows[EAGER].status != RAN:
            return
        workload = build_fresh(self._make)
        try:
            graph = tracing.trace(*workload, passes=1)
            least = find_least_bytes(graph, _LEAST_LIMIT_S)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            yield self._add_known(PLANNED, note_failure(self._row, error))
            return
        keeping = summarize(graph).keep_everything_peak_bytes
        self._row = replace(self._row, ops=len(graph.ops), least_bytes=least, keeping_bytes=keeping)
        for share in SHARES:
            yield from self._try_plans(f"{PLANNED} at {share:.0%}", int(least + share * (keeping - least)))
        yield from self._try_checkpoints()
        yield from self._time_rows()

    def _try_plans(self, way: str, budget_bytes: int) -> Iterator[TriedRow]:
        """Yield the rows of the first plan that fits, and of the last plan found."""
        workload, first = build_fresh(self._make), f"{way}{FIRST}"
        untrained = Runner.of_eager(workload).copy_state()
        row = replace(self._row, budget_bytes=budget_bytes)

        def begin() -> Runner:
            limits: dict[str, Any] = {"tolerance": _TOLERANCE, "time_limit_s": _SOLVE_LIMIT_S}
            return Runner(workload, planner.compile(*workload, budget=budget_bytes, wait=0, **limits))

        def end() -> Runner:
            runner = self._runners.pop(first)
            assert isinstance(runner.step, planner.PlannedStep)
            runner.step.wait()
            runner.restore(untrained)
            return runner

        yield self._measure(first, row, begin)
        if first in self._runners:
            yield self._measure(way, row, end)
        else:
            yield self._add_known(way, self._rows[first])

    def _try_checkpoints(self) -> Iterator[TriedRow]:
        """Yield the rows of the blocks with the least memory, and of a plan for as much; none if no blocks save memory."""
        found: list[tuple[int, Runner]] = []
        for level in range(1, block_levels(build_fresh(self._make).model) + 1):
            workload = build_fresh(self._make)
            runner = Runner(workload, baselines.build_checkpoint_blocks(level).prepare(workload.model, workload.loss_fn))
            try:
                found.append((runner.measure_peak_bytes(self._batch), runner))
            except Exception as error:  # noqa: BLE001 (of PyTorch's own: other levels may go)
                yield self._add_known(CHECKPOINTING, note_failure(self._row, error))
        if not found:
            return
        peak_bytes, runner = min(found, key=lambda pair: pair[0])
        if peak_bytes >= (self._rows[EAGER].peak_bytes or 0):
            refused = replace(self._row, status=REFUSED, message="checkpointing blocks saves no memory")
            yield self._add_known(CHECKPOINTING, refused)
            return
        yield self._measure(CHECKPOINTING, self._row, lambda: runner)
        yield from self._try_plans(AT_ITS_PEAK, peak_bytes)

    def _measure(self, way: str, row: TriedRow, make: Callable[[], Runner]) -> TriedRow:
        try:
            runner = make()
            outcome = runner.train(self._batch)
            differences = self._reference.list_differences(outcome)
            row = replace(
                row,
                status=RAN,
                different=len(differences),
                first_difference=differences[0] if differences else None,
                storages_bytes=runner.measure_storages_bytes(self._batch),
                peak_bytes=runner.measure_peak_bytes(self._batch),
                swaps=len(runner.step.history) - 1 if isinstance(runner.step, planner.PlannedStep) else None,
            )
            self._runners[way] = runner
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            row = note_failure(row, error)
        return self._add_known(way, row)

    def _time_rows(self) -> Iterator[TriedRow]:
        times = take_turns(self._runners, self._batch, repeats=self._repeats)
        for way in times:
            row = replace(self._rows[way], time_s=median(times[way]), ratio=compute_ratio(times[way], times[EAGER])[0])
            if way == AT_ITS_PEAK:
                row = replace(row, ratio_of_checkpointing=compute_ratio(times[way], times[CHECKPOINTING])[0])
            yield self._add_known(way, row)

    def _add_known(self, way: str, row: TriedRow) -> TriedRow:
        self._rows[way] = replace(row, way=way)
        return self._rows[way]


def try_model(make: Callable[[], Workload], row: TriedRow, *, repeats: int) -> Iterator[TriedRow]:
    """Yield the rows of a ``Trial``."""
    return Trial(make, row, repeats=repeats).run()


def note_failure(row: R, error: Exception) -> R:
    """Return `row` with the status and the message of an error."""
    if isinstance(error, PlannerError):
        status, line = REFUSED, first_line(error)
    else:
        status, line = MISSING if isinstance(error, ModuleNotFoundError) else FAILED, typed_line(error)
    return replace(row, status=status, message=line.replace(f"{ROOT}{os.sep}", ""))  # the same wherever the repository lies


def list_sources() -> dict[str, Mapping[str, Callable[[], Workload]]]:
    """Return models by name, by package; a package is imported only when one of its models is built."""
    from benchmarks.models import diffusers_models, handwritten, huggingface_models, peft_models, timm_models, torchvision_models

    torchvision_models.declare_torchvision_ops()  # others import it too
    return {
        "by hand": handwritten.MODELS,
        "transformers": huggingface_models.MODELS,
        "timm": timm_models.MODELS,
        "torchvision": torchvision_models.MODELS,
        "diffusers": diffusers_models.MODELS,
        "peft": peft_models.MODELS,
    }


def iterate_rows(trial: Callable[..., Iterable[R]], blank: Any) -> Iterator[R]:
    """Yield the rows of a `trial` of one model, including its failure, with the columns of `blank`."""
    limit_threads()
    try:
        yield from trial(list_sources()[blank.source][blank.model], blank)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        yield note_failure(blank, error)


def run_in_process(trial: Callable[..., Iterable[R]], blank: R, limit_s: float) -> Iterator[R]:
    """Yield the rows of a trial of one model, by a process of its own, which may fail as a row does.

    Args:
        trial: yields rows with a `way`, some perhaps twice; of a function that makes the model, and `blank`.
        blank: the columns that all rows share, with the names of the source and the model.
    """
    rows: dict[str, Any] = {}
    try:
        for row in iterate_results(iterate_rows, trial, blank, variables=ALONE, limit_s=limit_s):
            rows[row.way] = row
    except ProcessError as error:
        rows["process"] = replace(blank, way="process", status=FAILED, message=str(error))
    yield from rows.values()


def try_one(name: str, known: Sequence[TriedRow], *, repeats: int) -> Iterator[TriedRow]:
    """Yield the rows of one model."""
    source, model = name.split("/")
    blank = TriedRow(source=source, model=model, way=EAGER, status=RAN, **collect_provenance(packages=PACKAGES))
    return run_in_process(partial(try_model, repeats=repeats), blank, _LIMIT_S)


def select_plans(rows: Iterable[TriedRow]) -> list[TriedRow]:
    """Return those rows that are steps by a plan."""
    return [row for row in rows if row.way.startswith(PLANNED) and row.status == RAN]


def is_over(row: TriedRow) -> bool:
    """Return True if a plan exceeded its budget, including the memory of kernels."""
    return (row.peak_bytes or 0) > (row.budget_bytes or 0)


def is_over_in_storages(row: TriedRow) -> bool:
    """Return True if a plan exceeded its budget in storages."""
    return (row.storages_bytes or 0) > (row.budget_bytes or 0)


def summarize_rows(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield the summary of all models, in sentences."""
    planned = select_plans(rows)
    tried, models = (len({(row.source, row.model) for row in some}) for some in (rows, planned))
    last = [row for row in planned if not row.way.endswith(FIRST)]
    yield (
        f"{tried} models were tried, and {models} of them planned at {len(last)} budgets, and trained twice at "
        f"each: from the first plan on that fits, and by the last one. Of these {len(planned)} runs "
        f"{sum(row.different == 0 for row in planned)} have eager PyTorch's losses, gradients, parameters, buffers and random "
        f"state to the last bit, {sum(map(is_over_in_storages, planned))} took more than the budget in storages, counted as they "
        f"come and go, and {sum(map(is_over, planned))} with what kernels take for themselves. A better plan took the place of "
        f"the first at {sum((row.swaps or 0) > 0 for row in last)} budgets."
    )
    for way in _AT_SHARES:
        if ratios := [row.ratio for row in planned if row.way == way and row.ratio is not None]:
            yield (
                f"{way} of the way from the least budget to the peak: {median(ratios):.2f} times eager's step in the median, "
                f"{min(ratios):.2f} to {max(ratios):.2f}."
            )
    if ratios := [row.ratio_of_checkpointing for row in planned if row.ratio_of_checkpointing is not None]:
        yield (
            f"At the peak of checkpointing blocks, where that saves memory ({len(ratios)} models), the plan took "
            f"{min(ratios):.2f} to {max(ratios):.2f} of checkpointing's time, {median(ratios):.2f} in the median."
        )
    if wrong := [row.model for row in rows if row.way == CHECKPOINTING and row.status == RAN and row.different]:
        yield f"Checkpointing's own results are not eager's in {len(wrong)} models: {', '.join(wrong)}."


def _make_first_known_column(title: str, name: str) -> Column:
    """Return a column with the first known value of a model's rows."""

    def find_known(found: Mapping[str, TriedRow]) -> object:
        return next((value for row in found.values() if (value := getattr(row, name)) is not None), None)

    return Column(title, find_known, get_format(name), at=ALL)


def _make_way_column(title: str, way: str, name: str, form: str | None = None) -> Column:
    """Return a column of one way, empty if it did not run."""
    return Column(title, lambda row: getattr(row, name) if row.status == RAN else None, form or get_format(name), at=way)


def _make_count_column(title: str, counts: Callable[[TriedRow], bool]) -> Column:
    """Return the column with the number of plans for which `counts` is True, of all plans of a model."""
    return Column(title, lambda found: f"{sum(map(counts, planned := select_plans(found.values())))} of {len(planned)}", at=ALL)


_AT_SHARES = [f"{PLANNED} at {share:.0%}" for share in SHARES]
_PLANNED_FOR_IT = "planned for it"
TABLE = (
    Column("model", lambda row: f"{row.source}/{row.model}"),
    _make_first_known_column("ops", "ops"),
    _make_way_column("eager's peak", EAGER, "peak_bytes"),
    _make_first_known_column("least", "least_bytes"),
    *(_make_way_column(f"{share:.0%}", way, "ratio", "{:.2f}") for share, way in zip(SHARES, _AT_SHARES, strict=True)),
    _make_count_column("identical", lambda row: row.different == 0),
    _make_count_column("within budget", lambda row: not is_over(row) and not is_over_in_storages(row)),
    _make_way_column("checkpointing's peak", CHECKPOINTING, "peak_bytes"),
    _make_way_column("checkpointing", CHECKPOINTING, "ratio", "{:.2f}"),
    _make_way_column(_PLANNED_FOR_IT, AT_ITS_PEAK, "ratio", "{:.2f}"),
    _make_way_column("of checkpointing's time", AT_ITS_PEAK, "ratio_of_checkpointing", "{:.2f}"),
)


def format_table(rows: Sequence[TriedRow]) -> str:
    """Return all of it, as Markdown."""
    note = (
        f"Times are multiples of eager PyTorch's in the same turn, at budgets so far from the least to the peak. The budget of "
        f"`{_PLANNED_FOR_IT}` is the measured peak of checkpointing blocks.\n"
    )
    packages = ", ".join(f"{name} {format_values(rows, name)}" for name in PACKAGES)
    made = f"Seed {format_values(rows, 'seed')}; {format_values(rows, 'machine')}; torch {format_values(rows, 'torch')}"
    about = f"{made}, {packages}; commit {format_values(rows, 'commit')}.\n"
    said, heading, silent = summarize_rows(rows), "Not planned", (CHECKPOINTING,)
    return f"{format_page('Models of many kinds', rows, said, note, TABLE, heading=heading, silent=silent)}\n{about}"


def list_failures(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, peaks over the budget, crashes."""

    def find_excess(row: TriedRow) -> int | None:
        taken_bytes = max(row.peak_bytes or 0, row.storages_bytes or 0)
        return taken_bytes if row.budget_bytes is not None and taken_bytes > row.budget_bytes else None

    yield from find_failures(
        [row for row in rows if row.way != CHECKPOINTING],
        find_excess,
        lambda row: f"{row.different} results are not eager's: {row.first_difference}",
    )


def format_page(
    title: str,
    rows: Sequence[Any],
    said: Iterable[str],
    note: str,
    table: Sequence[Column | str],
    *,
    heading: str = "Not run",
    silent: Collection[str] = (),
) -> str:
    """Return a page: what is `said`, the `note` and the `table`, then why ways did not run, but for `silent` ones."""
    without = [row for row in rows if row.status != RAN and row.way not in silent]
    refused = format_bullets(f"{row.source}/{row.model}, {row.way}: {row.status}: {row.message}" for row in without)
    lines = format_markdown(group_side_by_side(rows, "way", "source", "model"), table)
    return "\n".join((f"# {title}\n", format_bullets(said), note, lines, f"## {heading}\n", refused if without else "Nothing.\n"))


def find_failures(
    rows: Sequence[Any], taken_over: Callable[[Any], int | None], describe_difference: Callable[[Any], str]
) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, too much memory, crashes.

    Args:
        rows: with one for eager PyTorch of each model.
        taken_over: returns the bytes that were taken if that is over the budget; None otherwise.
        describe_difference: returns what is said of results that are not eager's.
    """
    unsteady = {row.model for row in rows if row.way == EAGER and row.different}
    for row in rows:
        name = f"{row.source}/{row.model}, {row.way}"
        if row.different and row.model not in unsteady:
            yield f"{name}: {describe_difference(row)}"
        if (taken_bytes := taken_over(row)) is not None:
            yield f"{name}: took {format_bytes(taken_bytes)}, over its budget of {format_bytes(row.budget_bytes or 0)}"
        if row.status == FAILED:
            yield f"{name}: {row.message}"


@cache
def list_names() -> tuple[str, ...]:
    """Return the names of all models, with their sources."""
    return tuple(f"{source}/{model}" for source, models in list_sources().items() for model in models)


def get_place(row: Any) -> int:
    """Return the place of a row's model among all."""
    return list_names().index(f"{row.source}/{row.model}")


def has_missing(rows: Sequence[Any]) -> bool:
    """Return True if a package was missing: it is looked for again."""
    return any(row.status == MISSING for row in rows)


def format_line(row: Any) -> str:
    """Return the line that is printed for a row."""
    found = f"{row.different} results are not eager's" if row.status == RAN else f"{row.status}: {row.message}"
    return f"{row.source}/{row.model}, {row.way}: {found}"


STUDY = Study(TriedRow, try_one, again=has_missing, order=get_place, pages={"table.md": format_table}, failures=list_failures)
SETTINGS = {"repeats": Setting(9, "steps timed of each way")}
main = Main(STUDY, __doc__, models=list_names, out="results/models", say=format_line, settings=SETTINGS)

"""Models of many kinds under plans, compared with eager PyTorch: ``make try-models`` writes results/models/.

The models are handwritten, of Hugging Face, timm, torchvision, diffusers and PEFT; all small, with random weights. Each is tried
in its own process; refusals, failures and timeouts are rows too. Rows come after each way to train a model, so that those of a
killed process are not lost. Models in the CSV are skipped. The benchmark fails if results are not bit-identical to eager's, or if
a step exceeds its budget. The ways to train a model (``--ways``):

- planned: at shares of the way from the least budget to the peak, from the first plan on and by the last one
- checkpointing: of blocks, and by plans at its measured peak
- in an arena: by plans half way to the peak, in an arena and without; ``make bench-arena-models`` writes results/arena_models/
- compile, checkpoint, backend, rematerialize: by each entry point; ``make try-entries`` writes results/entries/
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any, TypeVar

import torch

import planner
from benchmarks.command import Main, Setting, limit_threads, make_names_reader
from benchmarks.runner import SEED, Runner, build_fresh, build_whole_step, take_turns
from benchmarks.solves import find_least_bytes
from planner.capture.workload.models import Workload
from planner.graphs.errors import PlannerError, first_line, typed_line
from planner.graphs.units import format_bytes
from planner.measure import tracing
from planner.measure.machine import ROOT
from planner.measure.steps import Step, StepOutcome, compute_ratio, run_both
from planner.plans.summary import summarize
from planner.studies import baselines
from planner.studies.blocks import block_levels
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, ProcessError, iterate_results
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_made, declare_value
from planner.studies.tables import (
    ALL,
    Column,
    describe_provenance,
    format_bullets,
    format_markdown,
    format_values,
    get_format,
    group_side_by_side,
)
from planner.train.eager.session import Rematerialization

PACKAGES = ("transformers", "timm", "torchvision", "diffusers", "peft")
SHARES = (0.7, 0.5, 0.3)  # of the way from the least budget to the peak
_LEAST_LIMIT_S = 5.0
_SOLVE: Mapping[str, Any] = {"tolerance": 0.01, "time_limit_s": 10.0}
_ENOUGH_BYTES = 2**40

EAGER, PLANNED, CHECKPOINTING, AT_ITS_PEAK, IN_ARENA = "eager", "planned", "checkpointing", "planned at its peak", "in an arena"
FIRST = ", from the first plan on"
COMPILE, CHECKPOINT, BACKEND, REMATERIALIZE = ENTRIES = ("compile", "checkpoint", "backend", "rematerialize")
WAYS = (PLANNED, CHECKPOINTING, IN_ARENA, *ENTRIES)
RAN, REFUSED, FAILED, MISSING = "ran", "refused", "failed", "missing"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow(Made):
    """One way to train one model."""

    source: str = declare_key("where the model is from")
    model: str = declare_key()
    way: str = declare_key("eager, or a way and how far its budget is from the least budget to the peak")
    status: str = declare_column(
        "ran, refused (with one clear line), failed in another way, or missing: a package is not installed"
    )
    message: str | None = declare_value("of what was refused or failed")
    ops: int | None = declare_value("of the captured step")
    least_bytes: int | None = declare_value("the least budget that is found, as the planner says")
    keeping_bytes: int | None = declare_value("the peak of keeping everything, as the planner says")
    budget_bytes: int | None = declare_value("of the plan")
    static_bytes: int | None = declare_value("parameters, buffers and inputs")
    arena_bytes: int | None = declare_value("the slab")
    storages_bytes: int | None = declare_value("the most in storages at once, counted as they come and go")
    peak_bytes: int | None = declare_value("the most of the allocator's, with what kernels take for themselves, and of the slab")
    different: int | None = declare_value(
        "how many losses, gradients, parameters, buffers, random states are not eager's to the last bit"
    )
    first_difference: str | None = declare_value("the name of one of them")
    swaps: int | None = declare_value("how often a better plan took the place of another until then")
    time_s: float | None = declare_value("median of a forward and backward pass")
    ratio: float | None = declare_value("median of the multiples of eager's time in the same turn")
    other_ratio: float | None = declare_value("the same, of checkpointing's time at its peak, or of the plan's without an arena")
    seed: int = declare_column("of weights, batches and random state", default=SEED)
    transformers: str = declare_made("its version, as of the others")
    timm: str = declare_made()
    torchvision: str = declare_made()
    diffusers: str = declare_made()
    peft: str = declare_made()

    @property
    def outside_bytes(self) -> int | None:
        """Bytes that the step takes besides static memory and its slab; None if it did not run in an arena."""
        known = self.peak_bytes, self.static_bytes, self.arena_bytes
        return None if None in known else self.peak_bytes - self.static_bytes - self.arena_bytes  # type: ignore[operator]

    @property
    def is_over(self) -> bool:
        """True if the step exceeded its budget, including the memory of kernels."""
        return self.budget_bytes is not None and (self.peak_bytes or 0) > self.budget_bytes

    @property
    def is_over_in_storages(self) -> bool:
        """True if the step exceeded its budget in storages."""
        return self.budget_bytes is not None and (self.storages_bytes or 0) > self.budget_bytes


class Trial:
    """A trial of one model, row by row.

    Args:
        make: the model with a loss function and a batch; random weights.
        row: the columns that its rows share.
        repeats: timed steps of each way, in turn.
    """

    def __init__(self, make: Callable[[], Workload], row: TriedRow, *, ways: Sequence[str], repeats: int) -> None:
        self._build = partial(build_fresh, make)
        self._row = row
        self._ways = ways
        self._repeats = repeats
        self._rows: dict[str, TriedRow] = {}
        self._runners: dict[str, Runner] = {}

    def run(self) -> Iterator[TriedRow]:
        """Train it in every way; then all that ran take turns for their times. Yields rows as they are known, perhaps twice."""
        plain = self._build()
        self._batch = plain.batch
        self._reference = Runner.of_eager(plain).train(self._batch)
        yield self._measure(EAGER, self._row, lambda: Runner.of_eager(self._build()))
        eager = self._rows[EAGER]
        if eager.peak_bytes is None or eager.static_bytes is None:
            return
        ways = self._ways
        try:
            graph = tracing.trace(*self._build(), passes=1)
            least, keeping = find_least_bytes(graph, _LEAST_LIMIT_S), summarize(graph).keep_everything_peak_bytes
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row; entry points may be able to train it)
            self._least_bytes, self._most_bytes = (eager.static_bytes + eager.peak_bytes) // 2, eager.peak_bytes
            ways = [way for way in ways if way in ENTRIES]
            if len(ways) < len(self._ways):
                yield self._add_known(PLANNED, note_failure(self._row, error))
        else:
            self._least_bytes, self._most_bytes = least, keeping
            self._row = replace(self._row, ops=len(graph.ops), least_bytes=least, keeping_bytes=keeping)
        tries = {PLANNED: self._try_shares, CHECKPOINTING: self._try_checkpoints, IN_ARENA: self._try_arena}
        for way in ways:
            yield from tries[way]() if way in tries else self._try_entry(way)
        yield from self._time_rows()

    def _choose_budget(self, share: float) -> int:
        return int(self._least_bytes + share * (self._most_bytes - self._least_bytes))

    def _try_shares(self) -> Iterator[TriedRow]:
        for share in SHARES:
            yield from self._try_plans(f"{PLANNED} at {share:.0%}", self._choose_budget(share))

    def _try_arena(self) -> Iterator[TriedRow]:
        for way in (PLANNED, IN_ARENA):
            yield from self._try_plans(way, self._choose_budget(0.5), arena=way == IN_ARENA)

    def _try_plans(self, way: str, budget_bytes: int, *, arena: bool | None = None) -> Iterator[TriedRow]:
        """Yield the rows of the first plan that fits, and of the last plan found."""
        workload, first = self._build(), f"{way}{FIRST}"
        untrained = Runner.of_eager(workload).copy_state()
        row = replace(self._row, budget_bytes=budget_bytes)

        def begin() -> Runner:
            return Runner(workload, planner.compile(*workload, budget=budget_bytes, wait=0, arena=arena, **_SOLVE))

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
        for level in range(1, block_levels(self._build().model) + 1):
            workload = self._build()
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

    def _try_entry(self, entry: str) -> Iterator[TriedRow]:
        """Yield the rows of an entry point, which are not timed."""
        for share in (0.5,) if entry == REMATERIALIZE else (1.0, 0.5):
            way, row = f"{entry} at {share:.0%}", replace(self._row, budget_bytes=self._choose_budget(share))
            torch.compiler.reset()  # runs share functions, and a function that was compiled often runs without a plan
            if entry == REMATERIALIZE:
                yield self._try_block(way)
            else:
                yield self._measure(way, row, partial(self._build_runner, entry, row.budget_bytes))
                self._runners.pop(way, None)

    def _build_runner(self, entry: str, budget_bytes: int) -> Runner:
        workload = self._build()
        return Runner(workload, _STEPS[entry](workload, {"budget": budget_bytes, **_SOLVE}))

    def _try_block(self, way: str) -> TriedRow:
        """Return the row of ``planner.rematerialize``, half way from a budget that is enough to the peak.

        Training and measuring have blocks of their own, and budgets of their own: another batch may need more.
        """
        try:
            budget_bytes = self._choose_block_budget(_measure_block)
            _, peak_bytes = self._run_block(budget_bytes, _measure_block)
            _, outcome = self._run_block(self._choose_block_budget(_train_block), _train_block)
            row = replace(self._row, budget_bytes=budget_bytes, peak_bytes=peak_bytes)
            return self._add_known(way, self._judge(row, outcome))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            return self._add_known(way, note_failure(self._row, error))

    def _choose_block_budget(self, work: Callable[[Runner, int], object]) -> int:
        session, _ = self._run_block(_ENOUGH_BYTES, work)
        return (session.peak_bytes + session.least_budget()) // 2

    def _run_block(self, budget_bytes: int, work: Callable[[Runner, int], T]) -> tuple[Rematerialization, T]:
        """Return a block, and what `work` returned in it for the model and the bytes of all tensors at its beginning."""
        runner = Runner.of_eager(self._build())
        with planner.rematerialize(budget_bytes) as session:
            return session, work(runner, session.peak_bytes)

    def _measure(self, way: str, row: TriedRow, make: Callable[[], Runner]) -> TriedRow:
        try:
            runner = make()
            row = self._judge(row, runner.train(self._batch))
            peak_bytes, static_bytes = runner.measure_peak_bytes(self._batch), runner.count_static_bytes(self._batch)
            if isinstance(runner.step, planner.PlannedStep):
                row = replace(row, swaps=len(runner.step.history) - 1)
            if way.startswith(IN_ARENA):
                arena_bytes = runner.step.plan.arena_bytes or 0  # type: ignore[attr-defined]
                row = replace(row, arena_bytes=arena_bytes)
                peak_bytes += arena_bytes
            elif not way.startswith(ENTRIES) or way == CHECKPOINTING:
                row = replace(row, storages_bytes=runner.measure_storages_bytes(self._batch))
            row = replace(row, status=RAN, static_bytes=static_bytes, peak_bytes=peak_bytes)
            self._runners[way] = runner
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            row = note_failure(row, error)
        return self._add_known(way, row)

    def _judge(self, row: TriedRow, outcome: StepOutcome) -> TriedRow:
        differences = self._reference.list_differences(outcome)
        return replace(row, different=len(differences), first_difference=differences[0] if differences else None)

    def _time_rows(self) -> Iterator[TriedRow]:
        times = take_turns(self._runners, self._batch, repeats=self._repeats)
        for way in times:
            row = replace(self._rows[way], time_s=median(times[way]), ratio=compute_ratio(times[way], times[EAGER])[0])
            other = {AT_ITS_PEAK: CHECKPOINTING, IN_ARENA: PLANNED}.get(way)
            if other in times:
                row = replace(row, other_ratio=compute_ratio(times[way], times[other])[0])
            yield self._add_known(way, row)

    def _add_known(self, way: str, row: TriedRow) -> TriedRow:
        self._rows[way] = replace(row, way=way)
        return self._rows[way]


def _compile(workload: Workload, settings: Mapping[str, Any]) -> Step:
    return planner.compile(*workload, **settings)


def _checkpoint(workload: Workload, settings: Mapping[str, Any]) -> Step:
    return planner.checkpoint(build_whole_step(workload), **settings)


def _compile_by_backend(workload: Workload, settings: Mapping[str, Any]) -> Step:
    return torch.compile(build_whole_step(workload), backend="planner", options=settings)


_STEPS = {COMPILE: _compile, CHECKPOINT: _checkpoint, BACKEND: _compile_by_backend}


def _train_block(runner: Runner, _: int) -> StepOutcome:
    return runner.train(runner.workload.batch)


def _measure_block(runner: Runner, static_bytes: int) -> int:
    batch = runner.workload.batch
    for _ in range(2):  # the first steps show what kernels take, which is not seen while the next one is measured
        run_both(runner.step, batch)
    return static_bytes + runner.measure_peak_bytes(batch) - runner.count_static_bytes(batch)


def note_failure(row: TriedRow, error: Exception) -> TriedRow:
    """Return `row` with the status and the message of an error."""
    error = getattr(error, "inner_exception", error)  # of a backend
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


def try_model(blank: TriedRow, *, ways: Sequence[str], repeats: int) -> Iterator[TriedRow]:
    """Yield the rows of a ``Trial`` of one model, including its failure, with the columns of `blank`."""
    limit_threads()
    try:
        yield from Trial(list_sources()[blank.source][blank.model], blank, ways=ways, repeats=repeats).run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        yield note_failure(blank, error)


def try_one(name: str, known: Sequence[TriedRow], *, ways: Sequence[str], seconds: float, repeats: int) -> Iterator[TriedRow]:
    """Yield the rows of one model, by a process of its own, which may fail as a row does."""
    source, model = name.split("/")
    blank = TriedRow(source=source, model=model, way=EAGER, status=RAN, **collect_provenance(packages=PACKAGES))
    rows: dict[str, TriedRow] = {}
    try:
        for row in iterate_results(partial(try_model, ways=ways, repeats=repeats), blank, variables=ALONE, limit_s=seconds):
            rows[row.way] = row
    except ProcessError as error:
        rows["process"] = replace(blank, way="process", status=FAILED, message=str(error))
    yield from rows.values()


def select_plans(rows: Iterable[TriedRow]) -> list[TriedRow]:
    """Return those rows that are steps by a plan outside of an arena."""
    return [row for row in rows if row.way.startswith(PLANNED) and row.status == RAN]


def summarize_plans(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield the results of plans at shares of the way to the peak, and at that of checkpointing, in sentences."""
    planned = select_plans(rows)
    tried, models = (len({(row.source, row.model) for row in some}) for some in (rows, planned))
    last = [row for row in planned if not row.way.endswith(FIRST)]
    yield (
        f"{tried} models were tried, and {models} of them planned at {len(last)} budgets, and trained twice at "
        f"each: from the first plan on that fits, and by the last one. Of these {len(planned)} runs "
        f"{sum(row.different == 0 for row in planned)} have eager PyTorch's losses, gradients, parameters, buffers and random "
        f"state to the last bit, {sum(row.is_over_in_storages for row in planned)} took more than the budget in storages, "
        f"counted as they come and go, and {sum(row.is_over for row in planned)} with what kernels take for themselves. A "
        f"better plan took the place of the first at {sum((row.swaps or 0) > 0 for row in last)} budgets."
    )
    for way in _AT_SHARES:
        if ratios := [row.ratio for row in planned if row.way == way and row.ratio is not None]:
            yield (
                f"{way} of the way from the least budget to the peak: {median(ratios):.2f} times eager's step in the median, "
                f"{min(ratios):.2f} to {max(ratios):.2f}."
            )
    if ratios := [row.other_ratio for row in planned if row.other_ratio is not None]:
        yield (
            f"At the peak of checkpointing blocks, where that saves memory ({len(ratios)} models), the plan took "
            f"{min(ratios):.2f} to {max(ratios):.2f} of checkpointing's time, {median(ratios):.2f} in the median."
        )
    if wrong := [row.model for row in rows if row.way == CHECKPOINTING and row.status == RAN and row.different]:
        yield f"Checkpointing's own results are not eager's in {len(wrong)} models: {', '.join(wrong)}."


def summarize_arenas(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield the results of plans in arenas, in sentences."""
    arenas = [row for row in rows if row.way == IN_ARENA and row.status == RAN]
    yield (
        f"{len(arenas)} models trained in an arena, by the first plan and by the last: "
        f"{sum(row.different == 0 for row in arenas)} with eager PyTorch's bits, {sum(row.is_over for row in arenas)} over the "
        "budget"
    )
    if outside := [row.outside_bytes for row in arenas if row.outside_bytes is not None]:
        yield f"outside of the slab: {format_bytes(min(outside))} to {format_bytes(max(outside))}"
    for name, of in (("other_ratio", "of the plan without an arena"), ("ratio", "of eager PyTorch")):
        if ratios := [getattr(row, name) for row in arenas if getattr(row, name) is not None]:
            yield f"step time over that {of}: {min(ratios):.2f} to {max(ratios):.2f}, {median(ratios):.2f} in the median"


def summarize_entries(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield the results of each entry point, in sentences."""
    for entry in ENTRIES:
        if tried := [row for row in rows if row.way.startswith(f"{entry} at ")]:
            ran = [row for row in tried if row.status == RAN]
            yield (
                f"{entry}: {len(ran)} of {len(tried)} runs ended, {sum(row.different == 0 for row in ran)} with eager PyTorch's "
                f"bits, {sum(row.is_over for row in ran)} over the budget"
            )


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


def _format_entry(row: TriedRow) -> str:
    if row.status != RAN:
        return row.status
    bits = "same bits" if row.different == 0 else f"{row.different} differ"
    return f"{bits}, {format_bytes(row.peak_bytes or 0)} of {format_bytes(row.budget_bytes or 0)}"


_AT_SHARES = [f"{PLANNED} at {share:.0%}" for share in SHARES]
_PLANNED_FOR_IT = "planned for it"
_MODEL = Column("model", lambda row: f"{row.source}/{row.model}")
_EAGER_PEAK = _make_way_column("eager's peak", EAGER, "peak_bytes")
_PLANS = (
    _MODEL,
    _make_first_known_column("ops", "ops"),
    _EAGER_PEAK,
    _make_first_known_column("least", "least_bytes"),
    *(_make_way_column(f"{share:.0%}", way, "ratio", "{:.2f}") for share, way in zip(SHARES, _AT_SHARES, strict=True)),
    _make_count_column("identical", lambda row: row.different == 0),
    _make_count_column("within budget", lambda row: not row.is_over and not row.is_over_in_storages),
    _make_way_column("checkpointing's peak", CHECKPOINTING, "peak_bytes"),
    _make_way_column("checkpointing", CHECKPOINTING, "ratio", "{:.2f}"),
    _make_way_column(_PLANNED_FOR_IT, AT_ITS_PEAK, "ratio", "{:.2f}"),
    _make_way_column("of checkpointing's time", AT_ITS_PEAK, "other_ratio", "{:.2f}"),
)
_ARENAS = (
    _MODEL,
    Column("budget", "budget_bytes", at=IN_ARENA),
    Column("slab", "arena_bytes", at=IN_ARENA),
    Column("outside", "outside_bytes", at=IN_ARENA),
    Column("taken", "peak_bytes", at=IN_ARENA),
    Column("different results", "different", at=IN_ARENA),
    Column("plan", "ratio", "{:.2f}", at=PLANNED),
    Column("plan in an arena", "ratio", "{:.2f}", at=IN_ARENA),
    Column("arena over none", "other_ratio", "{:.2f}", at=IN_ARENA),
)
_AT_ENTRIES = (*(f"{entry} at {share}" for entry in _STEPS for share in ("100%", "50%")), f"{REMATERIALIZE} at 50%")
_ENTRIES = (_MODEL, _EAGER_PEAK, *(Column(way, _format_entry, at=way) for way in _AT_ENTRIES))
_IN_TURN = "Times are multiples of eager PyTorch's in the same turn"
_SECTIONS = (
    (
        (*_AT_SHARES, CHECKPOINTING),
        summarize_plans,
        (
            f"{_IN_TURN}, at budgets so far from the least to the peak. The budget of `{_PLANNED_FOR_IT}` is the measured peak "
            "of checkpointing blocks."
        ),
        _PLANS,
    ),
    ((IN_ARENA,), summarize_arenas, f"{_IN_TURN}.", _ARENAS),
    (
        _AT_ENTRIES,
        summarize_entries,
        (
            "Bits of losses, gradients, parameters, buffers and random state after three steps, and the measured peak of the "
            "budget. Budgets are so far from the least one of planner.compile to the peak. That of planner.rematerialize is "
            "half way from the least one that a replay of its step needs to its peak."
        ),
        _ENTRIES,
    ),
)


def format_table(rows: Sequence[TriedRow]) -> str:
    """Return what all ways that have rows have come to, and why others did not run, as Markdown."""
    found, models = {row.way for row in rows}, group_side_by_side(rows, "way", "source", "model")
    parts = ["# Models of many kinds\n"]
    for ways, summarize_rows, note, table in _SECTIONS:
        if found.intersection(ways):
            parts += [format_bullets(summarize_rows(rows)), f"{note}\n", format_markdown(models, table)]
    without = [row for row in rows if row.status != RAN and row.way != CHECKPOINTING]
    refused = format_bullets(f"{row.source}/{row.model}, {row.way}: {row.status}: {row.message}" for row in without)
    made = describe_provenance(rows, *(name for name in PACKAGES if format_values(rows, name)))
    return "\n".join(
        (*parts, "## Not run\n", refused if without else "Nothing.\n", f"Seed {format_values(rows, 'seed')}; {made}")
    )


def list_failures(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, peaks over the budget, crashes."""
    unsteady = {row.model for row in rows if row.way == EAGER and row.different}
    for row in [row for row in rows if row.way != CHECKPOINTING]:
        name = f"{row.source}/{row.model}, {row.way}"
        if row.different and row.model not in unsteady:
            yield f"{name}: {row.different} results are not eager's: {row.first_difference}"
        if row.is_over or row.is_over_in_storages:
            taken_bytes = max(row.peak_bytes or 0, row.storages_bytes or 0)
            yield f"{name}: took {format_bytes(taken_bytes)}, over its budget of {format_bytes(row.budget_bytes or 0)}"
        if row.status == FAILED:
            yield f"{name}: {row.message}"


@cache
def list_names() -> tuple[str, ...]:
    """Return the names of all models, with their sources."""
    return tuple(f"{source}/{model}" for source, models in list_sources().items() for model in models)


def get_place(row: TriedRow) -> int:
    """Return the place of a row's model among all."""
    return list_names().index(f"{row.source}/{row.model}")


def has_missing(rows: Sequence[TriedRow]) -> bool:
    """Return True if a package was missing: it is looked for again."""
    return any(row.status == MISSING for row in rows)


def format_line(row: TriedRow) -> str:
    """Return the line that is printed for a row."""
    found = f"{row.different} results are not eager's" if row.status == RAN else f"{row.status}: {row.message}"
    return f"{row.source}/{row.model}, {row.way}: {found}"


STUDY = Study(TriedRow, try_one, again=has_missing, order=get_place, pages={"table.md": format_table}, failures=list_failures)
SETTINGS = {
    "ways": Setting(f"{PLANNED},{CHECKPOINTING}", f"with commas, of {','.join(WAYS)}", make_names_reader("way", WAYS)),
    "seconds": Setting(600.0, "after which a model is given up", float),
    "repeats": Setting(9, "steps timed of each way"),
}
main = Main(STUDY, list_names, out="results/models", say=format_line, settings=SETTINGS)

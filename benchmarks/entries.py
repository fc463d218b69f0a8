"""The models of try-models by every entry point: ``make try-entries`` writes results/entries/.

Each model is trained for some steps within a budget by ``planner.compile``, ``planner.checkpoint``,
``torch.compile(backend="planner")`` and ``planner.rematerialize``, in a process of its own. Refusals, failures and timeouts are
rows too. The benchmark fails if results are not bit-identical to eager's, or if a step exceeds its budget.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

import planner
from benchmarks.command import Main, Setting, make_names_reader
from benchmarks.runner import SEED, Runner, build_fresh, build_whole_step
from benchmarks.solves import find_least_bytes
from benchmarks.try_models import (
    EAGER,
    MISSING,
    PACKAGES,
    RAN,
    find_failures,
    format_line,
    format_page,
    get_place,
    list_names,
    note_failure,
    run_in_process,
)
from graphs.units import format_bytes
from planner.capture.workload.models import Workload
from planner.measure import tracing
from planner.measure.steps import Step, StepOutcome, run_both
from planner.plans.summary import summarize
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_made, declare_value
from planner.studies.tables import Column
from planner.train.eager.session import Rematerialization

COMPILE, CHECKPOINT, BACKEND, REMATERIALIZE = ENTRIES = ("compile", "checkpoint", "backend", "rematerialize")
_LEAST_LIMIT_S = 5.0
_SOLVE: dict[str, Any] = {"time_limit_s": 10.0, "tolerance": 0.01}
_ENOUGH_BYTES = 2**40

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRow(Made):
    """One model, trained by one entry point within one budget."""

    source: str = declare_key("where the model is from")
    model: str = declare_key()
    way: str = declare_key("eager, or an entry point and how far its budget is from the least budget to the peak")
    status: str = declare_column(
        "ran, refused (with one clear line), failed in another way, or missing: a package is not installed"
    )
    message: str | None = declare_value("of what was refused or failed")
    budget_bytes: int | None = declare_value("of the plan")
    peak_bytes: int | None = declare_value("the most of the allocator's in a forward and backward pass, with what kernels take")
    different: int | None = declare_value(
        "how many losses, gradients, parameters, buffers, random states are not eager's to the last bit"
    )
    first_difference: str | None = declare_value("the name of one of them")
    seed: int = declare_column("of weights, batches and random state", default=SEED)
    transformers: str = declare_made("its version, as of the others")
    timm: str = declare_made()
    torchvision: str = declare_made()
    diffusers: str = declare_made()
    peft: str = declare_made()

    @property
    def entry(self) -> str:
        """The entry point."""
        return self.way.partition(" at ")[0]


def try_one(name: str, known: Sequence[EntryRow], *, entries: Sequence[str], seconds: float) -> Iterator[EntryRow]:
    """Yield the rows of one model by those of `entries` that are not known."""
    source, model = name.split("/")
    found = {row.entry for row in known if row.status != MISSING}
    left = [entry for entry in entries if entry not in found]
    blank = EntryRow(source=source, model=model, way=EAGER, status=RAN, **collect_provenance(packages=PACKAGES))
    return run_in_process(partial(try_entries, entries=left), blank, seconds) if left else iter(())


def try_entries(make: Callable[[], Workload], row: EntryRow, *, entries: Sequence[str]) -> Iterator[EntryRow]:
    """Yield the rows of a model: of eager PyTorch, then of each of `entries`.

    Args:
        make: the model with a loss function and a batch; random weights.
        row: the columns that its rows share.
        entries: some of ENTRIES.
    """
    build = partial(build_fresh, make)
    plain = build()
    reference = Runner.of_eager(plain).train(plain.batch)
    eager = Runner.of_eager(build())
    row = _judge(row, reference, eager.train(plain.batch))
    peak_bytes = eager.measure_peak_bytes(plain.batch)
    yield replace(row, way=EAGER, peak_bytes=peak_bytes)
    row = replace(row, different=None, first_difference=None)
    budgets = _choose_budgets(build, peak_bytes, eager.count_static_bytes(plain.batch))
    del eager
    for entry in entries:
        shares = {"50%": _ENOUGH_BYTES} if entry == REMATERIALIZE else budgets
        for share, budget_bytes in shares.items():
            one = replace(row, way=f"{entry} at {share}", budget_bytes=budget_bytes)
            torch.compiler.reset()  # runs share functions, and a function that was compiled often runs without a plan
            try:
                if entry == REMATERIALIZE:
                    yield _measure_rematerialize(build, reference, one)
                    continue
                workload = build()
                runner = Runner(workload, _STEPS[entry](workload, budget_bytes))
                one = _judge(one, reference, runner.train(workload.batch))
                yield replace(one, peak_bytes=runner.measure_peak_bytes(workload.batch))
            except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
                yield note_failure(one, getattr(error, "inner_exception", error))  # of a backend


def _choose_budgets(build: Callable[[], Workload], peak_bytes: int, static_bytes: int) -> dict[str, int]:
    """Return the peak, and half way to it from the least budget; if that is unknown, from half of what comes and goes."""
    try:
        graph = tracing.trace(*build(), passes=1)
    except Exception:  # noqa: BLE001 (planner.compile will say why in its row)
        least = (static_bytes + peak_bytes) // 2
    else:
        least, peak_bytes = find_least_bytes(graph, _LEAST_LIMIT_S), summarize(graph).keep_everything_peak_bytes
    return {"100%": peak_bytes, "50%": (least + peak_bytes) // 2}


def _compile(workload: Workload, budget_bytes: int) -> Step:
    return planner.compile(*workload, budget=budget_bytes, **_SOLVE)


def _checkpoint(workload: Workload, budget_bytes: int) -> Step:
    return planner.checkpoint(build_whole_step(workload), budget=budget_bytes, **_SOLVE)


def _make_backend_step(workload: Workload, budget_bytes: int) -> Step:
    return torch.compile(build_whole_step(workload), backend="planner", options={"budget": budget_bytes, **_SOLVE})


_STEPS: dict[str, Callable[[Workload, int], Step]] = {COMPILE: _compile, CHECKPOINT: _checkpoint, BACKEND: _make_backend_step}


def _measure_rematerialize(build: Callable[[], Workload], reference: StepOutcome, row: EntryRow) -> EntryRow:
    """Return the row of ``planner.rematerialize``, half way from a budget that is enough to the peak.

    Training and measuring have blocks of their own, and budgets of their own: another batch may need more.
    """

    def train(runner: Runner, _: int) -> StepOutcome:
        return runner.train(runner.workload.batch)

    def measure(runner: Runner, static_bytes: int) -> int:
        batch = runner.workload.batch
        for _ in range(2):  # the first steps show what kernels take, which is not seen while the next one is measured
            run_both(runner.step, batch)
        return static_bytes + runner.measure_peak_bytes(batch) - runner.count_static_bytes(batch)

    def choose_budget(work: Callable[[Runner, int], object]) -> int:
        session, _ = _run_block(build, _ENOUGH_BYTES, work)
        return (session.peak_bytes + session.least_budget()) // 2

    budget_bytes = choose_budget(measure)
    _, taken_bytes = _run_block(build, budget_bytes, measure)
    _, outcome = _run_block(build, choose_budget(train), train)
    return _judge(replace(row, budget_bytes=budget_bytes, peak_bytes=taken_bytes), reference, outcome)


def _run_block(build: Callable[[], Workload], budget_bytes: int, work: Callable[[Runner, int], T]) -> tuple[Rematerialization, T]:
    """Return a block, and what `work` returned in it for the model and the bytes of all tensors at its beginning."""
    runner = Runner.of_eager(build())
    with planner.rematerialize(budget_bytes) as session:
        return session, work(runner, session.peak_bytes)


def _judge(row: EntryRow, reference: StepOutcome, outcome: StepOutcome) -> EntryRow:
    differences = reference.list_differences(outcome)
    return replace(row, different=len(differences), first_difference=differences[0] if differences else None)


def is_over(row: EntryRow) -> bool:
    """Return True if a step exceeded its budget, including the memory of kernels."""
    return row.budget_bytes is not None and (row.peak_bytes or 0) > row.budget_bytes


def summarize_rows(rows: Sequence[EntryRow]) -> Iterator[str]:
    """Yield the results of each entry point, in sentences."""
    for entry in ENTRIES:
        tried = [row for row in rows if row.entry == entry]
        ran = [row for row in tried if row.status == RAN]
        yield (
            f"{entry}: {len(ran)} of {len(tried)} runs ended, {sum(row.different == 0 for row in ran)} with eager PyTorch's "
            f"bits, {sum(map(is_over, ran))} over the budget"
        )


def _show(row: EntryRow) -> str:
    if row.status != RAN:
        return row.status
    bits = "same bits" if row.different == 0 else f"{row.different} differ"
    return f"{bits}, {format_bytes(row.peak_bytes or 0)} of {format_bytes(row.budget_bytes or 0)}"


_WAYS = (*(f"{entry} at {share}" for entry in _STEPS for share in ("100%", "50%")), f"{REMATERIALIZE} at 50%")
TABLE = (
    Column("model", lambda row: f"{row.source}/{row.model}"),
    Column("eager's peak", "peak_bytes", at=EAGER),
    *(Column(way, _show, at=way) for way in _WAYS),
)


def format_table(rows: Sequence[EntryRow]) -> str:
    """Return all of it, as Markdown."""
    note = (
        "Bits of losses, gradients, parameters, buffers and random state after three steps, and the measured peak of the budget. "
        "Budgets are so far from the least one of planner.compile to the peak. That of planner.rematerialize is "
        "half way from the least one that a replay of its step needs to its peak.\n"
    )
    return format_page("Models by every entry point", rows, summarize_rows(rows), note, TABLE)


def list_failures(rows: Sequence[EntryRow]) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, too much memory, crashes."""
    yield from find_failures(
        rows,
        lambda row: (row.peak_bytes or 0) if is_over(row) else None,
        lambda row: f"{row.different} results are not eager's: {row.first_difference}",
    )


STUDY = Study(EntryRow, try_one, whole=False, order=get_place, pages={"table.md": format_table}, failures=list_failures)
_SETTINGS = {
    "entries": Setting(",".join(ENTRIES), "entry points, with commas", make_names_reader("entry point", ENTRIES)),
    "seconds": Setting(300.0, "after which a model is given up", float),
}
main = Main(STUDY, __doc__, models=list_names, out="results/entries", say=format_line, settings=_SETTINGS)

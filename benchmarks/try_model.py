"""One model under plans, compared with eager PyTorch and checkpointing: run by benchmarks/try_models.py, in its own process.

It yields its rows after each way to train the model, so that those of a killed process are not lost.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

import planner
from benchmarks.command import one_thread
from benchmarks.runner import SEED, Runner, take_turns, whole_step
from benchmarks.solves import least_bytes
from graphs.errors import PlannerError
from planner import tracing
from planner.models import Workload
from planner.plans.summary import summarize
from planner.runtime.measure import ratio_in_turns
from planner.studies import baselines
from planner.studies.blocks import block_levels
from planner.studies.rows import Made, column, key, made, value

R = TypeVar("R", bound=Made)
SHARES = (0.7, 0.5, 0.3)  # of the way from the least budget to the peak
_LEAST_LIMIT_S = 5.0
_SOLVE_LIMIT_S = 10.0
_TOLERANCE = 0.01

EAGER, PLANNED, CHECKPOINTING, AT_ITS_PEAK = "eager", "planned", "checkpointing", "planned at its peak"
FIRST = ", from the first plan on"
RAN, REFUSED, FAILED, MISSING = "ran", "refused", "failed", "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow(Made):
    """One way to train one model."""

    source: str = key("where the model is from")
    model: str = key()
    way: str = key("eager, checkpointing, planned at 50% of the way from the least budget to the peak, or at its peak")
    status: str = column("ran, refused (with one clear line), failed in another way, or missing: a package is not installed")
    message: str | None = value("of what was refused or failed")
    ops: int | None = value("of the captured step")
    least_bytes: int | None = value("the least budget that is found, as the planner says")
    keeping_bytes: int | None = value("the peak of keeping everything, as the planner says")
    budget_bytes: int | None = value("of the plan")
    storages_bytes: int | None = value("the most in storages at once, counted as they come and go")
    peak_bytes: int | None = value("the most of the allocator's, with what kernels take for themselves")
    different: int | None = value(
        "how many losses, gradients, parameters, buffers, random states are not eager's to the last bit"
    )
    first_difference: str | None = value("the name of one of them")
    swaps: int | None = value("how often a better plan took the place of another until then")
    time_s: float | None = value("median of a forward and backward pass")
    ratio: float | None = value("median of the multiples of eager's time in the same turn")
    ratio_of_checkpointing: float | None = value("the same, of checkpointing's time")
    seed: int = column("of weights, batches and random state", default=SEED)
    transformers: str = made("its version, as of the others")
    timm: str = made()
    torchvision: str = made()
    diffusers: str = made()
    peft: str = made()


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
        plain = self._fresh()
        self._batch = plain.batch
        self._reference = Runner(plain, whole_step(plain)).train(self._batch)
        yield self._measured(EAGER, self._row, self._eager_again)
        if self._rows[EAGER].status != RAN:
            return
        workload = self._fresh()
        try:
            graph = tracing.trace(*workload, passes=1)
            least = least_bytes(graph, _LEAST_LIMIT_S)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            yield self._known(PLANNED, failed(self._row, error))
            return
        keeping = summarize(graph).keep_everything_peak_bytes
        self._row = replace(self._row, ops=len(graph.ops), least_bytes=least, keeping_bytes=keeping)
        for share in SHARES:
            yield from self._planned(f"{PLANNED} at {share:.0%}", int(least + share * (keeping - least)))
        yield from self._checkpointed()
        yield from self._timed()

    def _eager_again(self) -> Runner:
        workload = self._fresh()
        return Runner(workload, whole_step(workload))

    def _planned(self, way: str, budget_bytes: int) -> Iterator[TriedRow]:
        """Yield the rows of the first plan that fits, and of the last plan found."""
        workload, first = self._fresh(), f"{way}{FIRST}"
        untrained = Runner(workload, whole_step(workload)).state()
        row = replace(self._row, budget_bytes=budget_bytes)

        def begun() -> Runner:
            limits: dict[str, Any] = {"tolerance": _TOLERANCE, "time_limit_s": _SOLVE_LIMIT_S}
            return Runner(workload, planner.compile(*workload, budget=budget_bytes, wait=0, **limits))

        def ended() -> Runner:
            runner = self._runners.pop(first)
            assert isinstance(runner.step, planner.PlannedStep)
            runner.step.wait()
            runner.restore(untrained)
            return runner

        yield self._measured(first, row, begun)
        if first in self._runners:
            yield self._measured(way, row, ended)
        else:
            yield self._known(way, self._rows[first])

    def _checkpointed(self) -> Iterator[TriedRow]:
        """Yield the rows of the blocks with the least memory, and of a plan for as much; none if no blocks save memory."""
        found: list[tuple[int, Runner]] = []
        for level in range(1, block_levels(self._fresh().model) + 1):
            workload = self._fresh()
            runner = Runner(workload, baselines.checkpoint_blocks(level).prepare(workload.model, workload.loss_fn))
            try:
                found.append((runner.peak_bytes(self._batch), runner))
            except Exception as error:  # noqa: BLE001 (of PyTorch's own: other levels may go)
                yield self._known(CHECKPOINTING, failed(self._row, error))
        if not found:
            return
        peak_bytes, runner = min(found, key=lambda pair: pair[0])
        if peak_bytes >= (self._rows[EAGER].peak_bytes or 0):
            refused = replace(self._row, status=REFUSED, message="checkpointing blocks saves no memory")
            yield self._known(CHECKPOINTING, refused)
            return
        yield self._measured(CHECKPOINTING, self._row, lambda: runner)
        yield from self._planned(AT_ITS_PEAK, peak_bytes)

    def _measured(self, way: str, row: TriedRow, make: Callable[[], Runner]) -> TriedRow:
        try:
            runner = make()
            outcome = runner.train(self._batch)
            differences = self._reference.differences(outcome)
            row = replace(
                row,
                status=RAN,
                different=len(differences),
                first_difference=differences[0] if differences else None,
                storages_bytes=runner.storages_bytes(self._batch),
                peak_bytes=runner.peak_bytes(self._batch),
                swaps=len(runner.step.history) - 1 if isinstance(runner.step, planner.PlannedStep) else None,
            )
            self._runners[way] = runner
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            row = failed(row, error)
        return self._known(way, row)

    def _timed(self) -> Iterator[TriedRow]:
        times = take_turns(self._runners, self._batch, repeats=self._repeats)
        for way in times:
            row = replace(self._rows[way], time_s=median(times[way]), ratio=ratio_in_turns(times[way], times[EAGER])[0])
            if way == AT_ITS_PEAK:
                row = replace(row, ratio_of_checkpointing=ratio_in_turns(times[way], times[CHECKPOINTING])[0])
            yield self._known(way, row)

    def _known(self, way: str, row: TriedRow) -> TriedRow:
        self._rows[way] = replace(row, way=way)
        return self._rows[way]

    def _fresh(self) -> Workload:
        """Return the model and its batch, the same every time."""
        torch.manual_seed(SEED)
        return self._make()


def failed(row: R, error: Exception) -> R:
    """Return `row` with the status and the message of an error."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = line.replace(f"{Path(__file__).parent.parent}{os.sep}", "")  # the same wherever the repository lies
    if isinstance(error, PlannerError):
        return replace(row, status=REFUSED, message=line)
    return replace(
        row, status=MISSING if isinstance(error, ModuleNotFoundError) else FAILED, message=f"{type(error).__name__}: {line}"
    )


def sources() -> dict[str, Mapping[str, Callable[[], Workload]]]:
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


def try_model(source: str, model: str, repeats: int) -> Iterator[TriedRow]:
    """Yield the rows of one model, including its failure."""
    one_thread()
    row = TriedRow(source=source, model=model, way=EAGER, status=RAN)
    try:
        yield from Trial(sources()[source][model], row, repeats=repeats).run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        yield failed(row, error)

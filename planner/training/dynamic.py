"""Training on batches whose sizes vary: a plan for each size."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch, as_leaves
from graphs.capture.step import TrainingStep
from graphs.capture.unchanged import unchanged
from graphs.cost.replay import written_by
from graphs.cost.scaling import Sizes
from graphs.errors import InfeasibleError, LimitError
from graphs.ir import Graph
from graphs.plan import GraphSummary, Plan
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.runtime import measure
from planner.training.compiler import Compiler
from planner.training.lru import LRUCache
from planner.training.shapes import Shapes, shapes_of
from planner.training.step import PlannedStep


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """What was predicted for a size, and what was measured.

    Attributes:
        shapes: of the batch.
        solved_for: the sizes that vary, as they were when the schedule was solved; () where it is for this batch's alone.
        plan: with the predicted and the measured peak, and the predicted time.
        measured_time_s: of a step, the median of three after one to warm up.
    """

    shapes: Shapes
    solved_for: Sizes
    plan: Plan
    measured_time_s: float

    @property
    def peak_error(self) -> float:
        """(predicted - measured) / measured peak."""
        return self.plan.peak_bytes / (self.plan.measured_peak_bytes or 1) - 1

    @property
    def time_error(self) -> float:
        """(predicted - measured) / measured time."""
        return self.plan.time_s / self.measured_time_s - 1

    def __str__(self) -> str:
        peaks = f"{format_bytes(self.plan.peak_bytes)} predicted, {format_bytes(self.plan.measured_peak_bytes or 0)} measured"
        times = f"{format_seconds(self.plan.time_s)} predicted, {format_seconds(self.measured_time_s)} measured"
        errors = f"{format_ratio(self.peak_error)} and {format_ratio(self.time_error)}"
        return f"{inputs_of(self.plan.graph)}: peak {peaks}; time {times}; errors {errors}"


class OtherSizes(ABC):
    """Makes the steps of other sizes than the first batch has, within its budget."""

    @abstractmethod
    def step(self, batch: Batch) -> tuple[Capture, PlannedStep, Sizes]:
        """What was captured for the sizes of `batch`, the step, and the sizes that its schedule was solved for.

        Raises:
            InfeasibleError, LimitError: no schedule is found that fits.
            BudgetError: the measured peak stays above the budget.
            MismatchError: it is no batch that another size of the first can be.
        """


# Called with a compiler, the first batch, its profiled step, the budget in bytes, and how many plans are kept.
MakeOtherSizes = Callable[[Compiler, Batch, Capture, int, int], OtherSizes]


class DynamicStep(PlannedStep):
    """A planned step that takes batches of any size: ``loss = step(*batch); loss.backward()``.

    Attributes:
        plan: that of the last batch.
    """

    def __init__(self, compiler: Compiler, batch: Batch, budget: str | int, others: MakeOtherSizes, *, max_plans: int) -> None:
        """Plan for `batch`; `others` makes the steps of other sizes.

        Raises:
            PlannerError: what ``planner.compile`` raises.
        """
        profiled = compiler.profile(compiler.capture(batch), batch)
        first = compiler.plan(profiled, batch, budget)
        super().__init__(first.plan, first._run, first.measured)
        self._compiler = replace(compiler, compare_eager=False)  # the first step stands for all
        self._others = others(self._compiler, batch, profiled, first.plan.budget_bytes, max_plans)
        self._steps: LRUCache[Shapes, tuple[PlannedStep, SizedPlan]] = LRUCache(max_plans)
        self._steps.use(shapes_of(batch), lambda: self._timed(profiled, batch, first, ()))

    @property
    def plans(self) -> tuple[SizedPlan, ...]:
        """Those that are kept, the last used last."""
        return tuple(sized for _, sized in self._steps.values())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The loss of a batch, as of any planned step.

        Raises:
            InfeasibleError, LimitError, BudgetError, MismatchError: as ``OtherSizes.step``.
        """
        batch: Batch = kwargs or args
        step, sized = self._steps.use(shapes_of(batch), lambda: self._made(as_leaves(batch)))
        self.plan, self.measured, self._run = sized.plan, step.measured, step._run
        return super().__call__(*args, **kwargs)

    def _made(self, batch: Batch) -> tuple[PlannedStep, SizedPlan]:
        captured, step, solved_for = self._others.step(batch)
        return self._timed(captured, batch, step, solved_for)

    def _timed(self, captured: Capture, batch: Batch, step: PlannedStep, solved_for: Sizes) -> tuple[PlannedStep, SizedPlan]:
        model = self._compiler.wrapper.module
        with unchanged(model, batch, written=written_by(captured, TrainingStep(model, self._compiler.loss_fn), batch)):
            isolated = measure.Isolated(step, model, batch)
            times = measure.median_times({"step": isolated}, batch, parameters=list(model.parameters()), repeats=3)
        return step, SizedPlan(shapes_of(batch), solved_for, step.plan, times["step"])


def solved_alone(compiler: Compiler, captured: Capture, batch: Batch, budget_bytes: int) -> PlannedStep:
    """The step of `batch` with a schedule of its own.

    Raises:
        InfeasibleError, LimitError, BudgetError: as ``Compiler.solve``; says for which batch.
    """
    try:
        return compiler.solve(captured, batch, budget_bytes)
    except (InfeasibleError, LimitError) as error:
        raise type(error)(f"for a batch of {inputs_of(captured.graph)}: {error}") from error


def inputs_of(graph: Graph | GraphSummary) -> str:
    """What a step was captured on, for messages."""
    inputs = graph.provenance["inputs"]
    assert isinstance(inputs, list)
    return ", ".join(inputs)

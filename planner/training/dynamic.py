"""Training on batches whose sizes vary: a plan for each size, predicted before anything of that size is run.

What a size needs is predicted from the batch that was planned for and two smaller cuts of it, so that the first batch of
another size runs within the budget already. Nothing but shapes is captured at the new size: views and strides are part
of a program, and differ. Schedules are solved for sizes rounded up, and serve every size below.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch, as_leaves
from graphs.capture.step import TrainingStep
from graphs.capture.unchanged import unchanged
from graphs.cost.replay import written_by
from graphs.cost.scaling import Fit, Sizes, same_ops, sample_sizes
from graphs.errors import BudgetError, InfeasibleError, LimitError, MismatchError
from graphs.ir import Graph
from graphs.plan import GraphSummary, Plan
from graphs.simulate import simulate
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.choices import with_recorded
from planner.runtime import measure
from planner.solving import other_peaks, summarize
from planner.training.compiler import Compiler
from planner.training.lru import LRUCache
from planner.training.shapes import Shapes, Varying, shapes_of
from planner.training.step import PlannedStep
from solvers.result import Status

_MOST_VARYING = 2  # the step is profiled at three sizes of each, in all combinations


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """What was predicted for a size, and what was measured.

    Attributes:
        shapes: of the batch.
        solved_for: the sizes that vary, as they were when the schedule was solved; () for the first batch.
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
        return f"{_inputs(self.plan.graph)}: peak {peaks}; time {times}; errors {errors}"


class DynamicStep(PlannedStep):
    """A planned step that takes batches of any size: ``loss = step(*batch); loss.backward()``.

    Attributes:
        plan: that of the last batch.
    """

    def __init__(self, compiler: Compiler, batch: Batch, budget: str | int, *, max_plans: int) -> None:
        """Plan for `batch`; other sizes are predicted from it.

        Raises:
            PlannerError: what ``planner.compile`` raises.
        """
        profiled = compiler.profile(compiler.capture(batch), batch)
        first = compiler.solve(profiled, batch, budget)
        super().__init__(first.plan, first._run, first.measured)
        self._compiler = replace(compiler, compare_eager=False)  # the first step stands for all
        self._batch = batch
        self._graph = profiled.graph
        self._budget_bytes = first.plan.budget_bytes
        self._varying = Varying.of(shapes_of(batch))
        self._fit: Fit | None = None
        self._schedules: LRUCache[Sizes, Plan | None] = LRUCache(max_plans)
        self._steps: LRUCache[Shapes, tuple[PlannedStep, SizedPlan]] = LRUCache(max_plans)
        self._steps.use(shapes_of(batch), lambda: self._timed(profiled, batch, first, ()))

    @property
    def plans(self) -> tuple[SizedPlan, ...]:
        """Those that are kept, the last used last."""
        return tuple(sized for _, sized in self._steps.values())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The loss of a batch, as of any planned step.

        Raises:
            InfeasibleError, LimitError: no schedule is found that fits a batch of this size.
            BudgetError: the measured peak stays above the budget.
            MismatchError: batches differ in more than two sizes, or the step's ops change with them.
        """
        batch: Batch = kwargs or args
        step, sized = self._steps.use(shapes_of(batch), lambda: self._made(batch))
        self.plan, self.measured, self._run = sized.plan, step.measured, step._run
        return super().__call__(*args, **kwargs)

    def _learn(self, shapes: Shapes) -> None:
        """Profile cuts of the first batch, where sizes vary that did not before."""
        varying = self._varying.seen(shapes)
        if self._fit is not None and varying == self._varying:
            return
        sizes = varying.sizes(varying.shapes)
        if len(sizes) > _MOST_VARYING:
            raise MismatchError(
                f"batches differ in {len(sizes)} sizes, which are {', '.join(map(str, sizes))} in the first: "
                f"{_MOST_VARYING} at most can be predicted; pad the others"
            )
        cuts = product(*map(sample_sizes, sizes))
        self._fit = Fit({cut: self._graph if cut == sizes else self._profiled(varying.cut(self._batch, cut)) for cut in cuts})
        self._varying = varying
        self._schedules.clear()

    def _profiled(self, batch: Batch) -> Graph:
        return self._compiler.profile(self._compiler.capture(batch), batch).graph

    def _made(self, batch: Batch) -> tuple[PlannedStep, SizedPlan]:
        """The step for the sizes of `batch`."""
        batch, shapes = as_leaves(batch), shapes_of(batch)
        self._learn(shapes)
        assert self._fit is not None
        sizes = self._varying.sizes(shapes)
        captured = self._compiler.capture_shapes(batch)
        if not same_ops(captured.graph, self._graph):
            raise MismatchError(
                f"a batch of {_inputs(captured.graph)} makes other ops than one of {_inputs(self._graph)}, which was planned "
                "for: make a plan of its own, without dynamic=True"
            )
        captured = replace(captured, graph=_at_least(self._fit.graph(sizes), captured.graph))
        upper = tuple(map(rounded_up, sizes))
        plan = self._schedules.use(upper, lambda: self._solved(upper))
        here = None if plan is None else _on(captured.graph, plan, self._fit.graph(upper))
        try:
            if here is not None and here.peak_bytes <= self._budget_bytes:
                return self._timed(captured, batch, self._compiler.reuse(captured, batch, here, captured.graph), upper)
        except BudgetError:
            pass  # measured above what was predicted: solved for as much less
        try:
            return self._timed(captured, batch, self._compiler.solve(captured, batch, self._budget_bytes), sizes)
        except (InfeasibleError, LimitError) as error:
            raise type(error)(f"for a batch of {_inputs(captured.graph)}: {error}") from error

    def _solved(self, sizes: Sizes) -> Plan | None:
        """The plan for `sizes`; None where none is found."""
        assert self._fit is not None
        try:
            return self._compiler.solved(self._fit.graph(sizes), self._budget_bytes)
        except (InfeasibleError, LimitError):
            return None

    def _timed(self, captured: Capture, batch: Batch, step: PlannedStep, solved_for: Sizes) -> tuple[PlannedStep, SizedPlan]:
        model = self._compiler.wrapper.module
        with unchanged(model, batch, written=written_by(captured, TrainingStep(model, self._compiler.loss_fn), batch)):
            isolated = measure.Isolated(step, model, batch)
            times = measure.median_times({"step": isolated}, batch, parameters=list(model.parameters()), repeats=3)
        return step, SizedPlan(shapes_of(batch), solved_for, step.plan, times["step"])


def rounded_up(size: int) -> int:
    """The size that a schedule for `size` is solved for: at most an eighth above, so that there are eight per doubling."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def _at_least(predicted: Graph, captured: Graph) -> Graph:
    """`predicted` with no tensor smaller than its shape says; names and shapes are those of `captured`."""
    pairs = zip(predicted.tensors, captured.tensors, strict=True)
    tensors = tuple(replace(known, size_bytes=max(guess.size_bytes, known.size_bytes)) for guess, known in pairs)
    return Graph(predicted.ops, tensors, captured.kept, {**predicted.provenance, "inputs": captured.provenance["inputs"]})


def _on(graph: Graph, plan: Plan, solved: Graph) -> Plan | None:
    """`plan`, `solved` for larger sizes, on the graph of smaller ones; how far from optimal it is there is not known.

    None where the graph offers other choices at these sizes: small tensors are not copied.
    """
    graph, solved = with_recorded(graph, plan.settings), with_recorded(solved, plan.settings)
    if not same_ops(graph, solved):
        return None
    found = simulate(graph, plan.schedule)
    return replace(
        plan,
        graph=summarize(graph),
        pool_peaks_bytes=other_peaks(graph, found),
        peak_bytes=found.peak_bytes,
        time_s=found.time_s,
        bound_s=plan.bound_s if graph.time_s == plan.graph.time_s else None,
        status=str(Status.FEASIBLE),
    )


def _inputs(graph: Graph | GraphSummary) -> str:
    """What a step was captured on, for messages."""
    inputs = graph.provenance["inputs"]
    assert isinstance(inputs, list)
    return ", ".join(inputs)

"""What other sizes of a batch need is predicted from the batch that was planned for and two smaller cuts of it.

So the first batch of another size runs within the budget already. Nothing but shapes is captured at the new size: views and
strides are part of a program, and differ. Schedules are solved for sizes rounded up, and serve every size below.
"""

from dataclasses import replace
from itertools import product

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch
from graphs.cost.scaling import Fit, Sizes, same_ops, sample_sizes
from graphs.errors import BudgetError, InfeasibleError, LimitError, MismatchError
from graphs.ir import Graph, Op
from graphs.options.selection import differences, holding_ops
from graphs.options.traced import with_graph
from graphs.plan import Plan
from graphs.simulate import simulate
from planner.choices import with_recorded
from planner.solving import other_peaks, summarize
from planner.training.compiler import Compiler
from planner.training.dynamic import OtherSizes, inputs_of, solved_alone
from planner.training.lru import LRUCache
from planner.training.shapes import Shapes, Varying, shapes_of
from planner.training.step import PlannedStep
from solvers.result import Status

_MOST_VARYING = 2  # the step is profiled at three sizes of each, in all combinations


class PredictedSizes(OtherSizes):
    """Predicts graphs from that of the first batch; up to two sizes may vary."""

    def __init__(self, compiler: Compiler, batch: Batch, profiled: Capture, budget_bytes: int, max_plans: int) -> None:
        """From `profiled`, the step on `batch`.

        Args:
            max_plans: how many schedules are kept.
        """
        self._compiler = compiler
        self._batch = batch
        self._graph = profiled.graph
        self._budget_bytes = budget_bytes
        self._varying = Varying.of(shapes_of(batch))
        self._fit: Fit | None = None
        self._schedules: LRUCache[Sizes, tuple[Graph, Plan | None]] = LRUCache(max_plans)

    def step(self, batch: Batch) -> tuple[Capture, PlannedStep, Sizes]:
        """See ``OtherSizes``: a schedule for larger sizes, where it is good for these; else one of their own."""
        shapes = shapes_of(batch)
        self._learn(shapes)
        assert self._fit is not None
        sizes = self._varying.sizes(shapes)
        upper = tuple(map(rounded_up, sizes))
        captured = self._compiler.capture_shapes(batch)
        captured = with_graph(captured, holding_ops(captured.graph, _optional(self._fit.graph(sizes))))
        here, above = self._predicted(sizes, captured.graph), self._predicted(upper, captured.graph)
        if not same_ops(captured.graph, here):
            raise MismatchError(
                f"a batch of {inputs_of(captured.graph)} makes other ops than one of {inputs_of(self._graph)}, which was planned "
                "for: make a plan of its own, without dynamic=True"
            )
        captured = replace(captured, graph=_at_least(here, captured.graph))
        solved, plan = self._schedules.use(upper, lambda: (above, self._solved(above)))
        on = None if plan is None else _on(captured.graph, plan, solved)
        try:
            if on is not None and on.peak_bytes <= self._budget_bytes:
                return captured, self._compiler.reuse(captured, batch, on, captured.graph), upper
        except BudgetError:
            pass  # measured above what was predicted: solved for as much less
        return captured, solved_alone(self._compiler, captured, batch, self._budget_bytes), sizes

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
        graphs = {cut: self._graph if cut == sizes else self._profiled(varying.cut(self._batch, cut)) for cut in cuts}
        everywhere = set.intersection(*map(_optional, graphs.values()))
        self._fit = Fit({cut: holding_ops(graph, everywhere) for cut, graph in graphs.items()})
        self._varying = varying
        self._schedules.clear()

    def _profiled(self, batch: Batch) -> Graph:
        return self._compiler.profile(self._compiler.capture(batch), batch).graph

    def _predicted(self, sizes: Sizes, captured: Graph) -> Graph:
        """The graph at `sizes`, with the optional ops of one that was `captured`, which says what they differ by.

        What was exact at one size need not be at another, where other kernels are chosen; nor may an op write over an input that
        is laid out otherwise there.
        """
        assert self._fit is not None
        graph, known = holding_ops(self._fit.graph(sizes), _optional(captured)), {op.name: op for op in captured.ops}
        ops = tuple(replace(op, differs=known[op.name].differs) if op.optional else _over(op, known[op.name]) for op in graph.ops)
        return Graph(ops, graph.tensors, graph.kept, graph.provenance)

    def _solved(self, graph: Graph) -> Plan | None:
        """The plan for `graph`; None where none is found."""
        try:
            return self._compiler.solved(graph, self._budget_bytes)
        except (InfeasibleError, LimitError):
            return None


def rounded_up(size: int) -> int:
    """The size that a schedule for `size` is solved for: at most an eighth above, so that there are eight per doubling."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def _optional(graph: Graph) -> set[str]:
    """Names of the optional ops of `graph`."""
    return {op.name for op in graph.ops if op.optional}


def _over(op: Op, known: Op) -> Op:
    """`op` that writes over no input that `known`, the same op at other sizes, does not."""
    return replace(op, overwrites=tuple(pair for pair in op.overwrites if pair in known.overwrites))


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
        differs=differences(graph, plan.schedule.computed),
        graph=summarize(graph),
        pool_peaks_bytes=other_peaks(graph, found),
        peak_bytes=found.peak_bytes,
        time_s=found.time_s,
        bound_s=plan.bound_s if graph.time_s == plan.graph.time_s else None,
        status=str(Status.FEASIBLE),
    )

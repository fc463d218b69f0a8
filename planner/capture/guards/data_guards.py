"""Guards on data: conditions on a batch and on buffers under which a plan is valid, checked before a step runs.

Conditions are computed from inputs, buffers and parameters before each step, by the ops of the capture. Known weakness: on CUDA
each check waits for the device once, and what is expensive to compute (``concrete_values``) is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from traceback import FrameSummary
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from planner.capture.guards.concrete_values import compare_uniform, find_size_inputs, is_uniform
from planner.capture.program.program import Program, Source
from planner.capture.rewrites.outputs import get_fake, is_random, list_tensors
from planner.capture.signature import Batch, list_leaves
from planner.capture.source_lines import branch_refusal, find_traced_line, format_location
from planner.graphs.errors import MismatchError, NumberMismatchError, TraceError
from planner.graphs.ir import Kind
from planner.graphs.walks import walk
from planner.torch_private.capture import BufferAOTInput, ParamAOTInput, PlainAOTInput
from planner.torch_private.core import OpOverload

aten = torch.ops.aten
_AS_CAPTURED = object()  # an outcome that is set once the guards are computed on the captured batch


@dataclass(frozen=True, slots=True)
class DataGuard:
    """A condition on data.

    Attributes:
        line: the source line that needs it.
        values: positions of its operands among the values that the guards compute.
        outcome: a function of these operands.
        planned: the outcome that was planned for.
        planned_of: the operands that were planned for, if they tell more; for messages.
    """

    line: FrameSummary | None
    values: tuple[int, ...]
    outcome: Callable[..., object]
    planned: object
    planned_of: tuple[object, ...] = ()

    def evaluate(self, values: Sequence[Any] | Mapping[int, Any]) -> object:
        """Return the outcome, from all values that the guards compute."""
        return self.outcome(*(values[i] for i in self.values))

    def check(self, values: Sequence[Any] | Mapping[int, Any]) -> None:
        """Raise an error unless the outcome is the planned one.

        Raises:
            MismatchError: it is not; a NumberMismatchError, which a step follows, if a branch takes the other side.
        """
        found = self.evaluate(values)
        if found == self.planned or (found != found and self.planned != self.planned):
            return
        of = tuple(number(values[i]) for i in self.values) if self.planned_of else ()
        kind = NumberMismatchError if isinstance(self.planned, bool) else MismatchError
        raise kind(
            f"{format_location(self.line)} gives {_show(found, of)} for this batch, but gave "
            f"{_show(self.planned, self.planned_of)} for the one that was planned for",
            ", and the plan depends on it: make another plan for such batches, plan with replan=True, which does so by itself, "
            'or use torch.compile(model, backend="planner"), which checks this at each step',
        )


@dataclass(frozen=True, slots=True)
class DataGuards:
    """The conditions on data under which one captured step is valid.

    Attributes:
        values: a module that computes the operands. It draws no random number, and changes nothing.
        program: a program whose sources are the inputs of `values`.
    """

    checks: tuple[DataGuard, ...]
    values: fx.GraphModule
    program: Program

    def check(self, step: nn.Module, batch_leaves: Sequence[object]) -> None:
        """Raise an error unless the plan is valid for this batch and the buffers of `step`. On CUDA this waits for the device.

        Raises:
            MismatchError: the batch takes another branch, or gives other sizes; nothing has run then.
        """
        values = self._compute(step, batch_leaves)
        for guard in self.checks:
            guard.check(values)

    def describe(self) -> tuple[str, ...]:
        """Return for each condition the line that needs it and the outcome that was planned for."""
        return tuple(f"{format_location(check.line)} gives {_show(check.planned, check.planned_of)}" for check in self.checks)

    def confirm(self, step: nn.Module, batch: Batch) -> "DataGuards":
        """Return the guards with their planned outcomes; raise TraceError unless they hold on the batch of the capture."""
        values = self._compute(step, list_leaves(batch))
        checks = tuple(
            replace(guard, planned=guard.evaluate(values)) if guard.planned is _AS_CAPTURED else guard for guard in self.checks
        )
        try:
            for guard in checks:
                guard.check(values)
        except MismatchError as error:
            raise TraceError(f"a branch on data cannot be traced: {error}") from error
        return replace(self, checks=checks)

    def compute_outcomes(
        self, step: nn.Module, batch_leaves: Sequence[object], buffers: Mapping[str, torch.Tensor]
    ) -> list[object]:
        """Return the outcome of each condition, where `buffers` replace those of `step`; raise MismatchError if there is none."""
        values = self._compute(step, batch_leaves, buffers)
        return [guard.evaluate(values) for guard in self.checks]

    def _compute(
        self, step: nn.Module, batch_leaves: Sequence[object], buffers: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Sequence[Any]:
        found = zip(self.program.sources, self.program.gather(step, batch_leaves), strict=True)
        given = [buffers.get(source.name, value) if source.kind is Kind.BUFFER else value for source, value in found]
        device = next((value.device.type for value in given if isinstance(value, torch.Tensor)), "cpu")
        with torch.no_grad(), torch.autocast(device, enabled=False):
            try:
                computed: Sequence[Any] = self.values(*given)
            except (RuntimeError, IndexError) as error:
                self._explain(given, error)
        return computed

    def _explain(self, given: Sequence[object], error: Exception) -> NoReturn:
        """Raise the error of the first condition that fails, where a later one cannot even be computed."""
        interpreter = fx.Interpreter(self.values, garbage_collect_values=False)
        with suppress(Exception):
            interpreter.run(*given)
        outputs: Any = self.values.graph.output_node().args[0]
        for guard in self.checks:
            nodes = [outputs[i] for i in guard.values]
            if not all(node in interpreter.env for node in nodes):
                why = str(error).partition("\n")[0]
                raise MismatchError(f"{format_location(guard.line)} cannot be checked for this batch: {why}") from error
            guard.check({i: interpreter.env[node] for i, node in zip(guard.values, nodes, strict=True)})
        raise error


class GuardWriter:
    """Builder of guards from a joint graph.

    Args:
        graph: the functional graph of AOTAutograd.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._joint = graph
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sources: list[Source] = []
        self._outputs: list[fx.Node] = []
        self._checks: list[DataGuard] = []

    def add_value(self, node: fx.Node, line: FrameSummary | None) -> int:
        """Return the position of the value of `node` among those that are computed before each step.

        Raises:
            TraceError: it depends on more than inputs, buffers and constants, or is expensive.
        """
        needed = _find_ancestors(node)
        for each in self._joint.nodes:
            if each in needed and each not in self._copies:
                self._copies[each] = self._copy(each, line)
        self._outputs.append(self._copies[node])
        return len(self._outputs) - 1

    def expect(
        self,
        line: FrameSummary | None,
        values: Iterable[int],
        outcome: Callable[..., object],
        planned: object,
        planned_of: tuple[object, ...] = (),
    ) -> None:
        """Add a condition."""
        self._checks.append(DataGuard(line, tuple(values), outcome, planned, planned_of))

    def expect_number(self, node: fx.Node) -> None:
        """Add the condition that an op which returned a number to Python returns it again."""
        line, planned = find_traced_line(node.meta.get("stack_trace")), node.meta.get("val", _AS_CAPTURED)
        if isinstance(planned, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise TraceError(branch_refusal(line, self._explain(node)))
        asked = node.args[0] if node.target is aten._local_scalar_dense.default else node
        assert isinstance(asked, fx.Node)
        self.expect(line, [self.add_value(asked, line)], number, planned)

    def expect_sizes(self, node: fx.Node) -> None:
        """Add the condition that an op whose sizes depend on data gives the same sizes again."""
        line = find_traced_line(node.meta.get("stack_trace"))
        if any(isinstance(size, torch.SymInt) for value in list_tensors(node.meta["val"]) for size in value.shape):
            raise TraceError(branch_refusal(line, self._explain(node)))
        assert isinstance(node.target, OpOverload)
        deciding, of = find_size_inputs(node.target, node.args, lambda arg: get_fake(arg).dtype)
        if of and deciding:
            self.expect(line, [self.add_value(each, line) for each in deciding], of, _AS_CAPTURED)
        elif of is None:
            self.expect(line, [self.add_value(node, line)], _list_shapes, _list_shapes(node.meta["val"]))

    def finish(self) -> DataGuards | None:
        """Return the guards; None if there are none."""
        if not self._checks:
            return None
        module, program = self.build_computation()
        # In program order: an earlier condition may explain why a later one cannot be computed.
        checks = sorted(self._checks, key=lambda check: max(check.values))
        return DataGuards(tuple(checks), module, program)

    def build_computation(self) -> tuple[fx.GraphModule, Program]:
        """Return a module that computes all requested values, and a program whose sources are its inputs."""
        self._graph.output(tuple(self._outputs))
        assert self._joint.owning_module is not None
        return fx.GraphModule(self._joint.owning_module, self._graph), Program((), tuple(self._sources), None, (), ())

    def _copy(self, node: fx.Node, line: FrameSummary | None) -> fx.Node:
        match node.op:
            case "placeholder":
                source = _get_source(node.meta["desc"])
                if source is None:
                    raise TraceError(branch_refusal(line, self._explain(node)))
                self._sources.append(source)
                return self._graph.placeholder(node.name)
            case "call_function" if (answer := _get_constant_answer(node)) is not None:
                value = get_fake(node)
                return self._graph.call_function(aten.full.default, (list(value.shape), answer), {"device": value.device})
            case "call_function" if is_random(node) or getattr(node.target, "overloadpacket", None) in flop_registry:
                raise TraceError(branch_refusal(line, self._explain(node)))
        return self._graph.node_copy(node, lambda arg: self._copies[arg])

    def _explain(self, node: fx.Node) -> str:
        return "random numbers" if any(map(is_random, _find_ancestors(node))) else "parameters or activations"


def _find_ancestors(node: fx.Node) -> set[fx.Node]:
    """Return `node` and all nodes that it is computed from; a comparison with a constant answer depends on none."""
    return set(walk([node], lambda each: each.all_input_nodes if _get_constant_answer(each) is None else ()))


def _get_constant_answer(node: fx.Node) -> bool | None:
    """Return the answer of a comparison that is the same for every random number."""
    if not node.args or not isinstance(random := node.args[0], fx.Node) or not is_uniform(random.target, random.args):
        return None
    return compare_uniform(node.target, node.args[-1])


def _get_source(desc: object) -> Source | None:
    """Return the source of an input of the graph: a tensor of the batch or of the model; None for others."""
    match desc:
        case ParamAOTInput(target=name):
            return Source(0, Kind.PARAMETER, name)
        case BufferAOTInput(target=name):
            return Source(0, Kind.BUFFER, name)
        case PlainAOTInput(idx=index):
            return Source(0, Kind.INPUT, str(index))
    return None


def _list_shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in list_tensors(value))


def number(value: Any) -> Any:
    """Return a number of Python, also where it was computed as a tensor."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _show(outcome: object, of: tuple[object, ...]) -> str:
    return f"{outcome!r}" + (f" (of {', '.join(map(repr, of))})" if of else "")

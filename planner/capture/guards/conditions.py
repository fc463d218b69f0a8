"""Guards on data: conditions on a batch and on buffers that a plan holds for, checked before anything of a step runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from graphs.errors import MismatchError, TraceError
from graphs.ir import Kind
from planner.capture.frontend.lines import Line, at, refused, where_made
from planner.capture.guards.known_values import decide_sizes, decided, is_uniform
from planner.capture.lowering.program import Program, Source
from planner.capture.rewrites.outputs import fake, is_random, tensors_in
from planner.capture.signature import Batch, leaves
from planner.torch_private.capture import BufferAOTInput, PlainAOTInput
from planner.torch_private.core import OpOverload

aten = torch.ops.aten
_AS_CAPTURED = object()  # an outcome that is known once the guards are computed for the captured batch


@dataclass(frozen=True, slots=True)
class DataGuard:
    """One condition.

    Attributes:
        line: the source line whose outcome it is.
        values: positions of the values it is of, among those that the guards compute.
        outcome: computed from them.
        planned: the outcome that was planned for.
        planned_of: the values it was of, where they say more; for messages.
    """

    line: Line | None
    values: tuple[int, ...]
    outcome: Callable[..., object]
    planned: object
    planned_of: tuple[object, ...] = ()

    def of(self, values: Sequence[Any] | Mapping[int, Any]) -> object:
        """The outcome, of all that the guards compute."""
        return self.outcome(*(values[i] for i in self.values))

    def check(self, values: Sequence[Any] | Mapping[int, Any]) -> None:
        """Whether it holds.

        Raises:
            MismatchError: it does not.
        """
        found = self.of(values)
        if found == self.planned or (found != found and self.planned != self.planned):
            return
        of = tuple(number(values[i]) for i in self.values) if self.planned_of else ()
        raise MismatchError(
            f"{at(self.line)} gives {_show(found, of)} for this batch, but gave {_show(self.planned, self.planned_of)} for the "
            "one that was planned for, and what follows from that is part of the plan: make another plan for such batches, or "
            'use torch.compile(model, backend="planner"), which asks at each step'
        )


@dataclass(frozen=True, slots=True)
class DataGuards:
    """The conditions on data that one captured step holds for.

    Attributes:
        checks: in the order of the step.
        values: computes what they are of. It draws no random number, and changes nothing.
        program: whose sources are what `values` takes.
    """

    checks: tuple[DataGuard, ...]
    values: fx.GraphModule
    program: Program

    def check(self, step: nn.Module, batch_leaves: Sequence[object]) -> None:
        """Whether the plan is one for this batch. On CUDA this waits for the device.

        Args:
            step: whose buffers are read.
            batch_leaves: of the batch.

        Raises:
            MismatchError: another branch would be taken, or another size come out; nothing has run then.
        """
        values = self._compute(step, batch_leaves)
        for guard in self.checks:
            guard.check(values)

    def confirmed(self, step: nn.Module, batch: Batch) -> "DataGuards":
        """Themselves, where they hold on the batch that the step was captured on.

        Raises:
            TraceError: they do not.
        """
        values = self._compute(step, leaves(batch))
        checks = tuple(
            replace(guard, planned=guard.of(values)) if guard.planned is _AS_CAPTURED else guard for guard in self.checks
        )
        try:
            for guard in checks:
                guard.check(values)
        except MismatchError as error:
            raise TraceError(f"a branch on data cannot be followed: {error}") from error
        return replace(self, checks=checks)

    def outcomes(self, step: nn.Module, batch_leaves: Sequence[object], buffers: Mapping[str, torch.Tensor]) -> list[object]:
        """Return what each of the checks finds, where `buffers`, by name, stand for those of `step`.

        Raises:
            MismatchError: some cannot be computed then.
        """
        values = self._compute(step, batch_leaves, buffers)
        return [guard.of(values) for guard in self.checks]

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
        """Which condition fails, where one that comes later cannot even be computed."""
        interpreter = fx.Interpreter(self.values, garbage_collect_values=False)
        with suppress(Exception):
            interpreter.run(*given)
        outputs: Any = self.values.graph.output_node().args[0]
        for guard in self.checks:
            nodes = [outputs[i] for i in guard.values]
            if not all(node in interpreter.env for node in nodes):
                why = str(error).partition("\n")[0]
                raise MismatchError(f"{at(guard.line)} cannot be asked for this batch: {why}") from error
            guard.check({i: interpreter.env[node] for i, node in zip(guard.values, nodes, strict=True)})
        raise error


class GuardWriter:
    """Takes conditions out of a joint graph.

    Args:
        graph: functional, as AOTAutograd makes it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._joint = graph
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sources: list[Source] = []
        self._outputs: list[fx.Node] = []
        self._checks: list[DataGuard] = []

    def value(self, node: fx.Node, line: Line | None) -> int:
        """The position of the value of `node` among those that are computed before each step.

        Raises:
            TraceError: it depends on more than inputs, buffers and constants, or is too dear.
        """
        needed = _ancestors(node)
        for each in self._joint.nodes:
            if each in needed and each not in self._copies:
                self._copies[each] = self._copy(each, line)
        self._outputs.append(self._copies[node])
        return len(self._outputs) - 1

    def expect(
        self,
        line: Line | None,
        values: Iterable[int],
        outcome: Callable[..., object],
        planned: object,
        planned_of: tuple[object, ...] = (),
    ) -> None:
        """Add a condition."""
        self._checks.append(DataGuard(line, tuple(values), outcome, planned, planned_of))

    def expect_number(self, node: fx.Node) -> None:
        """That an op which returned a number to Python returns it again."""
        line, planned = where_made(node.meta.get("stack_trace")), node.meta.get("val", _AS_CAPTURED)
        if isinstance(planned, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise TraceError(refused(line, self._why(node)))
        asked = node.args[0] if node.target is aten._local_scalar_dense.default else node
        assert isinstance(asked, fx.Node)
        self.expect(line, [self.value(asked, line)], number, planned)

    def expect_sizes(self, node: fx.Node) -> None:
        """That an op whose sizes depend on data makes the same sizes again."""
        line = where_made(node.meta.get("stack_trace"))
        if any(isinstance(size, torch.SymInt) for value in tensors_in(node.meta["val"]) for size in value.shape):
            raise TraceError(refused(line, self._why(node)))
        assert isinstance(node.target, OpOverload)
        deciding, of = decide_sizes(node.target, node.args, lambda arg: fake(arg).dtype)
        if of and deciding:
            self.expect(line, [self.value(each, line) for each in deciding], of, _AS_CAPTURED)
        elif of is None:
            self.expect(line, [self.value(node, line)], _shapes, _shapes(node.meta["val"]))

    def finish(self) -> DataGuards | None:
        """The guards; None where there are none."""
        if not self._checks:
            return None
        module, program = self.computed()
        # As the step comes to them: what an earlier one says may be why a later one cannot be computed.
        checks = sorted(self._checks, key=lambda check: max(check.values))
        return DataGuards(tuple(checks), module, program)

    def computed(self) -> tuple[fx.GraphModule, Program]:
        """What computes all values that were asked for, and a program whose sources are what that takes."""
        self._graph.output(tuple(self._outputs))
        assert self._joint.owning_module is not None
        return fx.GraphModule(self._joint.owning_module, self._graph), Program((), tuple(self._sources), "", (), (), {})

    def _copy(self, node: fx.Node, line: Line | None) -> fx.Node:
        match node.op:
            case "placeholder":
                source = _source(node.meta["desc"])
                if source is None:
                    raise TraceError(refused(line, self._why(node)))
                self._sources.append(source)
                return self._graph.placeholder(node.name)
            case "call_function" if (answer := _certain(node)) is not None:
                value = fake(node)
                return self._graph.call_function(aten.full.default, (list(value.shape), answer), {"device": value.device})
            case "call_function" if is_random(node) or getattr(node.target, "overloadpacket", None) in flop_registry:
                raise TraceError(refused(line, self._why(node)))
        return self._graph.node_copy(node, lambda arg: self._copies[arg])

    def _why(self, node: fx.Node) -> str:
        return "random numbers" if any(map(is_random, _ancestors(node))) else "parameters or activations"


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """`node` and all that it is computed from; of an answer that is certain nothing is."""
    found, waiting = {node}, [node]
    while waiting:
        for arg in [] if _certain(each := waiting.pop()) is not None else each.all_input_nodes:
            if arg not in found:
                found.add(arg)
                waiting.append(arg)
    return found


def _certain(node: fx.Node) -> bool | None:
    """The answer of a comparison that is the same for every draw."""
    if not node.args or not isinstance(drawn := node.args[0], fx.Node) or not is_uniform(drawn.target, drawn.args):
        return None
    return decided(node.target, node.args[-1])


def _source(desc: object) -> Source | None:
    """The batch's or the buffer's tensor that an input stands for; None for others."""
    match desc:
        case BufferAOTInput(target=name):
            return Source(0, Kind.BUFFER, name)
        case PlainAOTInput(idx=index):
            return Source(0, Kind.INPUT, str(index))
    return None


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def number(value: Any) -> Any:
    """A number that was computed as a tensor, as Python has it."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _show(outcome: object, of: tuple[object, ...]) -> str:
    return f"{outcome!r}" + (f" (of {', '.join(map(repr, of))})" if of else "")

"""Parts of a schedule as FX graphs, which AOTAutograd calls as forward and backward."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer

from graphs.ir import Op
from graphs.overwriting import Overwriting, Pairs
from graphs.pools import COMPUTE, DEVICE_TO_HOST, HOST
from graphs.schedule import Compute, Step
from planner.capture.frontend.eager_ops import called
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.program import Call, Composed, variable
from planner.capture.rewrites.batch_norms import without_statistics
from planner.capture.rewrites.layouts import copy_with_strides, empty_with_strides, in_place_random_op, read_strides
from planner.runtime.channels import Channels
from planner.runtime.copying import UnderWay
from planner.runtime.host_tensor import HostTensor
from planner.torch_private.capture import SavedForBackwardsAOTOutput

aten = torch.ops.aten


class Emitter:
    """Writes a part of a schedule as an FX graph.

    Attributes:
        env: for each tensor in memory, on the device or the host, the node of the new graph that holds it.
        under_way: the copies that are not waited for yet.
        steps: for each node of a step, by name, the position of that step in the part.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        captured: Capture,
        origins: Mapping[fx.Node, int],
        channels: Channels | None = None,
        *,
        after_forward: bool,
    ) -> None:
        """Write for `module`, the joint graph, which was `captured`.

        Args:
            origins: the tensor that each of its nodes stands for.
            channels: to copy by, if at all.
            after_forward: whether the forward pass has ended.
        """
        self.after_forward = after_forward
        self.module = module
        self.captured = captured
        self.origins = origins
        self.graph = fx.Graph()
        self.env: dict[int, fx.Node] = {}
        self.under_way: UnderWay[fx.Node] = UnderWay()
        self.steps: dict[str, int] = {}
        self._overwriting = Overwriting(captured.graph)
        self._copy = None if channels is None else _Copying(channels)

    def input(self, node: fx.Node) -> None:
        """Take an input of the joint graph as one of this part."""
        copied = self.graph.node_copy(node)
        if node in self.origins:
            self.env[self.origins[node]] = copied

    def saved(self, tensor: int, value: fx.Node | None) -> None:
        """Take a tensor that the part before has saved, or a place where it saves none."""
        if value is None:
            self.graph.placeholder(f"not_saved_{tensor}")
            return
        name = value.name if self.captured.graph.tensors[tensor].static else f"saved_{tensor}"
        self.env[tensor] = self.graph.placeholder(name)
        self.env[tensor].meta = dict(value.meta)

    @property
    def on_host(self) -> dict[int, fx.Node]:
        """The tensors in the host's memory."""
        return {t: value for t, value in self.env.items() if self.captured.graph.tensors[t].pool == HOST}

    @property
    def handed_over(self) -> list[fx.Node]:
        """What the part behind gets that are no tensors on the device: copies on the host, and those that are under way."""
        return [*self.on_host.values(), *self.under_way.copies]

    def take_over(self, before: "Emitter") -> None:
        """Take what the part `before` hands over, as inputs."""
        self.env |= {t: self.graph.placeholder(f"on_host_{t}") for t in before.on_host}
        number = count()
        self._overwriting = before._overwriting
        self.under_way = before.under_way.known_as(lambda _: self.graph.placeholder(f"under_way_{next(number)}"))

    def run(self, steps: Sequence[Step]) -> None:
        """Write `steps`."""
        written = len(self.graph.nodes)
        ends = []
        for place, step in enumerate(steps):
            self._write(step, self._overwriting.follow(steps, place))
            ends.append(len(self.graph.nodes))
        nodes = list(self.graph.nodes)
        for place, end in enumerate(ends):
            self.steps.update((node.name, place) for node in nodes[written:end])
            written = end

    def _write(self, step: Step, over: Pairs) -> None:
        """Write one step; `over` is what its op writes over."""
        if not isinstance(step, Compute):
            freed = self.env.pop(step.tensor, None)
            if self.captured.graph.tensors[step.tensor].pool == HOST:
                self._hold(freed)
            self._wait(self.under_way.before_freeing(step.tensor), held=freed)
        elif (op := self.captured.graph.ops[step.op]).optional:
            if op.stream == COMPUTE:
                self._wait(self.under_way.before_reading(op.inputs))
                self._compose(op)
            else:
                self._transfer(step.op)
        elif (node := self.captured.nodes[step.op]) is not None:
            self._wait(self.under_way.before_reading(self.captured.graph.ops[step.op].inputs))
            self._compute(op, node, over)

    def _compose(self, op: Op) -> None:
        """Call an optional op, which runs several operators: its arguments are source over variables, as in programs."""
        call = self.captured.program.calls[op.id]
        assert isinstance(call, Call)
        assert call.composed is not None
        arguments = call.expression.partition("(")[2].removesuffix(")")
        made = self.graph.call_function(_function(call.composed), self._written(f"({arguments},)", op))
        for tensor, path in call.outputs:
            if tensor not in self.env:
                self.env[tensor] = self.graph.call_function(operator.getitem, (made, int(path[1:-1])))

    def _written(self, expression: str, op: Op) -> Any:
        """What stands for the value of `expression`, which reads inputs of `op`."""
        recording = GraphAppendingTracer(self.graph)
        read = {variable(t): fx.Proxy(self._held(t), recording) for t in op.inputs}
        value = eval(expression, dict(self.captured.program.namespace), read)
        return map_aggregate(value, lambda v: v.node if isinstance(v, fx.Proxy) else v)

    def _held(self, tensor: int) -> fx.Node:
        """What holds a tensor; constants are taken when they are first read."""
        if tensor not in self.env:
            constant = next(node for node, t in self.origins.items() if t == tensor and node.op == "get_attr")
            self.env[tensor] = self.graph.node_copy(constant)
        return self.env[tensor]

    def _transfer(self, op: int) -> None:
        """Issue a copy to the host or back."""
        assert self._copy is not None
        copy = self.captured.graph.ops[op]
        (source,), (target,) = copy.inputs, copy.outputs
        out = copy.stream == DEVICE_TO_HOST
        after = self.under_way.making(source) if out else ()
        issued = self.graph.call_function(self._copy.out if out else self._copy.back, (self.env[source], *after))
        if target not in self.env:  # what is there already is copied once more, and dropped
            self.env[target] = self.graph.call_function(operator.getitem, (issued, 0))
        known = self.graph.call_function(operator.getitem, (issued, 1))
        if out:
            self.under_way.out(source, known)
        else:
            self.under_way.back(target, known)

    def _wait(self, copies: Iterable[fx.Node], held: fx.Node | None = None) -> None:
        """Wait for `copies`; what they use is `held` until then."""
        for copy in copies:
            assert self._copy is not None
            self.graph.call_function(self._copy.wait, (copy,))
            self._hold(held)

    def _hold(self, value: fx.Node | None) -> None:
        """Let `value` be there until now, for a name ends with its last use."""
        if value is not None:
            self.graph.call_function(_held, (value,))

    def _compute(self, op: Op, node: fx.Node, over: Pairs) -> None:
        """Call an op of the program."""
        call = self.captured.program.calls[op.id]
        gone: tuple[str, ...] = ()
        if over:
            assert isinstance(call, Call)
            assert call.in_place is not None
            made = self._written(call.in_place, op)
        else:
            target, given, gone = without_statistics(node) if self.after_forward else (node.target, node.args, ())
            made = self._called(node, target, given)
        made.meta = dict(node.meta)
        for tensor, path in call.outputs:
            if tensor not in self.env and path not in gone:
                self.env[tensor] = self._item(made, path)

    def _called(self, node: fx.Node, target: object, given: tuple[Any, ...]) -> fx.Node:
        args, kwargs = fx.map_arg((given, node.kwargs), partial(self._read, read_strides(node)))
        if drawn := in_place_random_op(node):
            target, args = drawn[0], (self.graph.call_function(empty_with_strides, (args[0], tuple(drawn[1]))), *args[1:])
        return self.graph.call_function(called(target), args, kwargs)

    def _read(self, strides: Mapping[fx.Node, Sequence[int]], arg: fx.Node) -> fx.Node:
        """What an op reads of `arg`, in the layout that it is to have."""
        value: fx.Node = self.value(arg)
        return self.graph.call_function(copy_with_strides, (value, tuple(strides[arg]))) if arg in strides else value

    def _item(self, value: fx.Node, path: str) -> fx.Node:
        """The item of `value` that stands at `path`, as in ``[1]`` or ``[0][2]``."""
        for index in path.replace("]", "").split("[")[1:]:
            item = self.graph.call_function(operator.getitem, (value, int(index)))
            item.meta = {"val": value.meta["val"][int(index)]}
            value = item
        return value

    def value(self, given: Any) -> Any:
        """What stands for a value of the joint graph; views are made again from their base."""
        if not isinstance(given, fx.Node):
            return given
        if given in self.origins:
            return self._held(self.origins[given])
        copied = self.graph.node_copy(given, self.value)
        copied.target = called(copied.target)
        return copied

    def finish_forward(self, returned: Sequence[tuple[object, object]], saved: Sequence[fx.Node | None]) -> fx.GraphModule:
        """The module that returns the values of `returned`, each with its descriptor, what is `saved` and what is handed over."""
        descs = [SavedForBackwardsAOTOutput(i) for i in range(len(saved))]
        results = [*map(self.value, (v for v, _ in returned)), *saved, *self.handed_over]
        return self._finish(results, [*(d for _, d in returned), *descs])

    def finish_backward(self, returned: Sequence[tuple[object, object]]) -> fx.GraphModule:
        """The module that returns the values of `returned`, each with its descriptor."""
        for value in self.on_host.values():  # the schedule leaves them to the end
            self._hold(value)
        return self._finish([self.value(value) for value, _ in returned], [desc for _, desc in returned])

    def _finish(self, results: Sequence[object], descs: Sequence[object]) -> fx.GraphModule:
        self.graph.output(tuple(results)).meta["desc"] = list(descs)  # type: ignore[arg-type]
        self.graph.lint()
        return fx.GraphModule(self.module, self.graph)


class _Copying:
    """What a graph calls to copy by `channels`."""

    def __init__(self, channels: Channels) -> None:
        # Functions, for FX asks what it calls for its name and its module.
        def out(tensor: torch.Tensor, *after: Any) -> Any:
            return channels.out(tensor, *after)

        def back(host: HostTensor) -> Any:
            return channels.back(host)

        def wait(copy: Any) -> None:
            channels.wait(copy)

        self.out, self.back, self.wait = out, back, wait


def _function(composed: Composed) -> Callable[..., Any]:
    """A function, as in ``_Copying``."""

    def composed_op(*given: Any) -> Any:
        return composed(*given)

    return composed_op


def _held(_: object) -> None:
    pass

"""Optional ops added to a capture: inputs, outputs and calls."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes, format_dtype
from planner.capture.options.differences import describe_differing
from planner.capture.program.program import Call, Comparable, Composed, OpCalls, Path, Ref, call_of
from planner.capture.rewrites.outputs import get_fake, get_storage
from planner.graphs.ir import Kind, Op, Tensor


class Additions:
    """A collection of optional ops, and of tensors that only these make, for a capture.

    Attributes:
        tensor_of: the tensors of `capture`, by the storages of their fake values.
        fakes: fake values of the tensors that ops make, by id.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.tensor_of = map_tensors_by_storage(capture)
        self.fakes = dict(iterate_made_values(capture))
        self._ops: list[Op] = []
        self._calls: list[OpCalls] = []
        self._nodes: list[fx.Node | None] = []
        self._tensors: dict[int, Tensor] = {}  # added ones
        self._producers: dict[int, list[int]] = {}

    def add_tensor(self, name: str, value: torch.Tensor) -> int:
        """Add a tensor for outputs of added ops, with the fake `value`; return its id."""
        number = len(self.capture.graph.tensors) + len(self._tensors)
        size_bytes = compute_allocated_bytes(value.untyped_storage().nbytes(), value.device)
        self.fakes[number] = value
        self._tensors[number] = Tensor(
            number, name, size_bytes, (), Kind.ACTIVATION, tuple(value.shape), format_dtype(value.dtype)
        )
        return number

    def add_op(
        self,
        called: Composed,
        reads: Sequence[fx.Node | int],
        *,
        like: Op,
        name: str,
        target: str,
        outputs: Sequence[int],
        replaces: Sequence[int] = (),
        recomputable: bool = True,
        differs: str = "",
    ) -> int:
        """Add an op without a measured time; return its id.

        Args:
            called: the function that computes it.
            reads: arguments of `called`: values of the program, or whole tensors that ops make.
            like: an op of the program with the same phase and module.
            name, target, replaces, recomputable, differs: as in ``Op``; `target` begins with the name of an option. A
                ``Comparable`` says itself how it differs.
            outputs: tensors that it makes, in the order of the results of `called`.
        """
        number = len(self.capture.graph.ops) + len(self._ops)
        inputs = [self.tensor_of[get_storage(get_fake(read))] if isinstance(read, fx.Node) else read for read in reads]
        arguments = tuple(self.capture.values[read] if isinstance(read, fx.Node) else Ref(read) for read in reads)
        fakes = tuple(get_fake(read) if isinstance(read, fx.Node) else self.fakes[read] for read in reads)
        if isinstance(called, Comparable):
            differs = describe_differing(self.capture, outputs, called.list_rounding((False,) * len(outputs)))
        op = Op(
            id=number,
            name=name,
            target=target,
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=tuple(outputs),
            time_s=0.0,
            phase=like.phase,
            recomputable=recomputable,
            module=like.module,
            optional=True,
            replaces=tuple(replaces),
            differs=differs,
        )
        made = [(t, (i,)) for i, t in enumerate(outputs)]
        self._put(op, call_of(Call(called, arguments), made, fakes=fakes), None)
        return number

    def add_variant(self, op: Op, instead: Mapping[int, int], name: str, target: str) -> int:
        """Add an alternative for `op` of the program that reads other tensors; return its id.

        Args:
            instead: replacements for tensors that `op` reads.
            name, target: as in ``add_op``.
        """
        number, calls = len(self.capture.graph.ops) + len(self._ops), self.capture.program.calls[op.id]
        inputs = tuple(dict.fromkeys(instead.get(t, t) for t in op.inputs))
        named = replace(op, id=number, name=name, target=target, inputs=inputs)
        variant = replace(named, optional=True, replaces=(op.id,), overwrites=())
        self._put(variant, calls.renumber(instead), self.capture.nodes[op.id])
        return number

    def _put(self, op: Op, calls: OpCalls, node: fx.Node | None) -> None:
        self._ops.append(op)
        self._calls.append(calls)
        self._nodes.append(node)
        for t in op.outputs:
            self._producers.setdefault(t, []).append(op.id)

    def build_capture(self) -> Capture:
        """Return the capture with all additions."""
        graph, program = self.capture.graph, self.capture.program
        tensors = [*graph.tensors, *(self._tensors[t] for t in sorted(self._tensors))]
        for t, producers in self._producers.items():
            tensors[t] = replace(tensors[t], producers=(*tensors[t].producers, *producers))
        return replace(
            self.capture,
            graph=replace(graph, ops=(*graph.ops, *self._ops), tensors=tuple(tensors)),
            program=replace(program, calls=(*program.calls, *self._calls)),
            nodes=(*self.capture.nodes, *self._nodes),
        )


def get_value(node: fx.Node, path: Path = ()) -> Any:
    """Return the fake value of `node` at `path`, as in ``Statement.outputs``."""
    value = node.meta["val"]
    for index in path:
        value = value[index]
    return value


def map_tensors_by_storage(capture: Capture) -> dict[int, int]:
    """Return the tensors of `capture` by the storages of their fake values."""
    found = {}
    for node, value in capture.values.items():
        if node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("val"), torch.Tensor):
            assert isinstance(value, Ref)
            found[get_storage(get_fake(node))] = value.tensor
    return found | {get_storage(value): t for t, value in iterate_made_values(capture)}


def iterate_made_values(capture: Capture) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the tensors that captured nodes make, with their fake values."""
    for producer, call in zip(capture.nodes, capture.program.calls, strict=True):
        if producer is not None:
            yield from ((t, get_value(producer, path)) for t, path in call.outputs)

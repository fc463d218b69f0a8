"""Optional ops that are added to what was captured: what they read, what they make, and what they call."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphs.ir import Graph, Kind, Op, Tensor
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.program import Call, Composed
from planner.capture.lowering.statics import allocated_bytes, dtype_name
from planner.capture.rewrites.outputs import fake, storage


class Additions:
    """Collects optional ops, and tensors that only these make, for what was captured.

    Attributes:
        capture: without them.
        tensor_of: by storage of a fake value of `capture`, its tensor.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.tensor_of = tensors_by_storage(capture)
        self._ops: list[Op] = []
        self._calls: list[Call] = []
        self._nodes: list[fx.Node | None] = []
        self._called: dict[str, Composed] = {}
        self._tensors: dict[int, Tensor] = {}  # new ones
        self._makers: dict[int, list[int]] = {}

    def add_tensor(self, name: str, value: torch.Tensor, kind: Kind = Kind.ACTIVATION) -> int:
        """The id of a tensor, a fake `value`, that ops that are added make."""
        number = len(self.capture.graph.tensors) + len(self._tensors)
        size_bytes = allocated_bytes(value.untyped_storage().nbytes(), value.device)
        self._tensors[number] = Tensor(number, name, size_bytes, (), kind, tuple(value.shape), dtype_name(value.dtype))
        return number

    def add_op(
        self,
        called: Composed,
        arguments: Sequence[str],
        *,
        like: Op,
        name: str,
        target: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        replaces: Sequence[int] = (),
        recomputable: bool = True,
        differs: str = "",
    ) -> int:
        """The id of a new op; its time is not measured.

        Args:
            called: what computes it.
            arguments: Python source of what that is called with, over variables and names of the program.
            like: an op of the program, in whose phase and module it is.
            name, target, replaces, recomputable, differs: as in ``Op``; `target` begins with the name of an option.
            inputs: tensors that `arguments` read, perhaps with repetition.
            outputs: tensors that it makes, in the order in which `called` returns them.
        """
        number = len(self.capture.graph.ops) + len(self._ops)
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
        function = f"{target.partition('.')[0]}_{number}"
        made = tuple((t, f"[{i}]") for i, t in enumerate(outputs))
        self._called[function] = called
        self._put(op, Call(f"{function}({', '.join(arguments)})", made, composed=called), None)
        return number

    def add_variant(self, op: Op, expression: str, name: str, target: str, inputs: Sequence[int]) -> int:
        """The id of a new op that stands for `op` of the program, which it is but for the tensors that it reads.

        Args:
            expression: the call of `op` over these.
            name, target, inputs: as in ``add_op``.
        """
        number, call = len(self.capture.graph.ops) + len(self._ops), self.capture.program.calls[op.id]
        named = replace(op, id=number, name=name, target=target, inputs=tuple(dict.fromkeys(inputs)))
        assert isinstance(call, Call)
        variant = replace(named, optional=True, replaces=(op.id,), overwrites=())
        self._put(variant, replace(call, expression=expression, in_place=None), self.capture.nodes[op.id])
        return number

    def _put(self, op: Op, call: Call, node: fx.Node | None) -> None:
        self._ops.append(op)
        self._calls.append(call)
        self._nodes.append(node)
        for t in op.outputs:
            self._makers.setdefault(t, []).append(op.id)

    def captured(self) -> Capture:
        """The capture with all that was added."""
        graph, program = self.capture.graph, self.capture.program
        tensors = [*graph.tensors, *(self._tensors[t] for t in sorted(self._tensors))]
        for t, makers in self._makers.items():
            tensors[t] = replace(tensors[t], producers=(*tensors[t].producers, *makers))
        return replace(
            self.capture,
            graph=Graph((*graph.ops, *self._ops), tuple(tensors), graph.kept, graph.provenance, graph.pools),
            program=replace(
                program,
                calls=(*program.calls, *self._calls),
                namespace={**program.namespace, **self._called},
            ),
            nodes=(*self.capture.nodes, *self._nodes),
        )


def value_of(node: fx.Node, path: str = "") -> Any:
    """What `node` makes, at `path` as in ``Call.outputs``, on fake tensors."""
    value = node.meta["val"]
    for index in path.replace("]", "").split("[")[1:]:
        value = value[int(index)]
    return value


def tensors_by_storage(capture: Capture) -> dict[int, int]:
    """By storage of a fake value of `capture`, its tensor."""
    found = {}
    for node, expression in capture.expressions.items():
        if node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("val"), torch.Tensor):
            found[storage(fake(node))] = int(expression[1:])
    for maker, call in zip(capture.nodes, capture.program.calls, strict=True):
        if maker is not None:
            found |= {storage(value_of(maker, path)): t for t, path in call.outputs}
    return found

"""The gradients in a captured step that can be computed without their input, and which of their inputs are worth that."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.options.additions import Additions
from planner.capture.program.program import Composed
from planner.capture.rewrites.outputs import get_fake, get_storage
from planner.graphs.ir import Op, Phase

# Smaller tensors are not worth an op, unless the step has only such.
LEAST_BYTES = 2**20


class PackFinder:
    """A search in a capture for gradients of activations, which adds ops to it.

    Attributes:
        device: type of the device that is planned for, ``cpu`` or ``cuda``.
    """

    def __init__(self, capture: Capture, targets: Collection[Any]) -> None:
        """Search in `capture`; calls of `targets`, gradients, can be computed without their second argument."""
        self._graph, self.additions = capture.graph, Additions(capture)
        self.device = capture.graph.device
        calls = ((op, capture.nodes[op.id]) for op in self._graph.program if op.phase is Phase.BACKWARD)
        self._gradients = [(op, node) for op, node in calls if node is not None and node.target in targets]
        across = [t.id for t in self._graph.tensors if not t.static and t.id not in self._graph.kept and self._is_across(t.id)]
        self._worth = {t for t in across if self._graph.tensors[t].size_bytes >= LEAST_BYTES} or set(across)
        self._spared: dict[int, set[int]] = defaultdict(set)  # by tensor, the ops that can do without it
        for op, node in self._gradients:
            if isinstance(x := node.args[1], fx.Node):
                self._spared[self._get_tensor(x)].add(op.id)

    def iterate_gradients(self, targets: Collection[Any]) -> Iterator[tuple[Op, fx.Node]]:
        """Yield the program's gradients that call one of `targets`, in order."""
        return ((op, node) for op, node in self._gradients if node.target in targets)

    def is_needed(self, node: fx.Node) -> bool:
        """Return True if the value of `node` is small, or an op of the backward pass cannot do without it."""
        return self._get_tensor(node) not in self._worth or self.is_saved(node)

    def is_saved(self, node: fx.Node) -> bool:
        """Return True if the value of `node` is kept, or saved for an op of the backward pass that cannot do without it."""
        t = self._get_tensor(node)
        return t in self._graph.kept or (self._is_across(t) and bool(self._find_readers(t) - self._spared[t]))

    def add(self, called: Composed, reads: Sequence[fx.Node | int], op: Op, does: str, makes: int) -> None:
        """Add an op that computes exactly what it makes, beside the gradient `op`, or in place of it if it makes its output.

        Args:
            called, reads: as in ``Additions.add_op``.
            does: a word for its work.
            makes: the tensor that it makes.
        """
        replaces = makes in op.outputs
        self.additions.add_op(
            called,
            reads,
            like=op,
            name=f"{op.name}_{does}",
            target=f"pack.{does}",
            outputs=[makes],
            replaces=(op.id,) if replaces else (),
            recomputable=op.recomputable or not replaces,
        )

    def _get_tensor(self, node: fx.Node) -> int:
        """Return the tensor that holds the value of `node`."""
        return self.additions.tensor_of[get_storage(get_fake(node))]

    def _find_readers(self, tensor: int) -> set[int]:
        """Return the ops of the backward pass that read a tensor."""
        return {p for p in self._graph.consumers[tensor] if p < len(self._graph.program) and self._is_backward(p)}

    def _is_across(self, tensor: int) -> bool:
        """Return True if a tensor is made by the forward pass and read by the backward pass."""
        made = self._graph.tensors[tensor].producers[0]
        return made < len(self._graph.program) and not self._is_backward(made) and bool(self._find_readers(tensor))

    def _is_backward(self, op: int) -> bool:
        return self._graph.ops[op].phase is Phase.BACKWARD

"""The tensors of a captured step that are worth packing, and their readers."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphs.ir import Op, Phase
from planner.capture.lowering.lower import Capture
from planner.capture.options.additions import Additions
from planner.capture.program.program import Composed
from planner.capture.rewrites.outputs import get_fake, get_storage

TARGET = "pack"  # the prefix of the ops' targets

# Smaller tensors are not worth an op, unless the step has only such.
LEAST_BYTES = 2**20


class PackFinder:
    """A search in a capture that adds ops to it.

    Attributes:
        capture: the capture without the added ops.
        device: type of the device that is planned for, ``cpu`` or ``cuda``.
        additions: the added ops and tensors.
    """

    def __init__(self, capture: Capture, spared: Collection[Any]) -> None:
        """Search in `capture`; calls of `spared` can be computed without their second argument."""
        self.capture, self.graph = capture, capture.graph
        self.device = str(capture.graph.provenance["device"])
        self.additions = Additions(capture)
        across = [t.id for t in self.graph.tensors if not t.static and t.id not in self.graph.kept and self._is_across(t.id)]
        large = {t for t in across if self.graph.tensors[t].size_bytes >= LEAST_BYTES}
        self._worth = large or set(across)
        self._spared: dict[int, set[int]] = {}
        for op, node in self.iterate_calls(spared, Phase.BACKWARD):
            if isinstance(x := node.args[1], fx.Node):
                self._spared.setdefault(self.get_tensor(x), set()).add(op.id)

    def iterate_calls(self, targets: Collection[Any], phase: Phase | None = None) -> Iterator[tuple[Op, fx.Node]]:
        """Yield the program's ops that call one of `targets`, in order."""
        for op in self.graph.program:
            node = self.capture.nodes[op.id]
            if node is not None and node.target in targets and phase in (None, op.phase):
                yield op, node

    def get_tensor(self, node: fx.Node) -> int:
        """Return the tensor that holds the value of `node`."""
        return self.additions.tensor_of[get_storage(get_fake(node))]

    def is_worth(self, tensor: int) -> bool:
        """Return True if a tensor is large, made by the forward pass, not kept, and read by the backward pass."""
        return tensor in self._worth

    def find_readers(self, tensor: int) -> set[int]:
        """Return the ops of the backward pass that read a tensor."""
        return {p for p in self.graph.consumers[tensor] if p < len(self.graph.program) and self._is_backward(p)}

    def is_needed(self, node: fx.Node) -> bool:
        """Return True if the value of `node` is small, or needed by an op of the backward pass that cannot do without it."""
        tensor = self.get_tensor(node)
        return not self.is_worth(tensor) or bool(self.find_readers(tensor) - self._spared.get(tensor, set()))

    def add(
        self,
        called: Composed,
        reads: Sequence[fx.Node | int],
        *,
        like: Op,
        of: str,
        does: str,
        makes: int,
        alternative: bool = False,
    ) -> None:
        """Add an op.

        Args:
            called: computes the op exactly.
            reads: arguments of `called`, as in ``Additions.add_op``.
            like: the op that it belongs to.
            of: name of the op or tensor that it belongs to.
            does: a word for its work.
            makes: the tensor that it makes.
            stands_in: True if it is an alternative for `like`.
        """
        self.additions.add_op(
            called,
            reads,
            like=like,
            name=f"{of}_{does}",
            target=f"{TARGET}.{does}",
            outputs=[makes],
            replaces=(like.id,) if alternative else (),
            recomputable=like.recomputable or not alternative,
        )

    def _is_across(self, tensor: int) -> bool:
        made = self.graph.tensors[tensor].producers[0]
        return made < len(self.graph.program) and not self._is_backward(made) and bool(self.find_readers(tensor))

    def _is_backward(self, op: int) -> bool:
        return self.graph.ops[op].phase is Phase.BACKWARD


def allocate_like(value: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor with the layout of the fake `value`, on the device of `near`."""
    return near.new_empty_strided(value.shape, value.stride(), dtype=value.dtype)

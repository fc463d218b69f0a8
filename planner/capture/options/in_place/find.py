"""In place: kernels that work element by element may write over an input that goes with them.

No op is added, but ``Op.overwrites`` for the ops of the program, and to their calls the one that does it: PyTorch's own
variant of the operator with ``out=``, or the one that works in place. Both run the kernel that allocates its output otherwise.
Inductor's kernels are given their outputs; what was captured says of which inputs they may be given the memory.
"""

from dataclasses import replace

import torch
from torch import fx

from graphs.ir import Kind, Op
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.references import is_laid_out
from planner.capture.options.added import tensors_by_storage
from planner.capture.rewrites.batch_norms import ignored_inputs
from planner.capture.rewrites.outputs import fake, is_random, storage
from planner.passes.program import Call, OpCalls, Ref
from planner.torch_private.core import DispatchKey, OpOverload


def in_place(capture: Capture) -> Capture:
    """`capture` where ops of the program may write over inputs."""
    graph, program = capture.graph, capture.program
    finding = _Finding(capture)
    ops: list[Op] = []
    calls: list[OpCalls] = []
    for op, called in zip(graph.program, program.calls, strict=False):
        if called.launches:
            ops.append(replace(op, overwrites=finding.launched(called)))
            calls.append(called)
        elif (found := finding.of(op)) is None:
            ops.append(op)
            calls.append(called)
        else:
            ops.append(replace(op, overwrites=(found[:2],)))
            calls.append(replace(called, over=(found,)))
    ops += graph.ops[len(ops) :]
    calls += program.calls[len(calls) :]
    return replace(capture, graph=replace(graph, ops=tuple(ops)), program=replace(program, calls=tuple(calls)))


class _Finding:
    """Finds what may be written over."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._tensor_of = tensors_by_storage(capture)
        n = len(capture.graph.program)
        self._readers = [[r for r in readers if r < n] for readers in capture.graph.consumers]

    def of(self, op: Op) -> tuple[int, int, Call] | None:
        """An output of `op`, the input that it may be written over, and the call that does it.

        Of several inputs the one whose last reader comes first, as it goes soonest; then the one that fewest read.
        """
        node, calls = self.capture.nodes[op.id], self.capture.program.calls[op.id]
        if node is None or [path for _, path in calls.outputs] != [()] or op.random or op.mutates:
            return None
        target, call = node.target, calls.call
        # Where something else is called, or arguments are laid out anew, it is not this kernel on these tensors.
        as_it_is = call.target is target and not is_laid_out(call) and not ignored_inputs(node)
        if not isinstance(target, OpOverload) or not as_it_is:
            return None
        if torch.Tag.pointwise not in target.tags or target._schema.is_mutable or is_random(node):
            return None
        o = calls.outputs[0][0]
        for t in sorted(op.inputs, key=self._staying):
            value = self._whole(node, o, t)
            if value is None:
                continue
            reference = self.capture.values[value]
            if o in self.capture.graph.kept and not isinstance(reference, Ref):
                continue  # what the caller gets is no view
            if (out := with_out(target)) is not None:
                return o, t, Call(out[0], call.args, {**call.kwargs, out[1]: reference})
            if node.args[0] is value and (function := working_in_place(target)) is not None:
                return o, t, replace(call, target=function)
        return None

    def launched(self, calls: OpCalls) -> tuple[tuple[int, int], ...]:
        """Outputs of kernels and the inputs that they may be written over, each once: of several, as in ``of``."""
        found: dict[int, int] = {}
        for o, t, _ in sorted(calls.over, key=lambda pair: (*self._staying(pair[1]), pair[:2])):
            if self._may_go(o, t) and o not in found and t not in found.values():
                found[o] = t
        return tuple(found.items())

    def _staying(self, t: int) -> tuple[int, int]:
        """How long t is there in the program: the last op that reads it, and how many do."""
        return self._readers[t][-1], len(self._readers[t])

    def _may_go(self, o: int, t: int) -> bool:
        """Whether t does not stay, and has as many bytes as o."""
        graph = self.capture.graph
        read, made = graph.tensors[t], graph.tensors[o]
        alone = all(other is None for tensor in (read, made) for other in (tensor.view_of, tensor.held_for))
        return alone and not read.static and t not in graph.kept and read.size_bytes == made.size_bytes > 0

    def _whole(self, node: fx.Node, o: int, t: int) -> fx.Node | None:
        """The argument that is all of t, laid out as the output o; None if t stays, or is read in another order as well."""
        made = fake(node)
        if not self._may_go(o, t) or self.capture.graph.tensors[t].kind is Kind.RANDOM_STATE:
            return None
        values = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
        of_t = [value for value in values if self._tensor_of.get(storage(fake(value))) == t]
        return of_t[0] if of_t and all(_covers(fake(value), made) for value in of_t) else None


def _covers(read: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether `read` is all of its storage, each element once, where `made` has the same in its own."""
    alike = (read.dtype, read.shape, read.stride(), read.device) == (made.dtype, made.shape, made.stride(), made.device)
    size_bytes = read.numel() * read.element_size()
    whole = read.untyped_storage().nbytes() == made.untyped_storage().nbytes() == size_bytes
    expected, dense = 1, True
    for stride, size in sorted((stride, size) for stride, size in zip(read.stride(), read.shape, strict=True) if size > 1):
        dense = dense and stride == expected
        expected *= size
    return alike and whole and dense and read.storage_offset() == made.storage_offset() == 0


def with_out(target: OpOverload) -> tuple[OpOverload, str] | None:
    """The variant of `target` that writes what it is given, and what that argument is called; None if PyTorch has no kernel."""
    for name in target.overloadpacket.overloads():
        variant: OpOverload = getattr(target.overloadpacket, name)
        given = [argument for argument in variant._schema.arguments if argument.is_out]
        if len(given) != 1 or not _is_kernel(variant):
            continue
        if _arguments(target) == [argument for argument in _arguments(variant) if argument[0] != given[0].name]:
            return variant, given[0].name
    return None


def working_in_place(target: OpOverload) -> OpOverload | None:
    """The variant of `target` that writes over its first argument; None if PyTorch has no kernel."""
    packet = getattr(torch.ops.aten, f"{target.overloadpacket.__name__}_", None)
    variant: OpOverload | None = getattr(packet, target._overloadname, None) if target.namespace == "aten" else None
    if variant is None or not _is_kernel(variant) or _arguments(variant) != _arguments(target):
        return None
    return variant


def _is_kernel(variant: OpOverload) -> bool:
    """Whether `variant` is not made of others.

    Those that PyTorch generates make the output elsewhere and copy it; ``mul_`` by a number rounds the number first, which
    ``mul`` does not.
    """
    return torch.Tag.generated not in variant.tags and variant.has_kernel_for_dispatch_key(DispatchKey.CPU)


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]

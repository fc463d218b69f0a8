"""In-place ops: elementwise kernels may overwrite an input.

No op is added. Ops of the program get ``Op.overwrites``, and their calls the in-place call: PyTorch's variant of the operator
with ``out=``, or its in-place variant. Both run the same kernel as the allocating operator. Inductor's kernels get their outputs
as arguments; the capture lists the inputs whose memory they may use.
"""

from dataclasses import replace

import torch
from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.lowering.references import is_laid_out
from planner.capture.options.additions import map_tensors_by_storage
from planner.capture.options.in_place_variants import find_in_place_variant, find_out_variant, is_covering
from planner.capture.program.program import Call, OpCalls, Ref
from planner.capture.rewrites.batch_norms import find_ignored_inputs
from planner.capture.rewrites.outputs import get_fake, get_storage, is_random
from planner.graphs.ir import Kind, Op
from planner.torch_private.core import OpOverload


def find_in_place(capture: Capture) -> Capture:
    """Return `capture` with the possible in-place writes of the program's ops."""
    graph, program = capture.graph, capture.program
    finding = _Finding(capture)
    ops: list[Op] = []
    calls: list[OpCalls] = []
    for op, called in zip(graph.program, program.calls, strict=False):
        if called.launches:
            ops.append(replace(op, overwrites=finding.list_launched(called)))
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
    """A search for inputs that ops may overwrite."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._tensor_of = map_tensors_by_storage(capture)
        n = len(capture.graph.program)
        self._readers = [[r for r in readers if r < n] for readers in capture.graph.consumers]

    def of(self, op: Op) -> tuple[int, int, Call] | None:
        """Return an output of `op`, the input that it may overwrite, and the in-place call; None if there is none.

        Of several inputs, the one with the earliest last reader is chosen, then the one with the fewest readers.
        """
        node, calls = self.capture.nodes[op.id], self.capture.program.calls[op.id]
        if node is None or [path for _, path in calls.outputs] != [()] or op.random or op.mutates:
            return None
        target, call = node.target, calls.call
        # With another target or copied arguments, it is not this kernel on these tensors.
        as_it_is = call.target is target and not is_laid_out(call) and not find_ignored_inputs(node)
        if not isinstance(target, OpOverload) or not as_it_is:
            return None
        if torch.Tag.pointwise not in target.tags or target._schema.is_mutable or is_random(node):
            return None
        o = calls.outputs[0][0]
        for t in sorted(op.inputs, key=self._find_last_reader):
            value = self._find_whole(node, o, t)
            if value is None:
                continue
            reference = self.capture.values[value]
            if o in self.capture.graph.kept and not isinstance(reference, Ref):
                continue  # results for the caller are no views
            if (out := find_out_variant(target)) is not None:
                return o, t, Call(out[0], call.args, {**call.kwargs, out[1]: reference})
            if node.args[0] is value and (function := find_in_place_variant(target)) is not None:
                return o, t, replace(call, target=function)
        return None

    def list_launched(self, calls: OpCalls) -> tuple[tuple[int, int], ...]:
        """Return the outputs of kernels and the inputs that they may overwrite, each once, chosen as in ``of``."""
        found: dict[int, int] = {}
        for o, t, _ in sorted(calls.over, key=lambda pair: (*self._find_last_reader(pair[1]), pair[:2])):
            if self._may_go(o, t) and o not in found and t not in found.values():
                found[o] = t
        return tuple(found.items())

    def _find_last_reader(self, t: int) -> tuple[int, int]:
        """Return the last op that reads t in the program, and the number of its readers."""
        return self._readers[t][-1], len(self._readers[t])

    def _may_go(self, o: int, t: int) -> bool:
        """Return True if t may be freed, and has as many bytes as o."""
        graph = self.capture.graph
        read, made = graph.tensors[t], graph.tensors[o]
        alone = all(other is None for tensor in (read, made) for other in (tensor.view_of, tensor.held_for))
        return alone and not read.static and t not in graph.kept and read.size_bytes == made.size_bytes > 0

    def _find_whole(self, node: fx.Node, o: int, t: int) -> fx.Node | None:
        """Return the argument that is all of t, laid out like the output o; None if t stays, or is also read in another order."""
        made = get_fake(node)
        if not self._may_go(o, t) or self.capture.graph.tensors[t].kind is Kind.RANDOM_STATE:
            return None
        values = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
        of_t = [value for value in values if self._tensor_of.get(get_storage(get_fake(value))) == t]
        return of_t[0] if of_t and all(is_covering(get_fake(value), made) for value in of_t) else None

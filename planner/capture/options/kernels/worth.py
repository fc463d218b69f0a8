"""Selection of added ops: those faster than other ops for the same results, or with less memory."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from planner.capture.lowering.lower import Capture
from planner.capture.options.kernels.alternative import Alternative
from planner.graphs.ir import Graph, Op
from planner.graphs.provenance import Times

FASTER = 0.1  # of the replaced time: measurements vary, and the best of many is better by chance
_SHARE_S = 1e-4  # of the step
_SHARE_BYTES = 0.01  # of the memory of the largest op


@dataclass(frozen=True, slots=True)
class _UsefulOps:
    """Ops that are useful only together, or the program's own.

    Attributes:
        held_bytes: memory of the largest op during its execution.
        exact: True if they have the bits of the program.
    """

    ops: tuple[int, ...]
    time_s: float
    held_bytes: int
    exact: bool

    def is_better(self, other: "_UsefulOps", margin_s: float, margin_bytes: float) -> bool:
        """Return True if the offer is better in time or memory by more than noise."""
        faster = self.time_s < (1 - FASTER) * other.time_s and other.time_s - self.time_s > margin_s
        return faster or self.held_bytes < other.held_bytes - margin_bytes or (self.exact and not other.exact)


def find_useless_ops(capture: Capture) -> frozenset[int]:
    """Return the ids of the ops of ``find_kernels`` that are neither faster nor smaller than another offer for the same ops.

    Args:
        capture: with times and workspaces, measured or modelled.
    """
    graph = capture.graph
    found: set[int] = set()
    margin_s = _SHARE_S * graph.time_s
    margin_bytes = _SHARE_BYTES * max(_count_held(graph, op) for op in graph.program)
    measured = graph.provenance.times is Times.MEASURED
    for op, call in zip(graph.ops, capture.program.calls, strict=True):
        if measured and isinstance(call.composed, Alternative) and call.composed.always_exact and not op.exact:
            found.add(op.id)  # the kernel does not read before it writes: its result is wrong
    for replaced, offers in _find_offers(capture, found).items():
        taken = [_offer(graph, replaced)]
        # The fastest first: a slower one stays only if it is smaller or exact beside each of those.
        for offer in sorted(offers, key=lambda offer: (offer.time_s, offer.held_bytes)):
            if all(offer.is_better(other, margin_s, margin_bytes) for other in taken):
                taken.append(offer)
            else:
                found.update(offer.ops)
    return frozenset(found)


def _find_offers(capture: Capture, wrong: Collection[int]) -> dict[tuple[int, ...], list[_UsefulOps]]:
    """Return groups of ops that are replaced together, with the offers for them, without the ops that are `wrong`."""
    graph = capture.graph
    bundles: dict[str, list[int]] = {}
    for op, call in zip(graph.ops, capture.program.calls, strict=True):
        if isinstance(call.composed, Alternative) and op.id not in wrong:
            bundles.setdefault(call.composed.bundle, []).append(op.id)
    replaced: dict[tuple[int, ...], list[_UsefulOps]] = {}
    for ops in bundles.values():
        stood_for = tuple(sorted({p for op in ops for p in graph.ops[op].replaces}))
        replaced.setdefault(stood_for, []).append(_offer(graph, ops))
    return replaced


def _offer(graph: Graph, ids: Iterable[int]) -> _UsefulOps:
    ops = [graph.ops[i] for i in ids]
    return _UsefulOps(
        tuple(op.id for op in ops),
        sum(op.time_s for op in ops),
        max(_count_held(graph, op) for op in ops),
        all(op.exact for op in ops),
    )


def _count_held(graph: Graph, op: Op) -> int:
    """Return the bytes in memory while `op` is executed, without static memory."""
    tensors = {t for t in (*op.inputs, *op.outputs) if not graph.tensors[t].static}
    return op.workspace_bytes + sum(graph.tensors[t].size_bytes for t in tensors)

"""torchtitan's ``sac_and_offload``: selective checkpointing with offloading of the saved tensors.

Of each block of the model a list of ops is saved, as in ``sac``, and the rest is recomputed when it is needed. Tensors that stay
in memory from the forward pass, in any block but the last, are offloaded: the largest first, within a share of them and the
capacity of the host. A tensor is offloaded when it is produced, and freed at the end of the block after the last one that reads
it. It is reloaded before the first op of the backward pass of the block after its own, and stays until its last reader.

Users choose blocks, list and the budget on the host: all lists and blocks are tried, with several shares, and the fastest
schedule that fits is returned.
"""

from collections.abc import Iterator
from dataclasses import replace

from planner.graphs.ir import Phase
from planner.solvers.baselines.common.blocks import find_blockings
from planner.solvers.baselines.common.offloading import Layers, Offer, answer_by_offloading, schedule_with
from planner.solvers.baselines.common.recomputation import recompute_groups
from planner.solvers.baselines.common.verdicts import Candidate
from planner.solvers.baselines.sac import save_lists, select_listed_ops
from planner.solvers.request import Request
from planner.solvers.result import Result

_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the offloadable bytes, as budgets on the host


def solve(request: Request) -> Result:
    """Return the fastest schedule that fits; LIMIT if none does."""
    what = "selective checkpointing with offload"
    return answer_by_offloading(request, "sac-and-offload", _generate_trials, what=what, by_blocks=True)


def _generate_trials(offer: Offer) -> Iterator[Candidate]:
    """Yield the schedules of every list, division into blocks and share; lists that save the same ops once."""
    graph = offer.program
    tried: set[frozenset[int]] = set()
    for save_list in save_lists([op.target for op in graph.ops if op.phase is Phase.FORWARD]):
        saved = frozenset(t for op in select_listed_ops(save_list, graph) for t in op.outputs)
        if saved in tried:
            continue
        tried.add(saved)
        for way in find_blockings(graph):
            computed = recompute_groups(graph, way.blocks, saved=saved, at_once=False).computed
            layers = Layers(offer, computed, way.blocks)
            for share in _SHARES:
                settings = {"saves": save_list.name, **way.settings, "share": share}
                moves = layers.plan_moves(_select_largest(offer, layers.may_go(), share))
                yield Candidate(schedule_with(offer, computed, moves), settings)


def _select_largest(offer: Offer, may_go: list[int], share: float) -> list[int]:
    """Return the largest of `may_go` within `share` of them and the capacity of the host."""
    room = int(share * sum(map(offer.get_size_bytes, may_go)))
    capacity = room if offer.host_bytes is None else min(room, offer.host_bytes)
    return replace(offer, host_bytes=capacity).select_fitting(sorted(may_go, key=lambda t: -offer.get_size_bytes(t)))

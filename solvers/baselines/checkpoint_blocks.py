"""Checkpointing of every block: the usual manual recipe (``torch.utils.checkpoint`` around each layer of a network).

The fastest feasible division of the model into blocks (``common.blocks``) is used. Of a block only tensors at its boundary stay
in memory (those that forward ops outside it read, and those that the step returns or cannot recompute). The others are freed, and
recomputed together just before the first backward op that reads one of them.
"""

from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule
from planner.solvers.baselines.common.blocks import block_of, find_blockings
from planner.solvers.baselines.common.recomputation import recompute_groups
from planner.solvers.baselines.common.verdicts import Candidate, answer, build_failure
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result


def checkpoint_blocks(graph: Graph, level: int) -> Schedule:
    """Return the schedule that checkpoints every block of `level`."""
    return recompute_groups(graph, [block_of(op.module, level) or None for op in graph.ops])


def solve(request: Request) -> Result:
    """Return the fastest schedule of all divisions into blocks that fit; LIMIT if none does.

    Its bound is the step without recomputation.
    """
    ways = find_blockings(request.graph)
    if not ways:
        why = "checkpointing by blocks does not apply: the graph has no blocks, for no op belongs to a module inside the model"
        return build_failure(request, "checkpoint-blocks", why, Reason.INAPPLICABLE)
    trials = (Candidate(recompute_groups(request.graph, way.blocks), way.settings) for way in ways)
    return answer(request, "checkpoint-blocks", trials, what="checkpointing every block")

"""Checkpoint every block: the usual manual recipe (``torch.utils.checkpoint`` around each layer of a network).

Of the ways to divide a model in blocks (``common.blocks``) the fastest that fits is taken. Of a block only what crosses its
boundary stays in memory (tensors that ops of the forward pass outside it read, and what the step returns or cannot compute
again). The rest is dropped, and computed again, all at once, just before the first backward op that reads some of it.
"""

from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.baselines.common.answers import Candidate, answer, failure
from solvers.baselines.common.blocks import block_of, blockings
from solvers.baselines.common.recomputation import recompute_groups
from solvers.request import Request
from solvers.result import Reason, Result


def checkpoint_blocks(graph: Graph, level: int) -> Schedule:
    """The schedule that checkpoints every block of `level`."""
    return recompute_groups(graph, [block_of(op.module, level) or None for op in graph.ops])


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``: of the ways to divide the model that fit, the fastest; LIMIT when none does.

    The policy proves nothing; its bound is the step without recomputation.
    """
    ways = blockings(request.graph)
    if not ways:
        why = "checkpointing by blocks does not apply: the graph has no blocks, for no op belongs to a module inside the model"
        return failure(request, "checkpoint-blocks", why, Reason.INAPPLICABLE)
    trials = (Candidate(recompute_groups(request.graph, way.blocks), way.settings) for way in ways)
    return answer(request, "checkpoint-blocks", trials, what="checkpointing every block")

"""Checkpoint every block: the usual manual recipe (``torch.utils.checkpoint`` around each layer of a network).

A block is what a numbered child of a container does in the forward pass: ``model.h.0``, ``model.layers.3``.
Where containers are nested (stages of blocks, blocks of layers) there is a choice of levels: at level 1 a
block ends with the first number in a module's path, at level 2 with the second, and so on; a path with
fewer numbers ends with its last. Ops of modules without a number belong to no block.

Of a block only what crosses its boundary stays in memory (tensors that ops of the forward pass outside it
read, and what the step returns or cannot compute again). The rest is dropped, and computed again, all at
once, just before the first backward op that reads some of it.
"""

from collections.abc import Callable

from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.policies.replay import Task, Trial, answer, failure, recompute_groups
from solvers.result import Progress, Result


def levels(graph: Graph) -> int:
    """How deep numbered modules are nested; 0 if there are none."""
    return max((sum(part.isdecimal() for part in op.module.split(".")) for op in graph.ops), default=0)


def block_of(module: str, level: int) -> str:
    """The block that `module` belongs to at `level` (1 or more); "" if none."""
    parts = module.split(".")
    ends = [place + 1 for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: ends[min(level, len(ends)) - 1]]) if ends else ""


def checkpoint_blocks(graph: Graph, level: int) -> Schedule:
    """The schedule that checkpoints every block of `level`."""
    return recompute_groups(graph, [block_of(op.module, level) or None for op in graph.ops])


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    tolerance: float = 1e-3,
    time_limit_s: float = 3600.0,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """As ``solvers.registry.Solver``: of the levels whose schedule fits, the fastest; LIMIT when none does.

    The policy proves nothing; its bound is the step without recomputation.
    """
    task = Task(graph, budget_bytes, "checkpoint_blocks", tolerance, time_limit_s, on_progress, should_stop)
    trials = [Trial(checkpoint_blocks(graph, level), {"level": level}) for level in range(1, levels(graph) + 1)]
    if not trials:
        why = "the graph has no blocks: no op belongs to a numbered module, such as model.layers.0"
        return failure(task, why)
    return answer(
        task,
        trials,
        what="checkpointing every block",
    )

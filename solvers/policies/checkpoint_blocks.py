"""Checkpoint every block: the usual manual recipe (``torch.utils.checkpoint`` around each layer of a network).

Models name and nest their parts in different ways, so there are several ways to say what a block is, and the fastest
that fits is taken:

- at *level* n a block ends with the n-th number in a module's path, or its last: ``model.h.0``, ``model.layers.3``; ops
  of modules without a number belong to no block;
- at *depth* n blocks are the modules n steps below the model (``model.stem``, ``model.encoder``), what an
  ``nn.ModuleList`` holds being in its place. Single layers with nothing inside belong to no block, or are blocks too.

Of a block only what crosses its boundary stays in memory (tensors that ops of the forward pass outside it
read, and what the step returns or cannot compute again). The rest is dropped, and computed again, all at
once, just before the first backward op that reads some of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.policies.module_tree import ModuleTree
from solvers.policies.replay import Candidate, answer, failure, recompute_groups
from solvers.request import Request
from solvers.result import Reason, Result


@dataclass(frozen=True, slots=True)
class Blocking:
    """One way to divide the forward pass: what it is called, and the block of each op; None: in none."""

    settings: Mapping[str, object]
    blocks: tuple[str | None, ...]


def blockings(graph: Graph) -> list[Blocking]:
    """The ways to divide the forward pass of `graph` in blocks; those that divide it the same way once."""
    ways = [
        Blocking({"level": level}, tuple(block_of(op.module, level) or None for op in graph.ops))
        for level in range(1, levels(graph) + 1)
    ]
    tree = ModuleTree(graph)
    for depth in range(1, tree.depth + 1):
        ways.append(Blocking({"depth": depth}, tree.modules_at(depth, layers=False)))
        ways.append(Blocking({"depth": depth, "layers": True}, tree.modules_at(depth, layers=True)))
    distinct: dict[tuple[int, ...], Blocking] = {}
    for way in ways:
        if any(way.blocks):
            distinct.setdefault(_unnamed(way.blocks), way)
    return list(distinct.values())


def _unnamed(blocks: Sequence[str | None]) -> tuple[int, ...]:
    """`blocks` by numbers, which are the same whatever they are called."""
    numbers: dict[str | None, int] = {None: 0}
    return tuple(numbers.setdefault(block, len(numbers)) for block in blocks)


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

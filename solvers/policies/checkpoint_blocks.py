"""Checkpoint every block: the usual manual recipe (``torch.utils.checkpoint`` around each layer of a network).

A block is what a numbered child of a container does in the forward pass: ``model.h.0``, ``model.layers.3``.
Where containers are nested (stages of blocks, blocks of layers) there is a choice of levels: at level 1 a
block ends with the first number in a module's path, at level 2 with the second, and so on; a path with
fewer numbers ends with its last. Ops of modules without a number belong to no block.

Of a block only what crosses its boundary stays in memory (tensors that ops of the forward pass outside it
read, and what the step returns or cannot compute again). The rest is dropped, and computed again, all at
once, just before the first backward op that reads some of it.
"""

import time
from collections.abc import Callable

from graphs.ir import Graph, Phase
from graphs.schedule import Schedule, schedule_of
from graphs.simulate import Simulation, simulate
from graphs.units import format_bytes
from solvers.result import Progress, Result, Status


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
    blocks = [block_of(op.module, level) if op.phase is Phase.FORWARD else "" for op in graph.ops]
    dropped = {t.id for t in graph.tensors if _is_dropped(graph, blocks, t.id)}
    again = _needed_again(graph, blocks, dropped)
    computed: list[int] = []
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            for t in op.inputs:
                if t in dropped:
                    computed += again.pop(blocks[graph.tensors[t].producer or 0], ())
        computed.append(op.id)
    return schedule_of(graph, computed)


def _needed_again(graph: Graph, blocks: list[str], dropped: set[int]) -> dict[str, list[int]]:
    """For each block the ops that make what its backward reads of the dropped tensors, in program order."""
    needed = {t for op in graph.ops if op.phase is not Phase.FORWARD for t in op.inputs} & dropped
    again: dict[str, list[int]] = {}
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            needed.update(dropped.intersection(op.inputs))
            again.setdefault(blocks[op.id], []).append(op.id)
    return {block: ops[::-1] for block, ops in again.items()}


def _is_dropped(graph: Graph, blocks: list[str], t: int) -> bool:
    producer = graph.tensors[t].producer
    if producer is None or t in graph.kept or not blocks[producer] or not graph.ops[producer].recomputable:
        return False
    readers = (r for r in graph.consumers[t] if graph.ops[r].phase is Phase.FORWARD)
    return all(blocks[reader] == blocks[producer] for reader in readers)


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
    start = time.perf_counter()
    tried = [(level, schedule, simulate(graph, schedule)) for level, schedule in _schedules(graph)]
    fitting = [trial for trial in tried if trial[2].peak_bytes <= budget_bytes]
    level, schedule, _ = min(fitting, key=lambda trial: (trial[2].time_s, trial[2].peak_bytes), default=(None, None, None))
    return Result(
        graph,
        budget_bytes=budget_bytes,
        status=Status.LIMIT if schedule is None else Status.FEASIBLE,
        schedule=schedule,
        bound_s=graph.time_s,
        solver="checkpoint_blocks",
        seconds=time.perf_counter() - start,
        settings={} if level is None else {"level": level},
        message="" if schedule is not None else _why_not(budget_bytes, [simulation for _, _, simulation in tried]),
    )


def _schedules(graph: Graph) -> list[tuple[int, Schedule]]:
    return [(level, checkpoint_blocks(graph, level)) for level in range(1, levels(graph) + 1)]


def _why_not(budget_bytes: int, tried: list[Simulation]) -> str:
    if not tried:
        return "the graph has no blocks: no op belongs to a numbered module, such as model.layers.0"
    least = min(simulation.peak_bytes for simulation in tried)
    return (
        f"checkpointing every block needs {format_bytes(least)}, over the budget of {format_bytes(budget_bytes)}: "
        "use a solver that chooses what to recompute, such as windows"
    )

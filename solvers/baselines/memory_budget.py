"""PyTorch's Memory Budget API (``activation_memory_budget``; partitioner of functorch, torch 2.13).

A fraction of the bytes saved for the backward pass is allowed. Given the ops that may not be recomputed (banned), the saved
tensors are a minimum cut between these and the backward pass, in bytes x 1.1^(distance to the backward pass, at most 100). At 1
all but elementwise ops and data movement are banned. Below, only expensive ones: compute-intensive ops, random ones, and
reductions to less than a quarter; if their cut is small enough it is used. Otherwise a knapsack chooses the banned ops to save,
of most time within the fraction, and the others are no longer banned. At 0 nothing is saved.

In a graph without PyTorch's op names all ops count as compute-intensive.

Tensors that are not saved are recomputed when the backward pass needs them. Stages of the partitioner that differ only in fusion
are omitted, since nothing is fused here; op times are those of the graph (its "profile" estimator). As the fraction bounds saved
bytes and not the peak, all fractions are tried, and the fastest schedule that fits is returned.
"""

from collections.abc import Iterator, Sequence, Set as AbstractSet

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from planner.graphs.ir import Graph, Op, Phase
from planner.solvers.baselines.common.recomputation import find_droppable, read_later, recompute_groups
from planner.solvers.baselines.common.torch_ops import CHEAP, COMPUTE_INTENSIVE, is_one_of
from planner.solvers.baselines.common.verdicts import Candidate, answer
from planner.solvers.request import Request
from planner.solvers.result import Result

FRACTIONS = tuple(round(1.0 - k / 20, 2) for k in range(21))  # of the bytes saved at 1
_QUANTA = 10000  # of the saved bytes, in the knapsack
_UNBOUNDED = 2**30


def solve(request: Request) -> Result:
    """Return the fastest schedule of all fractions that fits; LIMIT if none does."""
    return answer(request, "memory-budget", generate_trials(request.graph), what="a memory budget")


def generate_trials(graph: Graph, fractions: Sequence[float] = FRACTIONS) -> Iterator[Candidate]:
    """Yield the schedule of each fraction, those that save the same tensors once."""
    partition = Partition(graph)
    tried: set[frozenset[int]] = set()
    for fraction in fractions:
        saved = partition.choose_saved(fraction)
        if saved not in tried:
            tried.add(saved)
            schedule = recompute_groups(graph, [op.phase for op in graph.ops], saved=saved, at_once=False)
            yield Candidate(schedule, {"fraction": fraction})


class Partition:
    """The saved tensors by fraction of the bytes that are saved at 1."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.absent = find_droppable(graph)
        self.read = read_later(graph) & self.absent
        self.distance = self._compute_distances()
        forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        named = any(is_one_of(op, COMPUTE_INTENSIVE | CHEAP) for op in forward)
        costly = (op for op in forward if not named or op.random or is_one_of(op, COMPUTE_INTENSIVE) or self._reduces(op))
        self.costly = {op.id for op in costly}
        self.most = self.cut(self.costly | {op.id for op in forward if not is_one_of(op, CHEAP)})
        self.least = self.cut(self.costly)

    def choose_saved(self, fraction: float) -> frozenset[int]:
        """Return the tensors saved at `fraction`."""
        if fraction >= 1:
            return self.most
        allowed = fraction * self.count_bytes(self.most)
        if fraction <= 0:
            return frozenset()
        if self.count_bytes(self.least) < allowed:
            return self.least
        items = sorted(i for i in self.costly if self._count_needed_bytes(i))
        sizes = np.array([self._count_needed_bytes(i) for i in items], dtype=np.float64)
        chosen = solve_knapsack(sizes / self.count_bytes(self.most), [self.graph.ops[i].time_s for i in items], fraction)
        return self.cut({items[k] for k in chosen})

    def count_bytes(self, tensors: AbstractSet[int]) -> int:
        """Return the total size of `tensors`."""
        return sum(self.graph.tensors[t].size_bytes for t in tensors)

    def _count_needed_bytes(self, op_id: int) -> int:
        return self.count_bytes({t for t in self.graph.ops[op_id].outputs if t in self.distance})

    def _reduces(self, op: Op) -> bool:
        return 4 * self.count_bytes(set(op.outputs)) < self.count_bytes(set(op.inputs))

    def _compute_distances(self) -> dict[int, int]:
        """Return for each tensor that the backward pass needs its distance from it, in ops."""
        distance = dict.fromkeys(self.read, 1)
        for op in reversed(self.graph.ops):
            if op.phase is Phase.FORWARD:
                ahead = min((distance[t] for t in op.outputs if t in distance), default=None)
                for t in op.inputs:
                    if t in self.absent and ahead is not None:
                        distance[t] = min(distance.get(t, ahead + 1), ahead + 1)
        return distance

    def cut(self, banned: AbstractSet[int]) -> frozenset[int]:
        """Return the tensors of a minimum cut between the outputs of the ops `banned` and the inputs of the backward pass."""
        tensors = sorted(self.distance)
        if not tensors:
            return frozenset()
        # Each tensor is an edge, from 2 k to 2 k + 1.
        place = {t: 2 * k for k, t in enumerate(tensors)}
        source, sink = 2 * len(tensors), 2 * len(tensors) + 1
        weights = np.array([self.graph.tensors[t].size_bytes * 1.1 ** min(self.distance[t], 100) for t in tensors])
        scale = max(1.0, weights.sum() / (_UNBOUNDED // 2))
        edges = [(place[t], place[t] + 1, max(1, int(weight / scale))) for t, weight in zip(tensors, weights, strict=True)]
        for t in tensors:
            if not banned.isdisjoint(self.graph.tensors[t].producers):
                edges.append((source, place[t], _UNBOUNDED))
            if t in self.read:
                edges.append((place[t] + 1, sink, _UNBOUNDED))
            made = {o for r in self.graph.consumers[t] for o in self.graph.ops[r].outputs}
            edges += [(place[t] + 1, place[o], _UNBOUNDED) for o in made if o in place]
        starts, ends, capacities = np.array(edges, dtype=np.int32).T
        network = csr_matrix((capacities, (starts, ends)), shape=(sink + 1, sink + 1))
        left = network - maximum_flow(network, source, sink).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
        return frozenset(t for t in tensors if place[t] in reached and place[t] + 1 not in reached)


def solve_knapsack(sizes: NDArray[np.float64], values: Sequence[float], room: float) -> list[int]:
    """Return the items of largest total value within `room`, with sizes and room rounded to quanta; a dynamic programme."""
    whole = [round(size * _QUANTA) for size in sizes.tolist()]
    best = np.zeros(round(room * _QUANTA) + 1)
    taken = []
    for size, value in zip(whole, values, strict=True):
        with_it = np.full(len(best), -np.inf)
        if size < len(best):
            with_it[size:] = best[: len(best) - size] + value
        taken.append(with_it > best)
        best = np.maximum(best, with_it)
    chosen = []
    left = len(best) - 1
    for k in range(len(whole) - 1, -1, -1):
        if taken[k][left]:
            chosen.append(k)
            left -= whole[k]
    return chosen[::-1]

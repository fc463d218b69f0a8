"""The memory of a step that runs in an arena: static memory, the arena, and buffers outside the arena."""

from dataclasses import dataclass

from planner.graphs.addresses import Buffer, buffers_of, count_moments, live_bytes
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule
from planner.solvers.addresses.solve import AddressResult, solve_by
from planner.solvers.clock import Clock


@dataclass(frozen=True, slots=True)
class ArenaRules:
    """Rules for the arena of a step: which buffers are in it, and the alignment of their offsets.

    Attributes:
        alignment: divisor of all offsets, in bytes.
        least_bytes: size from which buffers are in the arena; smaller ones are outside.
        outside: ids of tensors that are outside whatever their size.
    """

    alignment: int = 1
    least_bytes: int = 1
    outside: frozenset[int] = frozenset()

    def divide_buffers(self, graph: Graph, schedule: Schedule) -> tuple[list[Buffer], list[Buffer]]:
        """Return the buffers of a step in the arena, and those outside; if its requests are known, each lives from its own on."""
        names = {graph.tensors[t].name for t in self.outside}
        inside, outside = list[Buffer](), list[Buffer]()
        for buffer in buffers_of(graph, schedule, alignment=self.alignment, moments=count_known_moments(graph)):
            fits = buffer.size >= self.least_bytes and not names & {buffer.id, buffer.id.rpartition("#")[0]}
            (inside if fits else outside).append(buffer)
        return inside, outside

    def holds(self, graph: Graph, t: int) -> bool:
        """Return True if the buffers of tensor t are in the arena."""
        return t not in self.outside and graph.tensors[t].size_bytes >= self.least_bytes


def count_known_moments(graph: Graph) -> int:
    """Return the moments of a step of a schedule: 1 if the requests of ops are not known, so that all of an op begins at once."""
    return count_moments(graph) if any(op.requests for op in graph.ops) else 1


@dataclass(frozen=True)
class Needs:
    """The memory of a step that runs by a schedule.

    Attributes:
        inside: buffers in the arena.
        outside_bytes: peak of the bytes in use outside the arena, without static memory.
        budget_bytes: budget for arena, memory outside it and static memory together.
    """

    inside: tuple[Buffer, ...]
    outside_bytes: int
    static_bytes: int
    budget_bytes: int

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, rules: ArenaRules, budget_bytes: int) -> "Needs":
        """Return the memory that `schedule` needs, with its buffers divided by `rules` into those in the arena and outside."""
        inside, outside = rules.divide_buffers(graph, schedule)
        return cls(tuple(inside), live_bytes(tuple(outside)), graph.static_bytes, budget_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the arena may have."""
        return self.budget_bytes - self.static_bytes - self.outside_bytes

    def find_addresses(self, clock: Clock) -> AddressResult:
        """Search for addresses within the capacity, until the limit of the clock."""
        return solve_by(clock, self.inside, self.capacity_bytes)

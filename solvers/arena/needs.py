"""The memory of a step that runs in an arena: static memory, the arena, and buffers outside the arena."""

from dataclasses import dataclass

from graphs.addresses import Buffer, buffers_of, live_bytes
from graphs.ir import Graph
from graphs.schedule import Schedule
from solvers.addresses.solve import AddressResult, solve_by
from solvers.clock import Clock


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

    def holds(self, graph: Graph, t: int) -> bool:
        """Return True if the buffers of tensor t are in the arena."""
        return t not in self.outside and graph.tensors[t].size_bytes >= self.least_bytes


@dataclass(frozen=True)
class Needs:
    """The memory of a step that runs by a schedule.

    Attributes:
        inside: buffers in the arena.
        outside_bytes: peak of the bytes in use outside the arena, without static memory.
        static_bytes: static memory.
        budget_bytes: budget for arena, memory outside it and static memory together.
    """

    inside: tuple[Buffer, ...]
    outside_bytes: int
    static_bytes: int
    budget_bytes: int

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, rules: ArenaRules, budget_bytes: int) -> "Needs":
        """Return the memory that `schedule` needs, with its buffers divided by `rules` into those in the arena and outside."""
        names = {graph.tensors[t].name for t in rules.outside}
        inside, outside = list[Buffer](), list[Buffer]()
        for buffer in buffers_of(graph, schedule, alignment=rules.alignment):
            fits = buffer.size >= rules.least_bytes and not names & {buffer.id, buffer.id.rpartition("#")[0]}
            (inside if fits else outside).append(buffer)
        return cls(tuple(inside), live_bytes(tuple(outside)), graph.static_bytes, budget_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the arena may have."""
        return self.budget_bytes - self.static_bytes - self.outside_bytes

    def find_addresses(self, clock: Clock) -> AddressResult:
        """Search for addresses within the capacity, until the limit of the clock."""
        return solve_by(clock, self.inside, self.capacity_bytes)

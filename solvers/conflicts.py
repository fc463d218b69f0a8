"""Conflicts: stays and moments that no schedule may combine, because the buffers would not fit the arena.

They are found by ``solvers.arena``, and hold for all schedules of a plain graph whose first executions are in program order. The
exact solver refuses schedules in which one occurs, and has rows for those of residency (docs/formulation.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphs.ir import Graph
from graphs.schedule import Compute, Schedule

Tensors = int  # a set of tensors: bit t for tensor t


def set_of(tensors: Iterable[int]) -> Tensors:
    """Return a set of tensors."""
    found = 0
    for t in tensors:
        found |= 1 << t
    return found


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor that is in memory without a break while the ops `first` to `last` are executed for the first time."""

    tensor: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Stays of tensors that exclude each other: a schedule that fits the arena lacks at least one of them."""

    stays: tuple[Stay, ...]

    def occurs_in(self, course: "Course") -> bool:
        """Return True if a schedule has all of these stays."""
        return all(course.has(stay) for stay in self.stays)


@dataclass(frozen=True, slots=True)
class Moment:
    """An execution of an op in a pattern, and the tensors that must be in memory during it.

    Attributes:
        op: id of the op that is executed; None for any op.
        held: tensors in memory, including outputs of the op.
        twice: outputs that are in memory before the op is executed.
        on: tensors of `held` that stay in memory without a break until the next moment.
    """

    op: int | None
    held: Tensors
    twice: Tensors
    on: Tensors


@dataclass(frozen=True, slots=True)
class Pattern:
    """A sequence of moments that no schedule may contain in this order, whatever is executed between them."""

    moments: tuple[Moment, ...]

    def occurs_in(self, course: "Course") -> bool:
        """Return True if a schedule has these moments in this order."""
        reached = 1  # bit p: the first p moments have been
        for op, there, fresh in zip(course.computed, course.during, course.fresh, strict=True):
            live = there & ~fresh
            reached = self.advance(self.keep_intact(reached, live), op, live, there)
            if self.is_complete(reached):
                return True
        return False

    def keep_intact(self, reached: int, live: Tensors) -> int:
        """Return the bits of `reached` whose tensors are still in memory, where those that are `live` are."""
        for p, moment in enumerate(self.moments, 1):
            if reached >> p & 1 and moment.on & ~live:
                reached ^= 1 << p
        return reached

    def advance(self, reached: int, op: int, live: Tensors, there: Tensors) -> int:
        """Return the bits after an execution of `op`, with the tensors `there` in memory, of which some were `live` before."""
        found = reached
        for p, moment in enumerate(self.moments):
            if reached >> p & 1 and moment.op in (None, op) and not (moment.held & ~there or moment.twice & ~live):
                found |= 1 << (p + 1)
        return found

    def is_complete(self, reached: int) -> bool:
        """Return True if all moments have been."""
        return bool(reached >> len(self.moments))


Conflict = Residency | Pattern


@dataclass(frozen=True)
class Course:
    """The executions of a schedule in order, with the tensors in memory during each.

    Attributes:
        computed: id of the op of each execution.
        during: for each execution, the tensors in memory, its outputs included.
        fresh: for each execution, the outputs that were not in memory before it.
    """

    computed: tuple[int, ...]
    during: tuple[Tensors, ...]
    fresh: tuple[Tensors, ...]

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> "Course":
        """Return the course of `schedule`, which ``simulate`` accepts."""
        live = 0
        during: list[Tensors] = []
        fresh: list[Tensors] = []
        for step in schedule.steps:
            if isinstance(step, Compute):
                fresh.append(set_of(graph.ops[step.op].outputs) & ~live)
                live |= fresh[-1]
                during.append(live)
            else:
                live &= ~(1 << step.tensor)
        return cls(schedule.computed, tuple(during), tuple(fresh))

    @cached_property
    def places(self) -> dict[int, int]:
        """By op, the index of its first execution."""
        found: dict[int, int] = {}
        for index, op in enumerate(self.computed):
            found.setdefault(op, index)
        return found

    def has(self, stay: Stay) -> bool:
        """Return True if the tensor of `stay` is in memory without a break during all executions between its ends."""
        first, last, bit = self.places[stay.first], self.places[stay.last], 1 << stay.tensor
        return all(there & bit for there in self.during[first : last + 1]) and not any(
            fresh & bit for fresh in self.fresh[first + 1 : last + 1]
        )


def occurs(conflicts: Sequence[Conflict], graph: Graph, schedule: Schedule) -> bool:
    """Return True if one of `conflicts` occurs in `schedule`."""
    if not conflicts:
        return False
    course = Course.of(graph, schedule)
    return any(conflict.occurs_in(course) for conflict in conflicts)


def find_ends(conflicts: Sequence[Conflict], graph: Graph, schedule: Schedule) -> set[int]:
    """Return the first and last ops of the stays of those `conflicts` that occur in `schedule`."""
    if not conflicts:
        return set()
    course = Course.of(graph, schedule)
    found = [c.stays for c in conflicts if isinstance(c, Residency) and c.occurs_in(course)]
    return {op for stays in found for stay in stays for op in (stay.first, stay.last)}

"""Merging of launches that write one value: they form one op if possible; otherwise they run once, in order.

A tensor of a graph is made by one op as a whole. Inductor fills some buffers with several launches: zeros, then accumulation; or
the parts of a concatenation.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from planner.capture.kernels.wrapper import Launch
from planner.capture.program.program import Call


@dataclass(slots=True)
class Group:
    """Launches that are executed as one op.

    Attributes:
        once: True if they must not be executed again.
        follows: positions of groups that must be executed before, though none of their values is read.
    """

    launches: list[Launch]
    once: bool = False
    follows: set[int] = field(default_factory=set)

    @property
    def makes(self) -> set[int]:
        """The numbers of the values that it makes."""
        return {value for launch in self.launches for value in launch.makes}

    @property
    def writes(self) -> set[int]:
        """The numbers of other groups' values that it writes."""
        return {value for launch in self.launches for value in launch.writes} - self.makes

    @property
    def reads(self) -> set[int]:
        """The numbers of other groups' values that it reads."""
        return {value for launch in self.launches for value in launch.reads} - self.makes

    @property
    def over(self) -> list[tuple[int, int, Call]]:
        """The in-place writes of its launches to memory that no other launch of the group reads or writes."""
        touched = [value for launch in self.launches for value in {*launch.reads, *launch.writes}]
        return [pair for launch in self.launches for pair in launch.over if touched.count(pair[1]) == 1]

    @property
    def random(self) -> bool:
        """True if it draws from the generator."""
        return any(launch.random for launch in self.launches)


def group_launches(launches: Sequence[Launch], static: Container[int]) -> list[Group]:
    """Return `launches` grouped to ops, in order; any op may write to the values with the numbers `static`."""
    groups = {position: Group([launch]) for position, launch in enumerate(launches)}
    for position, launch in enumerate(launches):
        for value in sorted(launch.writes):
            producer = next((i for i, group in groups.items() if i < position and value in group.makes), None)
            if value not in static and producer is not None and _can_move(groups, producer, position):
                groups[position].launches[:0] = groups.pop(producer).launches
    left = list(groups.values())
    _order_writes(left, static)
    return left


def _can_move(groups: Mapping[int, Group], source: int, target: int) -> bool:
    """Return True if the group at `source` may be moved to `target` without changing results."""
    moved = groups[source]
    if moved.launches[0].phase is not groups[target].launches[0].phase:
        return False
    between = [group for position, group in groups.items() if source < position < target]
    if moved.random and any(group.random for group in between):
        return False  # numbers are drawn in the order of the program
    needed = any(group.reads & (moved.makes | moved.writes) or group.writes & (moved.makes | moved.writes) for group in between)
    return not needed and not any(group.writes & moved.reads for group in between)


def _order_writes(groups: Sequence[Group], static: Container[int]) -> None:
    """Mark groups that write a value of another group, or read it between writes, to be executed once and in order."""
    values = {value for group in groups for value in group.writes if value not in static}
    for value in sorted(values):
        users = [i for i, group in enumerate(groups) if value in group.makes | group.writes | group.reads]
        last_write = max(i for i in users if value in groups[i].writes)
        touched: set[int] = set()
        for i in users:
            groups[i].once |= i <= last_write
            if value in groups[i].writes:
                groups[i].follows |= touched
                touched = set()
            elif any(value in groups[j].writes for j in users if j < i):
                groups[i].follows.add(max(j for j in users if j < i and value in groups[j].writes))
            touched.add(i)

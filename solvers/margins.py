"""Local margins: memory that a schedule leaves free while some of its ops run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from planner.graphs.ir import Graph

Margins = Mapping[int, int]  # by op, bytes that are added to its workspace


def add_margins(graph: Graph, margins: Margins) -> Graph:
    """Return `graph` with larger workspaces, which every schedule of it has room for."""
    if not margins:
        return graph
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes + margins.get(op.id, 0)) for op in graph.ops)
    return replace(graph, ops=ops)


def find_middle(low: Margins, high: Margins) -> Margins:
    """Return the margins half way from `low` to `high`, of the ops of `high`, without empty ones."""
    found = {op: (low.get(op, 0) + size) // 2 for op, size in high.items()}
    return {op: size for op, size in found.items() if size}


def find_largest_difference(high: Margins, low: Margins) -> int:
    """Return the most bytes by which a margin of `high` differs from that of `low`."""
    return max((abs(size - low.get(op, 0)) for op, size in high.items()), default=0)


@dataclass(slots=True)
class MarginSearch:
    """The margins of one solve after another: larger ones until a schedule fits, then smaller ones that may do as well.

    Attributes:
        close_bytes: margins that differ by no more are not told apart.
        most_solves, most_better: the most solves with margins until a schedule fits, and after.
        failed, fitted: margins with which the schedule did not fit, the largest, and with which it did, the smallest.
        solves, better: how often margins were chosen until a schedule fitted, and since.
    """

    close_bytes: float
    most_solves: int
    most_better: int
    now: Margins = field(default_factory=dict)
    failed: Margins = field(default_factory=dict)
    fitted: Margins | None = None
    solves: int = 0
    better: int = 0

    def learn(self, *, fits: bool | None, more: Callable[[Margins], Margins]) -> bool:
        """Choose the next margins; return False if none can gain.

        Args:
            fits: True if the schedule with the present margins fits; None if there is no schedule.
            more: returns larger margins than the present ones, which are too small; none to give up.
        """
        if fits:
            self.fitted = self.now
        elif fits is not None:
            self.failed = self.now
        if self.fitted is not None:
            self.better += 1
            self.now = find_middle(self.failed, self.fitted)
            return self.better <= self.most_better and find_largest_difference(self.fitted, self.now) > self.close_bytes
        self.solves += 1
        self.now = find_middle(self.failed, self.now) if fits is None else more(self.now)
        return self.solves <= self.most_solves and bool(self.now)

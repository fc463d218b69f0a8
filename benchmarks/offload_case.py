"""One model under all methods that recompute, offload, or both, at each of its budgets."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common import provenance
from benchmarks.offload_rows import BOTH, OFFLOAD, OURS, RECOMPUTE, Row
from benchmarks.solved import solved
from graphs.errors import BudgetError
from graphs.ir import Graph
from graphs.simulate import simulate
from planner.budgets import budget_in_bytes
from planner.choices import Choices
from planner.solving import summarize
from solvers.clock import WallClock
from solvers.least import least_budget
from solvers.registry import SOLVERS
from solvers.request import Request
from solvers.tolerance import Tolerance

METHODS = (*OURS, *(name for name, entry in SOLVERS.items() if entry.offloads))
_ABOVE_LEAST = "least + "
_LEAST_S = 15.0  # for finding the least budget


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one device.

    Attributes:
        suite, model: their names.
        graph: the step, timed, without choices.
        choices: that it is given.
        budgets: shares of the peak (``60%``), or of what lies between the least budget and the peak (``least + 25%``).
        limit_s, tolerance: of each solve.
    """

    suite: str
    model: str
    graph: Graph
    choices: Choices
    budgets: Sequence[str]
    limit_s: float
    tolerance: float

    def rows(self, known: Collection[tuple[str, str, str, str]]) -> Iterator[Row]:
        """The rows that are not `known`. First executions come in program order throughout, so that one bound holds for all."""
        wanted = [(b, m) for b in self.budgets for m in METHODS if (self.suite, self.model, b, m) not in known]
        if not wanted:
            return
        offered = self.choices.offered(self.graph)
        graphs = {RECOMPUTE: self.graph, OFFLOAD: once_each(offered), BOTH: offered}
        between = any(budget.startswith(_ABOVE_LEAST) for budget, _ in wanted)
        least_bytes = least_budget(self.graph, clock=WallClock(_LEAST_S)).found_bytes if between else None
        for budget, method in wanted:
            yield self._row(budget, method, graphs.get(method, offered), least_bytes)

    def _row(self, budget: str, method: str, graph: Graph, least_bytes: int | None) -> Row:
        peak_bytes = summarize(self.graph).keep_everything_peak_bytes
        blank = Row(
            suite=self.suite,
            model=self.model,
            budget=budget,
            method=method,
            status="error",
            reason="",
            message="",
            time_s=None,
            bound_s=None,
            base_s=self.graph.time_s,
            peak_bytes=None,
            budget_bytes=budget_bytes_of(budget, least_bytes, peak_bytes),
            least_bytes=least_bytes,
            base_peak_bytes=peak_bytes,
            seconds=None,
            host_bytes=None,
            recomputed=None,
            copied=None,
            link=str(self.choices.link(self.graph.provenance)),
            **provenance(),
        )
        request = Request(graph, blank.budget_bytes, Tolerance.of(self.tolerance), WallClock(self.limit_s))
        row, result = solved(blank, "windows" if method in OURS else method, request)
        if result is None or result.schedule is None:
            return row
        judged = simulate(graph, result.schedule)
        copies = sum(graph.ops[op].optional for op in result.schedule.computed)
        again = len(result.schedule.computed) - copies - len(graph.program)
        return replace(row, host_bytes=sum(judged.pool_peaks_bytes[1:]), recomputed=again, copied=copies)


def once_each(graph: Graph) -> Graph:
    """`graph` where no op of the program may run again."""
    ops = tuple(op if op.optional else replace(op, recomputable=False) for op in graph.ops)
    return replace(graph, ops=ops)


def budget_bytes_of(budget: str, least_bytes: int | None, peak_bytes: int) -> int:
    """A budget in bytes, static bytes included; `least_bytes` is known where the budget is above it.

    Raises:
        BudgetError: it cannot be read.
    """
    if least_bytes is None or not budget.startswith(_ABOVE_LEAST):
        return budget_in_bytes(budget, peak_bytes)
    share = budget.removeprefix(_ABOVE_LEAST)
    if not share.endswith("%"):
        raise BudgetError(f"budget {budget!r} is not of the form 'least + 25%'")
    return least_bytes + round(float(share[:-1]) / 100 * (peak_bytes - least_bytes))

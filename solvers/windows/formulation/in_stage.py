"""The model that only looks for schedules: Checkmate's memory rows inside chosen stages.

They assume that a stage {v} executes each op at most once more, in program order, and then v. That
excludes schedules, so this model's optimum is no bound and its infeasibility no proof; but what it
finds fits where the relaxation's solutions do not.
"""

from collections.abc import Callable

from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Frame, Model
from solvers.windows.formulation.model import Builder


def build_ordered(
    problem: Problem, detail: Discretization, frame: Frame | None = None, should_stop: Callable[[], bool] | None = None
) -> Model:
    """The relaxation that `detail` describes, restricted by the rows of `detail.ordered`.

    Raises:
        StoppedError: `should_stop`, which is polled, was True.
    """
    return InStageBuilder(problem, detail, frame, should_stop).build()


class InStageBuilder(Builder):
    """Builds it: the rows of the relaxation, and those of `detail.ordered`."""

    def __init__(
        self, problem: Problem, detail: Discretization, frame: Frame | None = None, should_stop: Callable[[], bool] | None = None
    ) -> None:
        super().__init__(problem, detail, frame, should_stop)
        self.wanted: dict[tuple[int, int, int], int] = {}

    def add_rows(self) -> None:
        """Add all rows."""
        super().add_rows()
        for v, x in sorted(self.detail.ordered):
            self.add_memory_in_order(self.detail.window_of(v), v, x)

    def add_memory_in_order(self, k: int, v: int, x: int) -> None:
        """(bytes(io(x)) + w_x) R[k,x] + sum over old t outside io(x) of b_t live(t, x) <= M, window k = {v}.

        live(t, x) = S[k,t] if p(t) > x, else whether t is wanted after x: by v, by a further
        execution of a consumer between x and v, or to be handed on (Checkmate, equations 5 to 8).
        """
        column = self.again.get((k, x))
        if column is None:
            return
        problem = self.problem
        own = {*problem.inputs[x], *problem.outputs[x]}
        read = set(problem.inputs[v])
        columns, values = [column], [float(problem.again_bytes[x])]
        taken = 0
        for i in range(v):
            for t in problem.outputs[i]:
                size = problem.sizes[t]
                if t in own or not size:
                    continue
                if problem.kept[t] or (i < x and t in read):
                    taken += size
                    continue
                live = self.handed.get((k, t)) if i > x else self.wanted_after(k, t, x)
                if live is not None:
                    columns.append(live)
                    values.append(size)
        self.add_memory(k, columns, values, taken)

    def wanted_after(self, k: int, t: int, x: int) -> int | None:
        """Column of: t, which the new op does not read, is wanted in window k after x or is handed on."""
        reader = next((c for c in self.problem.graph.consumers[t] if c > x and (k, c) in self.again), None)
        if reader is None:
            return self.handed.get((k + 1, t))
        key = (k, t, reader)
        if key not in self.wanted:
            column = self.wanted[key] = self.column(integer=False)
            self.rows.add([column, self.again[k, reader]], [1.0, -1.0], 0.0, float("inf"))
            later = self.wanted_after(k, t, reader)
            if later is not None:
                self.rows.add([column, later], [1.0, -1.0], 0.0, float("inf"))
        return self.wanted[key]

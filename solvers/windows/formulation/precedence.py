"""Row 9: what a chain of further executions leaves in memory. The strongest model that is a relaxation.

Row 7 sees each further execution by itself. But if x is executed again so that z can be, and an output t of x
is to stay, then t is in memory while z executes, unless x is executed once more still. With

    D[k,x]    1 if x is executed twice or more in window k, at its time's cost
    P[k,x,z]  at least "every execution of old z in window k comes after one of x"
    G[k,t,z]  at least "t = one of out(x) is in memory whenever z executes in window k"

for old x and z this holds for every schedule, whatever the order inside the window:

    P[x,z] >= R[z] - S[k,t]                     t in out(x) and in(z): z finds t only if x has made it
    P[x,z] >= P[x,y] + R[z] - 1 - S[k,u]        u in in(z), made by an old y other than x
    G[t,z] >= wanted(t) + P[x,z] - 1 - D[x]     wanted(t): S[k+1,t], or 1 if the window is {v} and v reads t
"""

from collections.abc import Callable

from solvers.problem import Problem
from solvers.windows.formulation.granularity import Discretization, Model
from solvers.windows.formulation.model import Builder


def build_relaxation(problem: Problem, detail: Discretization, should_stop: Callable[[], bool] | None = None) -> Model:
    """Rows 1 to 9 of `problem`, as far as `detail` asks for them.

    Raises:
        StoppedError: `should_stop`, which is polled, was True.
    """
    return _PrecedenceBuilder(problem, detail, should_stop=should_stop).build()


class _PrecedenceBuilder(Builder):
    def __init__(self, problem: Problem, detail: Discretization, should_stop: Callable[[], bool] | None) -> None:
        super().__init__(problem, detail, should_stop=should_stop)
        self.follows: dict[tuple[int, int, int], int | None] = {}

    def add_rows(self) -> None:
        super().add_rows()
        chains: dict[tuple[int, int], list[int]] = {}
        for end, x, z in sorted(self.detail.chains):
            chains.setdefault((end, z), []).append(x)
        for (end, z), sources in chains.items():
            self.add_memory_of_chain(self.detail.window_of(end), z, sources)

    def add_memory_of_chain(self, k: int, z: int, sources: list[int]) -> None:
        """Row 9: row 7 of z, with b_t G[k,t,z] for the outputs t of `sources` that may be wanted."""
        if (k, z) not in self.again or z >= self.starts[k]:
            return
        columns, values, taken = self.memory_of_repeat(k, z)
        own = {*self.problem.inputs[z], *self.problem.outputs[z]}
        for x in sources:
            for t in self.problem.outputs[x]:
                if t not in own and self.problem.sizes[t] and not self.problem.kept[t]:
                    column = self.stays(k, x, t, z)
                    if column is not None:
                        columns.append(column)
                        values.append(self.problem.sizes[t])
        self.add_memory(k, columns, values, taken)

    def stays(self, k: int, x: int, t: int, z: int) -> int | None:
        """Column of G[k,t,z], None where it is 0."""
        after = self.comes_after(k, x, z)
        read = self.detail.is_single(k) and t in self.problem.inputs[self.starts[k]]
        handed = self.handed.get((k + 1, t))
        if after is None or (not read and handed is None):
            return None
        column = self.column(integer=False)
        columns, values = [column, after, self.executed_twice(k, x)], [1.0, -1.0, 1.0]
        if read:
            self.rows.add(columns, values, 0.0, float("inf"))
        elif handed is not None:
            self.rows.add([*columns, handed], [*values, -1.0], -1.0, float("inf"))
        return column

    def executed_twice(self, k: int, x: int) -> int:
        """Column of D[k,x]."""
        if (k, x) not in self.twice:
            self.twice[k, x] = self.column(cost=self.cost[self.again[k, x]])
        return self.twice[k, x]

    def comes_after(self, k: int, x: int, z: int) -> int | None:
        """Column of P[k,x,z], None where nothing is known."""
        key = (k, x, z)
        if key in self.follows:
            return self.follows[key]
        self.follows[key] = None
        if (k, x) not in self.again or (k, z) not in self.again:
            return None
        column: int | None = None
        repeated = self.again[k, z]
        for u in self.problem.inputs[z]:
            y = self.problem.producers[u]
            if y < x or self.problem.kept[u]:
                continue
            handed = self.handed[k, u]
            earlier = None if y == x else self.comes_after(k, x, y)
            if y != x and earlier is None:
                continue
            if column is None:
                column = self.column(integer=False)
            if earlier is None:
                self.rows.add([column, repeated, handed], [1.0, -1.0, 1.0], 0.0, float("inf"))
            else:
                self.rows.add([column, earlier, repeated, handed], [1.0, -1.0, -1.0, 1.0], -1.0, float("inf"))
        self.follows[key] = column
        return column

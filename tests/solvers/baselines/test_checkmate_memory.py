"""The reference program: what is in memory when."""

import pytest

from graphs.ir import Graph
from graphs.synthetic.draft import Draft
from solvers import highs
from solvers.baselines.checkmate import CheckmateProgram, solve
from solvers.baselines.common.checkmate_program import MEMORY_RANGE
from solvers.clock import WallClock
from solvers.result import Status
from tests.support.solvers.answers import ask


def dropped_beside() -> Graph:
    """a makes x (4) and y (1); u (1) reads x; v (1, workspace 5) reads nothing; d (1) reads y and v. Times 1.

    With 6 bytes v runs alone, so that a runs again for d: beside v its outputs take 5. If its x, which
    nobody reads then, stays for the rest of the stage, d takes 7.
    """
    draft = Draft()
    x, y = draft.add_op("a", [], [4, 1])
    draft.add_op("u", [x], [1])
    (v,) = draft.add_op("v", [], [1], workspace_bytes=5)
    draft.add_op("d", [y, v], [1])
    return draft.build_graph()


def test_unused_outputs_are_freed_at_once() -> None:
    assert [solve(ask(dropped_beside(), budget)).time_s for budget in (6, 7)] == [5, 4]


def second_copy() -> Graph:
    """a makes x (3) and y (1); b (workspace 4) reads y; c reads x and y, d reads y; outputs of 1, times 1.

    With 7 bytes x does not fit beside b (y 1, b 1, workspace 4), so a runs again for c, and makes a second y if
    the first one stays: x 3, y 1, b 1 and the copy 1 are 6.
    """
    draft = Draft()
    x, y = draft.add_op("a", [], [3, 1])
    (b,) = draft.add_op("b", [y], [1], workspace_bytes=4)
    draft.add_op("c", [x, y, b], [1])
    draft.add_op("d", [y], [1])
    return draft.build_graph()


def test_an_output_made_twice_is_there_once_afterwards() -> None:
    model = CheckmateProgram(second_copy(), 7)
    model.build()
    # By hand: y stays, a runs again before c, and the second y is counted once afterwards.
    fixed = {"S_1_1": 1, "S_2_1": 1, "S_3_1": 1, "S_1_0": 0, "S_2_0": 0, "R_2_0": 1, "R_2_1": 0, "R_3_0": 0, "D_2_1": 1}
    for column, name in model.names.items():
        if name in fixed:
            model.lower[column] = model.upper[column] = fixed[name]
    values = highs.solve_program(model.build_milp(), clock=WallClock(60)).values
    assert values is not None
    used = {name: values[column] * 7 / MEMORY_RANGE for column, name in model.names.items() if name.startswith("U_2_")}
    # While a runs: y, b, x and the second y; while c runs: x, y, b and its output.
    assert used == pytest.approx({"U_2_0": 1 + 1 + 3 + 1, "U_2_1": 1 + 1 + 3, "U_2_2": 3 + 1 + 1 + 1})
    assert solve(ask(second_copy(), 7)).time_s == 5


def test_static_tensors_written_in_place_restrict_recomputation() -> None:
    def graph(*, written: bool) -> Graph:
        draft = Draft()
        state = draft.add_static("state", 1)
        (a,) = draft.add_op("a", [state], [4])
        (b,) = draft.add_op("b", [a], [1])
        (c,) = draft.add_op("c", [state], [1], recomputable=False, mutates=(state,) if written else ())
        (d,) = draft.add_op("d", [b, c], [4])
        draft.add_op("e", [a, d], [1])
        return draft.build_graph()

    # 10 bytes hold a, d and e; d runs beside a, b and c with 11, so with 10 a must be dropped and made again.
    assert solve(ask(graph(written=False), 10)).time_s == 6
    assert solve(ask(graph(written=True), 10)).status in (Status.LIMIT, Status.INFEASIBLE)
    assert solve(ask(graph(written=True), 11)).time_s == 5

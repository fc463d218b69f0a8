"""The exact solver: known optima, and what it promises."""

from itertools import pairwise

import pytest

from planner.graphs.ir import Graph
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_chain, make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers.bounds import bound_least_budget
from planner.solvers.registry import get_solver
from planner.solvers.result import Status
from planner.solvers.windows import solve
from planner.solvers.windows.params import WindowsParams
from tests.support.budgets import peak_bytes
from tests.support.graphs.small_graphs import diamond, kept_output, three_at_once, two_outputs
from tests.support.marks import slow
from tests.support.solvers.answers import KNOWN_OPTIMA, ask


@pytest.mark.parametrize(
    ("graph", "budget", "optimum_s"),
    [
        *KNOWN_OPTIMA,
        (make_training_chain(8), 9, 16),
        (make_training_chain(8), 3, 16 + 7 * 6 // 2),
        (make_training_chain(12), 3, 24 + 11 * 10 // 2),
    ],
)
def test_windows_finds_known_optima(graph: Graph, budget: int, optimum_s: float) -> None:
    result = solve(ask(graph, budget, tolerance=1e-6))
    assert result.status is Status.OPTIMAL
    assert result.time_s == pytest.approx(optimum_s)
    assert result.bound_s == pytest.approx(optimum_s)
    assert result.peak_bytes <= budget


@pytest.mark.parametrize(
    ("graph", "budget"), [(make_chain(5), 1), (make_training_chain(8), 2), (diamond(), 7), (two_outputs(), 6), (kept_output(), 5)]
)
def test_infeasible_result_names_the_least_budget(graph: Graph, budget: int) -> None:
    result = solve(ask(graph, budget))
    assert result.status is Status.INFEASIBLE
    assert result.schedule is None
    assert result.bound_s is None
    assert f"budget {budget} B is below {budget + 1} B" in result.message
    assert "Raise the budget" in result.message


def test_infeasible_though_every_op_fits() -> None:
    # d reads a and c (7 with its output), c cannot be made without b, and b not without a: no op takes more than
    # 7. But a must not run again, and is there beside b and c, 9.
    draft = Draft()
    (a,) = draft.add_op("a", [], [3])
    (b,) = draft.add_op("b", [a], [3])
    (c,) = draft.add_op("c", [b], [3])
    draft.add_op("d", [a, c], [1])
    graph = draft.build_graph()
    assert solve(ask(graph, 7)).time_s == 5
    graph = three_at_once()
    assert bound_least_budget(graph).budget_bytes == 7
    result = solve(ask(graph, 7))
    assert result.status is Status.INFEASIBLE
    assert "is proved too small, though every op by itself fits within 7 B" in result.message
    assert solve(ask(graph, 8)).time_s == 6


@pytest.mark.parametrize("seed", [*range(4), *slow(4, 5)])
def test_lower_budgets_take_no_less_time(seed: int) -> None:
    graph = draw_training_step(seed, 8)
    peak = peak_bytes(graph)
    times: list[float] = []
    for percent in (100, 90, 80, 70, 60, 50):
        result = solve(ask(graph, peak * percent // 100, tolerance=1e-6, time_limit_s=120))
        if result.status is Status.INFEASIBLE:
            break
        assert result.status is Status.OPTIMAL
        assert result.time_s is not None
        times.append(result.time_s)
    assert len(times) > 2
    assert all(later >= earlier * (1 - 1e-5) for earlier, later in pairwise(times))


@pytest.mark.parametrize("percent", [80, 60, 45])
def test_transformer_is_solved_to_optimality(percent: int) -> None:
    graph = transformer(TransformerSize(layers=4))
    result = solve(ask(graph, peak_bytes(graph) * percent // 100, time_limit_s=300))
    assert result.status is Status.OPTIMAL
    assert result.gap <= 1e-3
    assert result.bound_s > graph.time_s


def test_nothing_is_made_again_after_its_source_is_written_over() -> None:
    draft = Draft()
    weight = draft.add_static("weight", 1)
    (a,) = draft.add_op("a", [weight], [4])
    (b,) = draft.add_op("b", [a], [4])
    draft.add_op("step", [weight, b], [1], mutates=(weight,), recomputable=False)
    draft.add_op("c", [], [5])
    draft.add_op("d", [a], [1])
    graph = draft.build_graph()
    # a is held through c: 1 + 4 + 5. Were it made again after the step, 9 would do (a, b and weight).
    assert solve(ask(graph, 10)).time_s == graph.time_s
    assert solve(ask(graph, 9)).status is Status.INFEASIBLE


def test_ops_of_zero_time_are_recomputed() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [2], time_s=0.0)
    (b,) = draft.add_op("b", [a], [2], time_s=0.0)
    (c,) = draft.add_op("c", [b], [2], time_s=0.0)
    (d,) = draft.add_op("d", [c], [2], time_s=0.0)
    draft.add_op("e", [a, d], [1], time_s=0.0)
    result = solve(ask(draft.build_graph(), 5))
    assert result.status is Status.OPTIMAL
    assert result.time_s == result.bound_s == 0
    assert len(result.schedule.computed) == 6


def test_bytes_matter_in_large_budgets() -> None:
    giga = 10**9
    draft = Draft()
    (a,) = draft.add_op("a", [], [giga])
    (b,) = draft.add_op("b", [a], [giga])
    (c,) = draft.add_op("c", [b], [giga])
    draft.add_op("d", [a, c], [1])
    graph = draft.build_graph()
    assert solve(ask(graph, 3 * giga)).time_s == 4
    assert solve(ask(graph, 3 * giga - 1)).time_s == 5


def test_result_records_solver_settings_and_versions() -> None:
    result = solve(ask(make_training_chain(5), 4, tolerance=0.01, time_limit_s=60))
    assert result.solver == "windows"
    windows = result.settings["windows"]
    assert isinstance(windows, list) and windows == sorted(set(windows)) and windows[-1] == len(make_training_chain(5).ops) - 1
    asked = {"tolerance": 0.01, "time_limit_s": 60, "params": WindowsParams().export()}
    assert dict(result.settings) == {**asked, "windows": windows}
    assert set(result.versions) == {"highs", "numpy"}
    assert result.seconds > 0
    assert get_solver("windows")(ask(make_training_chain(5), 4)).solver == "windows"

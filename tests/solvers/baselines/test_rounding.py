"""Two-phase rounding: what it finds, what it says about it, and that nothing depends on luck."""

from math import inf

import pytest

from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph
from planner.graphs.schedule import schedule_of
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_training_step
from planner.graphs.synthetic.small import make_skips, make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers.baselines import checkmate, rounding
from planner.solvers.baselines.checkmate import CheckmateProgram
from planner.solvers.baselines.rounding import RoundingParams, find_cheapest_executions, solve
from planner.solvers.highs.program import Answer, Outcome
from planner.solvers.registry import get_solver
from planner.solvers.result import SolveProgress, Status
from tests.support.budgets import budget_at
from tests.support.graphs.small_graphs import two_outputs
from tests.support.solvers.answers import ask

# --- phase two ------------------------------------------------------------------------------------


def executions(graph: Graph, handed: set[tuple[int, int]]) -> list[int]:
    model = CheckmateProgram(graph, 10**9, whole=False)
    model.build()
    return find_cheapest_executions(model, handed)


def everything(graph: Graph) -> set[tuple[int, int]]:
    return {(t, x) for t in range(len(graph.ops)) for x in range(len(graph.tensors))}


def test_handed_over_tensors_are_not_recomputed() -> None:
    graph = make_training_chain(4)
    assert executions(graph, everything(graph)) == list(range(8))


def test_tensors_not_handed_over_are_recomputed_from_the_start() -> None:
    # f1..f4, then g4 reads f4 and f3, g3 reads f2 and g4, g2 reads f1 and g3, g1 reads g2.
    graph = make_training_chain(4)
    forward = [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    # Only gradients are handed over, each to the next stage: the forward is made again for each of them.
    only_gradients = executions(graph, {(t + 1, graph.ops[t].outputs[0]) for t in range(4, 7)})
    assert only_gradients == [*forward, *(0, 1, 2, 3, 4), *(0, 1, 5), *(0, 6), 7]
    simulate(graph, schedule_of(graph, only_gradients))
    nothing = executions(graph, set())
    assert nothing[:15] == only_gradients[:15]
    assert nothing[-8:] == list(range(8))


def test_tensor_handed_over_later_is_computed_in_its_first_missing_stage() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [1])
    (b,) = draft.add_op("b", [], [1])
    (c,) = draft.add_op("c", [b], [1])
    draft.add_op("d", [a, c], [1])
    graph = draft.build_graph()
    # a is not there while c runs, but is handed to d's stage: so it is made in the stage of c.
    assert executions(graph, {(2, b), (3, c), (3, a)}) == [0, 1, 0, 2, 3]
    # Handed to nobody, it is made in the stage of d.
    assert executions(graph, {(2, b), (3, c)}) == [0, 1, 2, 0, 3]


def test_unrecomputable_tensors_count_as_handed_over() -> None:
    for seed in range(60):
        graph = draw_graph(seed, 12)
        computed = executions(graph, set())
        assert all(graph.ops[i].recomputable for i in computed if computed.count(i) > 1)
        # The judge knows about kept tensors, writes in place and inputs that are missing.
        assert simulate(graph, schedule_of(graph, computed)).recomputed == len(computed) - 12


# --- the whole ------------------------------------------------------------------------------------


def test_rounding_brackets_the_checkmate_optimum() -> None:
    found = strict = 0
    for seed in range(12):
        graph = draw_graph(seed, 10)
        for share in (0.4, 0.7):
            budget = budget_at(graph, share)
            optimum = checkmate.solve(ask(graph, budget, tolerance=0.0))
            result = solve(ask(graph, budget))
            if optimum.time_s is None:
                assert result.status is Status.LIMIT
                continue
            assert result.bound_s <= optimum.time_s + 1e-6
            if result.time_s is not None:
                assert result.time_s >= optimum.time_s - 1e-6
                assert result.status is (Status.OPTIMAL if result.bound_s >= result.time_s / 1.001 else Status.FEASIBLE)
                found += 1
                strict += result.bound_s > graph.time_s + 1e-6
    assert found >= 12
    assert strict >= 5


@pytest.mark.parametrize(
    ("graph", "share", "most_over"),
    [(draw_training_step(8, 8), 0.5, 0.15), (draw_training_step(14, 14), 0.7, 0.15), (make_skips(8), 0.3, 0.0)],
    ids=["17 ops", "29 ops", "skips"],
)
def test_training_steps_are_rounded_well(graph: Graph, share: float, most_over: float) -> None:
    result = solve(ask(graph, budget_at(graph, share)))
    assert result.schedule is not None
    assert result.gap <= most_over


@pytest.mark.slow
def test_a_transformer_is_rounded_well() -> None:
    graph = transformer(TransformerSize(layers=2))
    result = solve(ask(graph, budget_at(graph, 0.5)))
    assert result.status is Status.FEASIBLE
    assert result.gap < 0.1


def test_a_smaller_part_of_the_budget_is_tried_only_if_nothing_fits() -> None:
    graph = draw_training_step(8, 8)
    budget = budget_at(graph, 0.5)
    used = solve(ask(graph, budget)).settings["fraction"]
    assert isinstance(used, float) and 0.1 < used < 1.0
    assert solve(ask(graph, budget, params=RoundingParams(fractions=(1.0, used)))).settings["fraction"] == used
    none = solve(ask(graph, budget, params=RoundingParams(fractions=(1.0,), samples=0)))
    assert (none.status, none.settings["fraction"]) == (Status.LIMIT, None)
    assert "no rounding of the relaxation fits" in none.message
    # Without the whole budget there is no bound but the step itself.
    assert solve(ask(graph, budget, params=RoundingParams(fractions=(used,)))).bound_s == graph.time_s


@pytest.mark.slow
def test_the_seed_decides() -> None:
    graph = draw_training_step(8, 8)
    budget = budget_at(graph, 0.5)

    def found(seed: int) -> float | None:
        return solve(ask(graph, budget, params=RoundingParams(seed=seed, thresholds=(), samples=15))).time_s

    times = [found(seed) for seed in range(4)]
    assert times == [found(seed) for seed in range(4)]
    assert len(set(times)) > 1


# --- how it ends ----------------------------------------------------------------------------------


def test_a_budget_below_the_needs_of_an_op_is_infeasible() -> None:
    result = solve(ask(two_outputs(), 6))
    assert (result.status, result.bound_s) == (Status.INFEASIBLE, None)
    assert "budget 6 B is below 7 B" in result.message


def test_time_is_up_before_a_relaxation_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = draw_training_step(0, 40)
    monkeypatch.setattr("planner.solvers.baselines.checkmate._LEAST_S", 0.0)  # so that it is begun
    result = solve(ask(graph, budget_at(graph, 0.2), time_limit_s=1e-9))
    assert (result.status, result.bound_s) == (Status.LIMIT, graph.time_s)
    assert "no relaxation for" in result.message


def test_a_stop_ends_the_search() -> None:
    graph = draw_training_step(8, 8)
    result = solve(ask(graph, budget_at(graph, 0.5), should_stop=lambda: True))
    assert result.status is Status.LIMIT


def test_rounding_reports_progress() -> None:
    told: list[SolveProgress] = []
    result = solve(ask(make_training_chain(8), 8, on_progress=told.append))
    assert told[0].activity == "rounding at 100% of the budget"
    assert told[-1].best_s == result.time_s
    assert told[-1].bound_s == result.bound_s


def test_a_solver_that_gives_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "solve_model", lambda *rest: Answer(Outcome.FAILED, None, None, -inf, "out of its depth"))
    result = solve(ask(make_training_chain(4), 4))
    assert result.status is Status.ERROR
    assert "out of its depth" in result.message


def test_the_solver_is_named_and_in_the_registry() -> None:
    assert get_solver("rounding")(ask(make_training_chain(4), 4)).solver == "rounding"
    with pytest.raises(PlannerError, match="'magic' is none that PuLP knows"):
        solve(ask(make_training_chain(4), 4, params=RoundingParams(milp_solver="magic")))

"""Rules of eviction that know both ways to get a tensor back: what they come to fits, and takes the cheaper one."""

from dataclasses import replace

import pytest

from graphs.ir import Graph
from graphs.options.surroundings import Link, Surroundings
from graphs.schedule import keep_everything, schedule_of
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from planner.capture.options import apply_options
from solvers.bounds import bound_least_budget
from solvers.eviction.engine import find_evicting_order
from solvers.eviction.rules import RULES, TIGHT_RULES, EvictionRule
from solvers.problem import Problem, build_problem
from solvers.windows import driver
from solvers.windows.decoding.decode import Trial, find_late_writers, order_of, try_out
from solvers.windows.search import Search
from solvers.windows.strategies.offloaded_orders import LeastOffloaded
from solvers.windows.strategies.portfolio import OffloadingPortfolio
from solvers.windows.strategies.refinement import Relaxation
from tests.support.solvers.answers import ask

TRANSFORMER = transformer(TransformerSize(layers=2))


def offering(graph: Graph, share: float, link_bytes_per_s: float) -> Problem:
    """With a budget from the bound of single ops (0) to the peak (1)."""
    whole = apply_options(graph, ("offload",), Surroundings(Link.even(link_bytes_per_s)))
    least, peak = bound_least_budget(whole).budget_bytes, simulate(graph, keep_everything(graph)).peak_bytes
    return build_problem(whole, least + int(share * (peak - least)))


def tried(problem: Problem, rule: EvictionRule) -> Trial | None:
    found = find_evicting_order(problem, rule)
    if found is None or find_late_writers(problem, order := order_of(problem, *found)):
        return None
    return try_out(problem, order)


def per_second(graph: Graph, steps: float) -> float:
    """A link that carries all that the step makes in so many steps."""
    return sum(t.size_bytes for t in graph.tensors if not t.static) / (graph.time_s * steps)


@pytest.mark.parametrize("graph", [TRANSFORMER, draw_training_step(3, 40), make_training_chain(20)])
@pytest.mark.parametrize("share", [0.15, 0.5])
def test_evicting_orders_with_offload_fit_the_budget(graph: Graph, share: float) -> None:
    problem = offering(graph, share, per_second(graph, 1.0))
    copied = 0
    for rule in (*RULES, *TIGHT_RULES):
        for price in (0.0, 0.1):
            trial = tried(problem, replace(rule, channel=price))
            assert trial.peak_bytes <= problem.budget_bytes
            copied += len(trial.order.reloads)
    assert copied > 0
    assert find_evicting_order(problem, RULES[0]) == find_evicting_order(problem, RULES[0])


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_way_that_costs_less_is_taken(share: float) -> None:
    graph = TRANSFORMER
    rule = EvictionRule(channel=0.01)
    fast, slow = (offering(graph, share, per_second(graph, steps)) for steps in (0.1, 1e6))
    recomputing = find_evicting_order(build_problem(slow.graph, slow.budget_bytes), rule)
    assert not recomputing.reloads
    assert find_evicting_order(slow, rule) == recomputing
    # Where the link is no limit, next to nothing is executed again.
    trial = tried(fast, rule)
    assert trial.time_s < graph.time_s + 0.1 * (simulate(graph, schedule_of(graph, recomputing.computed)).time_s - graph.time_s)


def test_higher_channel_price_reduces_transfers() -> None:
    problem = offering(TRANSFORMER, 0.3, per_second(TRANSFORMER, 0.5))
    copied = []
    for price in (0.0, 0.1, 1e3):
        trial = tried(problem, EvictionRule(channel=price))
        copied.append(sum(problem.sizes[t] for t, _ in trial.order.reloads))
    assert copied[0] > copied[1] > copied[2] == 0


def test_offload_fits_budgets_that_recomputation_cannot() -> None:
    """The budget is below what recomputing alone takes."""
    once = 0
    for seed in range(30):
        graph = draw_graph(seed, 12)
        problem = offering(graph, 0.1, 1.0)
        if problem.budget_bytes >= bound_least_budget(graph).budget_bytes:
            continue
        trials = [tried(problem, rule) for rule in (*RULES, *TIGHT_RULES)]
        assert all(trial is None or trial.peak_bytes <= problem.budget_bytes for trial in trials)
        once += any(trials)
    assert once > 5


class ModelsNextError(Exception):
    pass


def test_solve_finds_a_schedule_with_copies_before_using_models(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = offering(TRANSFORMER, 0.15, per_second(TRANSFORMER, 4.0))
    plain = build_problem(TRANSFORMER, problem.budget_bytes)
    found = filter(None, (find_evicting_order(plain, rule) for rule in RULES))
    recomputing_s = min(simulate(TRANSFORMER, schedule_of(TRANSFORMER, one.computed)).time_s for one in found)

    def next_comes(strategy: LeastOffloaded, limit: float) -> bool:
        raise ModelsNextError  # beside that, there is a search without

    monkeypatch.setattr(Relaxation, "step", lambda *_: True)
    monkeypatch.setattr(OffloadingPortfolio, "step", lambda *_: False)
    monkeypatch.setattr(LeastOffloaded, "step", next_comes)
    search = Search.of(ask(problem.whole, problem.budget_bytes))
    with pytest.raises(ModelsNextError):
        driver.run(search)
    best = search.incumbent.best_trial
    assert best.order.reloads
    assert best.peak_bytes <= problem.budget_bytes
    assert best.time_s - TRANSFORMER.time_s < 0.8 * (recomputing_s - TRANSFORMER.time_s)


def test_unrecomputable_ops_run_once_with_offload() -> None:
    once = 0
    for seed in range(30):
        problem = offering(draw_graph(seed, 40), 0.1, 1.0)
        for rule in RULES:
            if (found := find_evicting_order(problem, rule)) is not None:
                executed, _ = found
                again = {op for op in executed if executed.count(op) > 1}
                once += len(executed) > problem.ops
                assert all(problem.graph.ops[op].recomputable for op in again), seed
    assert once

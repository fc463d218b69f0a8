"""An order of the ops that needs less memory: it is one, it is never worse, and what runs in it is the same step."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import planner
from graphs.errors import GraphError
from graphs.io.formats import write_graph
from graphs.ir import Graph, Phase
from graphs.schedule import Schedule, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.random_graphs import draw_graph, draw_training_step
from graphs.synthetic.small import make_chain, make_training_chain
from planner.cli.main import main
from planner.measure.steps import measure_outcome
from planner.plans.summary import summarize
from planner.runtime.executor import Executor
from planner.studies.curve import solve_curve
from planner.studies.max_batch import Wanted, find_max_batch
from solvers.bounds import bound_least_budget
from solvers.clock import WorkClock
from solvers.order.reorder import Reordering, find_order, permute
from solvers.registry import get_solver
from solvers.result import Status
from tests.support.budgets import peak_bytes
from tests.support.marks import slow
from tests.support.models.steps import capture_of, make, random_schedule
from tests.support.solvers.answers import ask


def weight_gradients() -> Graph:
    """Two layers whose weight gradients come after the gradients of their inputs.

    The second's frees a large activation, so it is best early; the first's frees little and is large, so it is
    best last.
    """
    draft = Draft()
    (a,) = draft.add_op("a", [], [2_000])
    (b,) = draft.add_op("b", [a], [20_000])
    (c,) = draft.add_op("c", [b], [2_000])
    (loss,) = draft.add_op("loss", [c], [1_000])
    (dc,) = draft.add_op("dc", [loss], [2_000], phase=Phase.BACKWARD)
    (db,) = draft.add_op("db", [dc], [20_000], phase=Phase.BACKWARD)
    (w2,) = draft.add_op("w2", [dc, b], [1_000], phase=Phase.BACKWARD)
    (w1,) = draft.add_op("w1", [loss, a], [30_000], phase=Phase.BACKWARD)
    (da,) = draft.add_op("da", [db], [2_000], phase=Phase.BACKWARD)
    (dx,) = draft.add_op("dx", [da], [2_000], phase=Phase.BACKWARD)
    return draft.build_graph([w2, w1, dx])


def read_in_between(*, stand_in: bool) -> Graph:
    """`early` reads what `first` makes and would best come before `second`; what stands for both of these comes where that is."""
    draft = Draft()
    x, y = draft.add_op("first", [], [10, 10])
    (z,) = draft.add_op("second", [x], [5])
    (small,) = draft.add_op("early", [y], [1])
    (end,) = draft.add_op("end", [z, small], [1])
    graph = draft.build_graph([end])
    if not stand_in:
        return graph
    both = replace(graph.ops[1], id=4, name="both", inputs=(), outputs=(y, z), optional=True, replaces=(0, 1))
    tensors = tuple(replace(t, producers=(*t.producers, 4)) if t.id in both.outputs else t for t in graph.tensors)
    return Graph((*graph.ops, both), tensors, graph.kept)


# --- the order ------------------------------------------------------------------------------------


def test_weight_gradients_go_where_they_need_least() -> None:
    graph = weight_gradients()
    found = find_order(graph)
    assert [op.name for op in found.graph.ops] == ["a", "b", "c", "loss", "dc", "w2", "db", "da", "dx", "w1"]
    assert peak_bytes(graph) == 54_000
    assert peak_bytes(found.graph) == 36_000
    assert found.changed


def test_chain_is_not_reordered() -> None:
    graph = make_training_chain(6)
    found = find_order(graph)
    assert not found.changed
    assert found.graph is graph


def test_where_time_is_short_the_program_order_is_the_answer() -> None:
    graph = weight_gradients()
    whole = WorkClock(1000)
    assert find_order(graph, whole).changed
    assert whole.now > 0
    short = WorkClock(0.5 * whole.now)
    assert find_order(graph, short).graph is graph
    assert 0.5 * whole.now <= short.now < whole.now  # what is not in time is not begun


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(GraphError, match="topological order"):
        permute(make_chain(3), [1, 0, 2])


def any_graph(seed: int, size: int) -> Graph:
    """A random graph with effects, writes in place, several phases and random ops."""
    if seed % 2:
        graph = draw_training_step(seed, size)
    else:
        graph = draw_graph(seed, 2 * size)
        half = seed % (2 * size)
        graph = replace(
            graph, ops=tuple(replace(op, phase=Phase.FORWARD if op.id <= half else Phase.BACKWARD) for op in graph.ops)
        )
    return replace(graph, ops=tuple(replace(op, random=(op.id * 7 + seed) % 5 == 0) for op in graph.ops))


graphs = st.builds(any_graph, st.integers(0, 10**6), st.integers(3, 14))


@given(graph=graphs)
@settings(max_examples=150)
def test_reordering_never_raises_the_peak_and_is_idempotent(graph: Graph) -> None:
    found = find_order(graph)
    assert peak_bytes(found.graph) <= peak_bytes(graph)
    assert bound_least_budget(found.graph).budget_bytes <= bound_least_budget(graph).budget_bytes
    assert found.graph.time_s == graph.time_s
    assert find_order(graph) == found
    assert not find_order(found.graph).changed


@given(graph=graphs)
@settings(max_examples=150)
def test_effects_random_ops_and_phases_keep_their_order(graph: Graph) -> None:
    found = find_order(graph)
    assert sorted(found.original) == [op.id for op in graph.ops]
    assert [op.phase for op in found.graph.ops] == [op.phase for op in graph.ops]
    place = {op: position for position, op in enumerate(found.original)}
    written = {t for op in graph.ops for t in op.mutates}
    effects = [op.id for op in graph.ops if op.random or not (op.recomputable or op.mutates or written.intersection(op.inputs))]
    assert all(place[one] < place[other] for one, other in pairwise(effects))
    for writer in (op for op in graph.ops if op.mutates):
        for op in graph.ops:
            if op is not writer and set(writer.mutates).intersection((*op.inputs, *op.mutates)):
                assert (op.id < writer.id) == (place[op.id] < place[writer.id])


@given(graph=graphs, seed=st.integers(0, 10**6))
@settings(max_examples=100)
def test_a_schedule_means_the_same_on_the_original(graph: Graph, seed: int) -> None:
    found = find_order(graph)
    schedule = random_schedule(replace_writers(found.graph), seed)
    there, here = simulate(found.graph, schedule), simulate(graph, found.map_back(schedule))
    assert here == there


def replace_writers(graph: Graph) -> Graph:
    """`graph` where nothing that touches what is written in place is executed again: any order of the rest runs."""
    written = {t for op in graph.ops for t in op.mutates}
    return replace(
        graph, ops=tuple(replace(op, recomputable=op.recomputable and not written.intersection(op.inputs)) for op in graph.ops)
    )


def test_op_with_side_effects_keeps_its_place_among_readers() -> None:
    draft = Draft()
    (a,) = draft.add_op("a", [], [9])
    draft.add_op("before", [a], [50])
    draft.add_op("effect", [a], [1], recomputable=False)
    draft.add_op("after", [a], [1])
    (last,) = draft.add_op("last", [], [1])
    assert [op.name for op in find_order(draft.build_graph([1, 2, 3, last])).graph.ops][1:4] != ["effect", "after", "before"]
    place = {op.name: op.id for op in find_order(draft.build_graph([1, 2, 3, last])).graph.ops}
    assert place["before"] < place["effect"] < place["after"]


# --- plans ----------------------------------------------------------------------------------------


def test_plan_of_a_reordered_graph_refers_to_the_original() -> None:
    graph = weight_gradients()
    plan = planner.solve(graph, 36_000)
    assert plan.graph == summarize(graph)
    assert (plan.settings["reordered"], plan.overhead) == (True, 0)
    simulation = simulate(graph, plan.schedule)
    assert (simulation.peak_bytes, simulation.time_s) == (plan.peak_bytes, plan.time_s)
    kept = planner.solve(graph, 53_000, reorder=False)
    assert kept.settings["reordered"] is False
    assert kept.overhead > 0


def test_program_order_is_used_if_only_it_fits() -> None:
    graph, budget_bytes = draw_graph(350, 12), 27
    in_new_order = get_solver("windows")(ask(find_order(graph).graph, budget_bytes))
    assert in_new_order.status is Status.INFEASIBLE
    plan = planner.solve(graph, budget_bytes)
    assert (plan.status, plan.settings["reordered"]) == ("optimal", False)


def test_baselines_use_program_order_unless_reorder_is_given() -> None:
    graph = weight_gradients()
    assert planner.solve(graph, 54_000, solver="keep-everything").peak_bytes == 54_000
    assert planner.solve(graph, 54_000, solver="keep-everything", reorder=True).peak_bytes == 36_000


def test_a_curve_is_of_the_reordered_graph_and_its_schedules_of_the_original() -> None:
    graph = weight_gradients()
    better, program = solve_curve(graph, 4), solve_curve(graph, 4, reorder=False)
    assert (better.reordered, program.reordered) == (True, False)
    assert better.least.found_bytes < program.least.found_bytes
    assert simulate(graph, better.least.schedule).peak_bytes == better.least.found_bytes
    for point in better.points:
        assert simulate(graph, point.schedule).peak_bytes == point.peak_bytes


def test_the_largest_batch_is_that_of_the_reordered_graph() -> None:
    def graph_of(batch: int) -> Graph:
        graph = weight_gradients()
        return replace(graph, tensors=tuple(replace(t, size_bytes=t.size_bytes * batch) for t in graph.tensors))

    wanted = Wanted(budget_bytes=80_000, limit=20, max_overhead=0.0)
    answers = {answer.method: answer.size for answer in find_max_batch(graph_of, wanted)}
    assert (answers["keep everything"], answers["optimal"]) == (1, 2)
    answers = {answer.method: answer.size for answer in find_max_batch(graph_of, replace(wanted, reorder=False))}
    assert answers["optimal"] == 1


def test_the_command_reorders_says_so_and_can_be_told_not_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "model.json")
    write_graph(weight_gradients(), path)
    assert main(["solve", path, "--budget", "36kB"]) == 0
    assert "takes each op first in program order as reordered, is faster" in capsys.readouterr().out
    assert main(["solve", path, "--budget", "36kB", "--no-reorder"]) == 3
    assert main(["info", path]) == 0
    assert "54.00 kB without recomputation, 36.00 kB with the ops in a better order" in capsys.readouterr().out


# --- real steps -----------------------------------------------------------------------------------


def schedules(found: Reordering) -> list[Schedule]:
    """In the new order: keeping everything, and with many ops again."""
    return [found.map_back(schedule) for schedule in (keep_everything(found.graph), random_schedule(found.graph, 1))]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["mutated", *slow("gpt2_written", "resnet18")])
def test_a_step_in_another_order_is_the_same_to_the_last_bit(name: str) -> None:
    workload = make(name)
    captured = capture_of(name)
    found = find_order(captured.graph)
    assert found.changed
    eager = measure_outcome(
        lambda *batch: workload.loss_fn(workload.model(*batch[:-1]), batch[-1]), workload.model, workload.batch, seed=3
    )
    for schedule in schedules(found):
        step = Executor(captured, schedule, workload.model, workload.loss_fn)
        assert eager.list_differences(measure_outcome(step, workload.model, workload.batch, seed=3)) == ()


def test_stand_ins_stay_before_the_readers_of_their_outputs() -> None:
    assert find_order(read_in_between(stand_in=False)).graph.ops[1].name == "early"
    assert not find_order(read_in_between(stand_in=True)).changed

"""MONeT's and POET's programs: their optima, the memory of their schedules, and what they choose."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.graphs.errors import GraphError, PlannerError
from planner.graphs.ir import Graph, Phase, Tensor
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.measure.tracing import trace
from planner.plans.solve import solve
from planner.solvers import highs
from planner.solvers.baselines import monet, poet
from planner.solvers.baselines.common.offloading import offer_of
from planner.solvers.baselines.poet import PoetProgram
from planner.solvers.bounds import bound_least_budget
from planner.solvers.clock import WallClock
from planner.solvers.registry import estimate_program_time_s, get_solver
from planner.solvers.request import Request
from planner.solvers.result import Reason, Status
from tests.support.budgets import on_the_way, peak_bytes
from tests.support.graphs.options import check_by_both_judges, offered, with_trips
from tests.support.marks import slow
from tests.support.solvers.answers import ask


def with_another(graph: Graph, op: int, *, time_s: float, workspace_bytes: int) -> Graph:
    """`graph` with an optional op that stands for `op`."""
    like = graph.ops[op]
    new = len(graph.ops)
    added = replace(
        like,
        id=new,
        name=f"other_{new}",
        time_s=time_s,
        workspace_bytes=workspace_bytes,
        optional=True,
        replaces=(op,),
    )
    tensors = tuple(replace(t, producers=(*t.producers, new)) if t.id in like.outputs else t for t in graph.tensors)
    return Graph((*graph.ops, added), tensors, graph.kept, graph.provenance)


def with_workspace(graph: Graph, op: int, workspace_bytes: int) -> Graph:
    ops = tuple(replace(o, workspace_bytes=workspace_bytes) if o.id == op else o for o in graph.ops)
    return Graph(ops, graph.tensors, graph.kept, graph.provenance)


@pytest.mark.parametrize("layers", [3, 5, 7])
def test_a_chain_takes_no_less_than_the_optimum_and_no_more_than_eviction(layers: int) -> None:
    graph = make_training_chain(layers)
    for budget in (*on_the_way(graph, 0.0, 0.3, 0.6), peak_bytes(graph)):
        found = get_solver("monet")(Request(graph, budget))
        best = solve(graph, budget, reorder=False)
        assert found.status is Status.OPTIMAL
        simulation = simulate(graph, found.schedule)
        assert simulation.peak_bytes <= budget
        assert simulation.time_s >= best.time_s - 1e-9
        assert found.bound_s == pytest.approx(simulation.time_s, rel=2e-3)
    assert simulation.time_s == graph.time_s  # of the last budget, the peak


def test_a_small_convolutional_step_takes_the_optimum() -> None:
    """Where all that is worth executing again is of the forward pass, the program's schedules are all that matter."""
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = (torch.randn(4, 3, 16, 16), torch.randint(8, (4,)))
    graph = trace(model, nn.CrossEntropyLoss(), batch, roofline="cpu")
    for budget in on_the_way(graph, 0.1, 0.5, 0.8):
        plans = [solve(graph, budget, solver=solver, reorder=False, tolerance=1e-6) for solver in ("monet", "windows")]
        assert plans[0].time_s == pytest.approx(plans[1].time_s, rel=1e-5)


def test_backward_ops_are_executed_once() -> None:
    graph = make_training_chain(6)
    (budget,) = on_the_way(graph, 0.0)
    found = get_solver("monet")(Request(graph, budget))
    again = [op for op in found.schedule.computed if graph.ops[op].phase is not Phase.FORWARD]
    assert again == [op.id for op in graph.ops if op.phase is not Phase.FORWARD]
    assert len(found.schedule.computed) > len(graph.ops)


def test_monet_chooses_implementations_by_memory_and_time() -> None:
    """The first backward op has a workspace as large as the step: what takes none is slower, and is chosen where it must be."""
    plain = make_training_chain(4)
    first = next(op.id for op in plain.ops if op.phase is Phase.BACKWARD)
    large = 2 * peak_bytes(plain)
    graph = with_another(with_workspace(plain, first, large), first, time_s=plain.ops[first].time_s + 1.0, workspace_bytes=0)
    other = len(graph.ops) - 1
    tight = get_solver("monet")(Request(graph, peak_bytes(plain)))
    roomy = get_solver("monet")(Request(graph, peak_bytes(plain) + large))
    assert other in tight.schedule.computed and first not in tight.schedule.computed
    assert other not in roomy.schedule.computed
    assert tight.status is roomy.status is Status.OPTIMAL
    assert tight.time_s == pytest.approx(roomy.time_s + 1.0)


def test_a_faster_implementation_costs_less_than_nothing() -> None:
    plain = make_training_chain(3)
    graph = with_another(plain, 0, time_s=plain.ops[0].time_s / 4, workspace_bytes=0)
    found = get_solver("monet")(Request(graph, peak_bytes(plain)))
    assert found.time_s == pytest.approx(plain.time_s - 0.75 * plain.ops[0].time_s)


def test_monet_accepts_kernels_and_refuses_offload() -> None:
    plain = make_training_chain(3)
    provenance = {**plain.provenance, "options": ["kernels"]}
    graph = with_another(plain, 0, time_s=plain.ops[0].time_s / 4, workspace_bytes=0)
    renamed = tuple(replace(op, target="kernels.native") if op.optional else op for op in graph.ops)
    graph = Graph(renamed, graph.tensors, graph.kept, provenance)
    plan = solve(graph, peak_bytes(plain), solver="monet", options=["kernels"])
    assert len(plain.ops) in plan.schedule.computed
    with pytest.raises(PlannerError, match="the solver 'monet' transfers nothing"):
        solve(graph, peak_bytes(plain), solver="monet", options=["kernels", "offload"])


def test_too_small_budgets_and_too_large_programs_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_training_chain(4)
    found = get_solver("monet")(Request(graph, bound_least_budget(graph).budget_bytes - 1))
    assert (found.status, found.reason) == (Status.LIMIT, Reason.MEMORY) and "raise the budget" in found.message
    monkeypatch.setattr(monet, "MOST_ENTRIES", 3)
    found = get_solver("monet")(Request(graph, simulate(graph, keep_everything(graph)).peak_bytes))
    assert (found.status, found.reason) == (Status.LIMIT, Reason.SIZE) and "more than 3" in found.message
    assert estimate_program_time_s("monet", graph, 10**9) == 0.0


def test_a_limit_in_which_there_is_no_solution_is_refused_at_once() -> None:
    graph = make_training_chain(80)
    budget_bytes = simulate(graph, keep_everything(graph)).peak_bytes
    limit_s = 0.9 * estimate_program_time_s("monet", graph, budget_bytes)
    refused = get_solver("monet")(Request(graph, budget_bytes, clock=WallClock(limit_s)))
    assert refused.seconds < limit_s / 2
    assert refused.reason is Reason.TIME and "to write it and solve its relaxation once takes about" in refused.message


def test_copies_are_refused() -> None:
    graph = make_training_chain(2)
    host = replace(graph.ops[0], id=len(graph.ops), name="copy", stream="copies", optional=True, outputs=(len(graph.tensors),))
    tensor = Tensor(len(graph.tensors), "copied", 1, (len(graph.ops),))
    with pytest.raises(GraphError, match="streams"):
        get_solver("monet")(Request(Graph((*graph.ops, host), (*graph.tensors, tensor), graph.kept), 10**9))


def test_paging_takes_no_time_there_and_its_time_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poet, "_POWERS", (0.1,))
    graph = with_trips(make_training_chain(4))
    paged = poet.solve(ask(graph, 3))
    check_by_both_judges(graph, paged)
    # f1 and f2 go and come, for 4 tenths, where making f1, then f2 and f1 again costs 2 or 3. There is no room to ask for
    # them before their stages, so each is waited for.
    assert sorted(graph.ops[op].name for op in paged.schedule.computed if graph.ops[op].optional) == [
        "copy_f1_device_to_host",
        "copy_f1_host_to_device",
        "copy_f2_device_to_host",
        "copy_f2_host_to_device",
    ]
    assert paged.time_s == 10.0


def test_cost_of_copies_decides_between_recomputing_and_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_trips(make_training_chain(4))
    both = poet.solve(ask(graph, 4))
    assert both.time_s <= 9.0
    monkeypatch.setattr(poet, "_POWERS", (1.0,))
    computed = poet.solve(ask(graph, 4))
    # Two seconds of copies cost more than f1 again.
    assert not any(graph.ops[op].optional for op in computed.schedule.computed)
    assert computed.time_s == 9.0


@pytest.mark.parametrize("power", [0.01, *slow(1.0)])
def test_program_cost_bounds_the_cost_of_the_schedule(power: float) -> None:
    compared = 0
    for seed in range(40):
        graph = offered(seed, most_ops=8)
        offer = offer_of(graph)
        peak = simulate(offer.program, keep_everything(offer.program)).peak_bytes
        model = PoetProgram(offer, int(0.85 * peak), power)
        program = model.build()
        assert program is not None
        found = highs.solve_program(program, clock=WallClock(10))
        if found.values is None or found.objective is None:
            continue
        schedule = poet.carry_out(model, found.values, int(0.85 * peak))
        simulation = simulate(graph, schedule)
        assert simulation.peak_bytes <= int(0.85 * peak), seed
        times = [graph.ops[op].time_s * (power if graph.ops[op].optional else 1.0) for op in schedule.computed]
        # A copy that is carried out twice in the program may be there still, and some serve nothing.
        assert sum(times) - graph.time_s <= found.objective * model.unit_s + 1e-6, seed
        compared += 1
    assert compared > 10


def test_large_graphs_are_not_tried() -> None:
    graph = with_trips(transformer(TransformerSize(layers=12)), 50e9)
    result = poet.solve(ask(graph, 10**12))
    assert result.reason is Reason.SIZE and "more than 36,000, the most that this solver supports" in result.message


def test_poet_refuses_a_limit_in_which_there_is_no_solution() -> None:
    graph = with_trips(plain := make_training_chain(20), 50e9)
    budget_bytes = simulate(plain, keep_everything(plain)).peak_bytes
    least_s = estimate_program_time_s("poet", graph, budget_bytes)
    refused = poet.solve(ask(graph, budget_bytes, time_limit_s=0.9 * least_s))
    assert refused.reason is Reason.TIME and "to write it and solve its relaxation once takes about" in refused.message
    assert estimate_program_time_s("poet", plain, budget_bytes) == 0.0  # without transfers

"""Runs that evict as they go: views, references held on, and what happens after the last use."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from graphs.importers import import_graph, simrd
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.ir import Graph
from graphs.schedule import Compute, Free, keep_everything
from graphs.simulate import simulate
from graphs.synthetic.draft import Draft
from graphs.synthetic.small import make_chain
from solvers.baselines.common.online import OnlineFailedError, OnlineRun
from solvers.baselines.dtr import DtrParams, solve
from solvers.online.heuristics import DtrRule, make_heuristic
from solvers.online.ledger import Deallocation
from solvers.result import Status
from tests.support.graphs.imported import public_log
from tests.support.solvers.answers import ask

# --- views and references held on -----------------------------------------------------------------


def renamed(graph: Graph) -> Graph:
    """`graph` under other names, which are for people to read."""
    ops = tuple(replace(op, name=f"op {op.id}", target=f"target {op.id}") for op in graph.ops)
    return Graph(ops, tuple(replace(t, name=f"tensor {t.id}") for t in graph.tensors), graph.kept)


def test_a_reference_held_on_is_evicted_as_the_simulator_would(tmp_path: Path) -> None:
    # The program holds y after its last reader, z, until after w: 10 + 10 + 10 beside x. With 25, y goes for w.
    def call(name: str, argument: str) -> list[dict[str, object]]:
        return [
            {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": [argument], "RESULT": [name], "TIME": "1000"},
            {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": "10"},
            {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": "-1"},
        ]

    lines = [
        {"INSTRUCTION": "CONSTANT", "NAME": "x"},
        {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "5"},
        *(line for name, argument in ("yx", "zy", "wz") for line in call(name, argument)),
        *({"INSTRUCTION": "RELEASE", "NAME": name} for name in "yzw"),
    ]
    path = tmp_path / "held.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    graph = import_graph(path)
    (held,) = [t for t in graph.tensors if t.held_for is not None]
    assert held.held_for is not None
    assert [graph.tensors[held.held_for].name, held.name] == ["y", "y held"]
    assert [graph.ops[op].name for op in (*held.producers, *graph.consumers[held.id])] == ["hold.y", "release.y"]
    assert simulate(graph, keep_everything(graph)).peak_bytes == 35
    graph = build_from_dict(convert_to_dict(renamed(graph)))
    for budget in (35, 25):
        result = solve(ask(graph, budget))
        assert (result.peak_bytes, result.time_s) == (budget, graph.time_s)


def test_view_is_evicted_with_its_base_and_recomputed_when_read(tmp_path: Path) -> None:
    # y is made from x, v is a view of y, z is made from v, w from z, and u from v and w; y is evicted before u.
    def call(name: str, arguments: str, *, alias: int = -1) -> list[dict[str, object]]:
        return [
            {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": arguments.split(), "RESULT": [name], "TIME": "1000"},
            {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": "10"},
            {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)},
        ]

    lines = [
        {"INSTRUCTION": "CONSTANT", "NAME": "x"},
        {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "5"},
        *(*call("y", "x"), *call("v", "y", alias=0), *call("z", "v"), *call("w", "z")),
        {"INSTRUCTION": "RELEASE", "NAME": "z"},
        *call("u", "v w"),
        *({"INSTRUCTION": "RELEASE", "NAME": name} for name in "yvwu"),
    ]
    path = tmp_path / "view.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    graph = simrd.read(path, name="view", views=True)
    assert [(op.target, [graph.tensors[t].name for t in op.inputs]) for op in graph.ops] == [
        ("f", ["x"]),
        ("view of f", ["y"]),
        ("f", ["y", "v"]),
        ("f", ["z"]),
        ("f", ["y", "v", "w"]),
    ]
    assert [t.size_bytes for t in graph.tensors] == [5, 10, 0, 10, 10, 10]
    assert [t.view_of for t in graph.tensors] == [None, None, 1, None, None, None]
    graph = renamed(graph)
    run = OnlineRun(graph, 45, make_heuristic(DtrRule.LRU))
    assert run.run().computed == (0, 1, 2, 3, 4)
    assert run.ledger.own_s[run.storage[1]] == pytest.approx(2e-6)
    run = OnlineRun(graph, 45, make_heuristic(DtrRule.LRU))
    for op in range(4):
        run.execute(op)
    run.free(1)
    run.execute(4)
    assert run.steps[4:] == [Free(2), Free(1), Compute(0), Compute(1), Compute(4)]


@pytest.mark.parametrize("rule", [DtrRule.DTR, DtrRule.FULL, DtrRule.LRU])
@pytest.mark.parametrize("deallocation", Deallocation)
def test_schedules_with_views_run_and_fit(rule: DtrRule, deallocation: Deallocation) -> None:
    graph = public_log("resnet32", views=True)
    result = solve(
        ask(graph, int(0.7 * simulate(graph, keep_everything(graph)).peak_bytes), params=DtrParams(deallocation=deallocation)),
        rule=rule,
    )
    assert result.status is Status.FEASIBLE


# --- deallocation ---------------------------------------------------------------------------------


def test_eager_eviction_frees_after_the_last_use() -> None:
    schedule = OnlineRun(make_chain(3), 10, make_heuristic(DtrRule.DTR)).run()
    assert schedule.steps == (Compute(0), Compute(1), Free(0), Compute(2), Free(1), Free(2))


def test_without_deallocation_nothing_is_freed_before_memory_runs_out() -> None:
    graph = make_chain(5)
    run = OnlineRun(graph, 3, make_heuristic(DtrRule.LRU), deallocation=Deallocation.IGNORE)
    assert run.run().steps == (*(Compute(i) for i in range(3)), Free(0), Compute(3), Free(1), Compute(4))


def test_children_of_a_banished_tensor_stay_until_released() -> None:
    # a is banished once b is there; so b, though it could be evicted for c and made again, is pinned.
    draft = Draft()
    (a,) = draft.add_op("a", [], [1])
    (b,) = draft.add_op("b", [a], [2])
    (c,) = draft.add_op("c", [], [2])
    draft.add_op("d", [b, c], [1])
    graph = draft.build_graph()
    assert OnlineRun(graph, 5, make_heuristic(DtrRule.DTR), deallocation=Deallocation.BANISH).run().computed == (0, 1, 2, 3)
    graph = replace(graph, ops=(*graph.ops[:2], replace(graph.ops[2], workspace_bytes=2), graph.ops[3]))
    with pytest.raises(OnlineFailedError, match="op 'c' needs 4 B more, 2 B are in use, and nothing is left to evict"):
        OnlineRun(graph, 5, make_heuristic(DtrRule.DTR), deallocation=Deallocation.BANISH).run()
    assert OnlineRun(graph, 5, make_heuristic(DtrRule.DTR)).run().computed == (0, 1, 2, 0, 1, 3)


def test_unrecomputable_tensor_stays_while_it_may_be_read() -> None:
    # s is read by a only, but a may have to run again for d; after d it is of no use.
    draft = Draft()
    (s,) = draft.add_op("s", [], [1], recomputable=False)
    (a,) = draft.add_op("a", [s], [4])
    (b,) = draft.add_op("b", [], [4])
    (c,) = draft.add_op("c", [b], [1])
    (d,) = draft.add_op("d", [a, c], [1])
    draft.add_op("e", [d], [1])
    schedule = OnlineRun(draft.build_graph([d]), 7, make_heuristic(DtrRule.DTR)).run()
    assert schedule.computed == (0, 1, 2, 3, 1, 4, 5)
    assert schedule.steps.index(Compute(4)) < schedule.steps.index(Free(s)) < schedule.steps.index(Compute(5))


def test_a_stopped_run_says_so() -> None:
    result = solve(ask(make_chain(5), 10, should_stop=lambda: True))
    assert result.status is Status.LIMIT
    assert "stopped" in result.message
    late = solve(ask(make_chain(5), 10, time_limit_s=0.0))
    assert "the limit of 0 s was reached" in late.message

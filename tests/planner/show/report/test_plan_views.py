"""What objects show of themselves: plans in a terminal, a notebook, a figure and a file; the API; a graph on a screen."""

import pickle
from dataclasses import replace
from html import escape
from importlib.metadata import version
from pathlib import Path

import pytest

import planner
from planner.capture.workload.models import build
from planner.cli.main import main
from planner.graphs.errors import MismatchError, OutputError, PlannerError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_chain, make_training_chain
from planner.plans.plan import Plan, read_plan
from planner.plans.solve import solve
from planner.show.facts.baselines import Baseline
from planner.show.views.plan_views import PlanComparison
from tests.support.report import parsed, solved


def blocks(count: int = 8) -> Graph:
    plain = make_training_chain(count)
    ops = tuple(replace(op, module=f"model.h.{op.id % 4}.mlp") for op in plain.ops)
    return Graph(ops, plain.tensors, plain.kept, {"model": "<chain>"})


@pytest.fixture(scope="module")
def graph() -> Graph:
    return blocks()


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return solve(graph, "60%")


def test_a_plan_is_short_and_readable(plan: Plan) -> None:
    assert repr(plan) == f"Plan(budget 5 B, peak 5 B, overhead {100 * plan.overhead:.2f}%, optimal)"
    first, second = str(plan).split("\n")
    assert first == "budget 5 B, peak 5 B predicted, not measured yet (keeping everything: 9 B)"
    assert second.startswith("step time predicted") and second.endswith("optimal, gap 0.00%")


def test_a_notebook_shows_the_memory(plan: Plan, graph: Graph) -> None:
    text = plan._repr_html_()
    shown = parsed(text)
    assert "svg" in shown.tags and "script" not in shown.tags
    assert "Plan for &lt;chain&gt;" in text and "at most 5 B, budget 5 B" in text
    assert "svg" not in parsed(replace(plan, source=None)._repr_html_()).tags


def test_a_plan_finds_its_graph_again(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json", graph=tmp_path / "model.json")
    (tmp_path / "plan.json").rename(tmp_path / "renamed.json")
    loaded = Plan.load(tmp_path / "renamed.json")
    assert loaded == replace(plan, graph_file="model.json")
    assert loaded.source == plan.source
    assert "svg" in parsed(loaded._repr_html_()).tags
    (tmp_path / "model.json").unlink()
    assert Plan.load(tmp_path / "renamed.json").source is None


@pytest.mark.parametrize("other", ["/proc/plan.json", "plan.html", "none/plan.json"])
def test_nothing_is_written_where_one_file_cannot_be(other: str, plan: Plan, tmp_path: Path) -> None:
    for names in ((tmp_path / other, tmp_path / "model.json"), (tmp_path / "plan.json", tmp_path / other)):
        with pytest.raises(OutputError, match=r"cannot be written|ends with \.html"):
            plan.save(names[0], graph=names[1])
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_its_graph(plan: Plan, graph: Graph, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    alone = Plan.load(tmp_path / "plan.json")
    assert alone == plan == read_plan(tmp_path / "plan.json") and alone.source is None
    with pytest.raises(PlannerError, match=r"does not hold its graph, which this needs: call plan.compare\(graph=...\)"):
        alone.compare()
    with pytest.raises(PlannerError, match="does not hold its graph, so that it cannot be written"):
        alone.save(tmp_path / "plan.json", graph=tmp_path / "model.json")
    assert alone.compare(graph) == plan.compare()
    with pytest.raises(MismatchError, match="the plan is for another graph"):
        alone.compare(make_training_chain(5))


def test_a_plan_of_another_graph_is_not_loaded(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json", graph=tmp_path / "model.json")
    write_graph(make_training_chain(5), tmp_path / "model.json")
    with pytest.raises(MismatchError, match="the plan is for another graph"):
        Plan.load(tmp_path / "plan.json")


def test_the_graph_is_no_part_of_a_pickle(plan: Plan) -> None:
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan and sent.source is None and plan.source is not None


def test_plan_comparison_equals_simulated_figures(plan: Plan, graph: Graph) -> None:
    table = plan.compare()
    assert isinstance(table, PlanComparison)
    own, kept, checkpointed = table.rows
    whole = simulate(graph, keep_everything(graph))
    assert own == Baseline("this plan", plan.peak_bytes, None, plan.peak_bytes, plan.time_s, plan.recomputed)
    assert kept == Baseline("keep everything", whole.peak_bytes, None, whole.peak_bytes, whole.time_s, 0)
    assert checkpointed.name == "checkpoint blocks" and checkpointed.recomputed > 0
    lines = str(table).split("\n")
    assert lines[0].split() == ["peak", "within", "budget", "step", "time", "overhead", "recomputed", "ops"]
    assert lines[2].startswith("keep everything") and " no " in lines[2] and "0.00%" in lines[2]
    assert parsed(table._repr_html_()).rows[1][:3] == ["this plan", "5 B", "yes"]


def test_comparison_within_a_reserved_budget_counts_reserved_memory() -> None:
    chain = make_training_chain(8)
    tensors = tuple(replace(t, size_bytes=11 * 2**20) for t in chain.tensors)  # in segments of 12 MiB
    graph = replace(chain, tensors=tensors, provenance={"device": "h200"})
    plan = planner.solve(graph, 100 * 2**20, work_limit=2.0)  # as much as all tensors allocate
    own, kept = plan.compare().rows[:2]
    assert own.reserved_bytes == own.counted_bytes == plan.reserved_bytes
    assert kept.peak_bytes <= plan.budget_bytes < kept.counted_bytes == 9 * 12 * 2**20
    header, first, second = str(plan.compare()).split("\n")[:3]
    assert header.split()[:3] == ["peak", "reserved", "within"]
    assert " yes " in first and " no " in second


@pytest.mark.slow
def test_plans_with_options_show_themselves_too(tmp_path: Path) -> None:
    graph, plan = solved()
    assert plan.compare().rows == plan.compare(graph).rows
    plan.save(tmp_path / "plan.json", graph=tmp_path / "model.json")
    assert Plan.load(tmp_path / "plan.json").compare() == plan.compare()
    assert main(["show", str(tmp_path / "plan.json"), "-o", str(tmp_path / "report.html")]) == 0
    assert plan.copied and "svg" in parsed(plan._repr_html_()).tags


def test_the_plot_has_the_plan_its_baselines_and_the_budget(plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    figure = plan.plot()
    (axes,) = figure.axes
    labels = axes.get_legend_handles_labels()[1]
    methods = ["this plan", "keep everything", "checkpoint blocks"]
    assert {label.split(",")[0] for label in labels} == {*methods, "budget 5 B", "static memory"}
    assert axes.get_ylabel() == "memory in B"
    drawn = next(line for line in axes.get_lines() if line.get_label().startswith("this plan"))
    assert max(drawn.get_ydata()) == plan.peak_bytes


def test_version_equals_the_installed_distribution() -> None:
    assert planner.__version__ == version("remat-planner")
    assert planner.Plan is Plan


def test_dir_is_the_api() -> None:
    assert dir(planner) == sorted(planner.__all__)
    assert all(hasattr(planner, name) for name in dir(planner))
    assert set(planner._MODULES) | {"__version__"} == set(planner.__all__)


def test_a_graph_is_a_screen() -> None:
    workload = build("gpt2", layers=2, width=32, heads=2, vocab=61, seq=16, batch=2)
    graph = planner.trace(workload.model, workload.loss_fn, workload.batch, roofline="h100", optimizer="adamw")
    shown = str(graph)
    assert len(shown.splitlines()) < 25 and len(shown) < 2500
    assert f"({sum(op.phase == 'forward' for op in graph.program):,} forward" in shown
    assert "static memory" in shown and "optimizer_state" in shown
    assert graph._repr_html_().startswith("<pre>")
    assert repr(graph).startswith(f"Graph({len(graph.ops):,} ops, ") and len(repr(graph)) < 100


def test_names_in_a_graph_cannot_control_a_terminal() -> None:
    graph = make_chain(3)
    tensors = tuple(replace(t, name=f"\x1b[2J<b>{t.name}") for t in graph.tensors)
    named = replace(graph, tensors=tensors)
    assert "\x1b" not in str(named) and "<b>" not in named._repr_html_()


def test_long_schedules_are_counted() -> None:
    assert repr(keep_everything(make_chain(2))).startswith("Schedule((Compute(op=0)")
    schedule = keep_everything(make_chain(40))
    assert repr(schedule) == f"Schedule({len(schedule.steps)} steps)"
    assert repr(Schedule(())) == "Schedule(())"


def test_a_plan_that_has_not_run_is_not_measured_yet() -> None:
    assert "peak 0 B" not in (shown := str(planner.solve(make_chain(5), "100%")))
    assert "predicted, not measured yet (keeping everything" in shown


def test_results_are_shown_in_a_line_or_on_a_screen() -> None:
    workload = build("mlp", batch=64, layers=3, width=16, classes=3)
    graph = planner.trace(*workload, passes=1)
    report = planner.run(planner.solve(graph, "90%"), *workload, repeats=1)
    advice = planner.advise(*workload, passes=1, options=[], time_limit_s=2)
    for shown in (planner.curve(graph, 3, time_limit_s=1), advice):
        assert len(repr(shown)) < 100 and shown._repr_html_() == f"<pre>{escape(str(shown))}</pre>"
    assert repr(report).startswith("RunReport(peak ") and len(str(report)) < 150

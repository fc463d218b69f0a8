"""What the package and its objects show of themselves: the API, a graph on a screen, a plan before its first step."""

from dataclasses import replace
from html import escape

import planner
from graphs.schedule import Schedule, keep_everything
from graphs.synthetic.small import make_chain
from planner.capture.workload.models import build


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

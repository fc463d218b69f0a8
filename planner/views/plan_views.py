"""Views of ``Plan``: a figure, a table, and HTML for notebooks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import escape

from graphs.errors import PlannerError
from graphs.ir import Graph
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.facts.baselines import Baseline, baselines
from planner.facts.timeline import Timeline
from planner.plan_check import planned_graph
from planner.plans.record import PlanRecord
from planner.views.memory_plot import plot_plan
from planner.views.memory_sketch import sketch
from planner.views.text import table
from planner.visible import visible, visible_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A plan and its baselines, as the judge predicts them; prints as a table.

    Attributes:
        rows: name, peak in bytes, seconds, and recomputed ops of each, the plan first.
        budget_bytes: of the plan.
    """

    rows: tuple[tuple[str, int, float, int], ...]
    budget_bytes: int

    def __str__(self) -> str:
        return table(("", "peak", "within budget", "step time", "overhead", "recomputed ops"), self._cells(), numbers=0)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("", "peak", "within budget", "step time", "overhead", "recomputed ops"))
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._cells())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _cells(self) -> list[tuple[str, ...]]:
        base_s = next(time_s for name, _, time_s, _ in self.rows if name == "keep everything")
        return [
            (
                name,
                format_bytes(peak_bytes),
                "yes" if peak_bytes <= self.budget_bytes else "no",
                format_seconds(time_s),
                format_ratio(time_s / base_s - 1) if base_s else "0.00%",
                f"{recomputed:,}",
            )
            for name, peak_bytes, time_s, recomputed in self.rows
        ]


def plot(plan: PlanRecord, graph: Graph | None) -> "Figure":
    """Return the figure of ``Plan.plot``."""
    timeline = _timeline(plan, graph, "plot")
    return plot_plan(timeline, baselines(timeline.graph, plan))


def compare(plan: PlanRecord, graph: Graph | None) -> PlanComparison:
    """Return the table of ``Plan.compare``."""
    timeline = _timeline(plan, graph, "compare")
    others = [_row(one) for one in baselines(timeline.graph, plan)]
    return PlanComparison((("this plan", plan.peak_bytes, plan.time_s, plan.recomputed), *others), plan.budget_bytes)


def html(plan: PlanRecord, graph: Graph | None) -> str:
    """Return `plan` as HTML for a notebook: its text, and the chart of its memory if the graph is known."""
    lines = f"<pre>{escape(visible_lines(str(plan)))}</pre>"
    if graph is None:
        return f"<div>{lines}</div>"
    timeline = _timeline(plan, graph, "plot")
    model = visible(plan.graph.provenance.get("model", "a model"))
    return f"<div><b>Plan for {escape(model)}</b>{sketch(timeline)}{lines}</div>"


def _timeline(plan: PlanRecord, graph: Graph | None, method: str) -> Timeline:
    found = plan.source if graph is None else graph
    if found is None:
        raise PlannerError(
            f"the plan does not hold its graph, which this needs: call plan.{method}(graph=...) with what it was solved for, or "
            "load it with Plan.load where the graph's file is beside it"
        )
    return Timeline(planned_graph(found, plan), plan)


def _row(one: Baseline) -> tuple[str, int, float, int]:
    return one.name, one.peak_bytes, one.time_s, one.recomputed

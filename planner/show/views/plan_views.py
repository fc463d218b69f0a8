"""Views of ``Plan``: a figure, a table, and HTML for notebooks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import escape

from planner.graphs.errors import PlannerError
from planner.graphs.escape import escape_lines, escape_text
from planner.graphs.ir import Graph, check_is_graph
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.plans.plan_check import apply_plan_options
from planner.plans.record import PlanRecord
from planner.plans.select_attributes import select_attributes
from planner.show.facts.baselines import Baseline, build_baselines
from planner.show.facts.timeline import Timeline
from planner.show.views.memory_plot import draw_sketch, plot_plan
from planner.show.views.text import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A plan and its baselines; prints as a table.

    Attributes:
        rows: the plan's first.
    """

    rows: tuple[Baseline, ...]
    budget_bytes: int

    def __str__(self) -> str:
        return format_table(self._list_header(), self._list_cells(), numbers=0)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self._list_header())
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._list_cells())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _list_cells(self) -> list[tuple[str, ...]]:
        base_s = next(row.time_s for row in self.rows if row.name == "keep everything")
        return [
            (
                row.name,
                format_bytes(row.peak_bytes),
                *(() if row.reserved_bytes is None else (format_bytes(row.reserved_bytes),)),
                "yes" if row.counted_bytes <= self.budget_bytes else "no",
                format_seconds(row.time_s),
                format_ratio(row.time_s / base_s - 1) if base_s else "0.00%",
                f"{row.recomputed:,}",
            )
            for row in self.rows
        ]

    def _list_header(self) -> tuple[str, ...]:
        reserved = () if self.rows[0].reserved_bytes is None else ("reserved",)
        return ("", "peak", *reserved, "within budget", "step time", "overhead", "recomputed ops")


def plot(plan: PlanRecord, graph: Graph | None) -> "Figure":
    """Return the figure of ``Plan.plot``."""
    timeline = _build_timeline(plan, graph, "plot")
    return plot_plan(timeline, build_baselines(timeline.graph, plan))


def compare(plan: PlanRecord, graph: Graph | None) -> PlanComparison:
    """Return the table of ``Plan.compare``."""
    timeline = _build_timeline(plan, graph, "compare")
    own = Baseline(
        name="this plan",
        counted_bytes=plan.predicted_bytes,
        **select_attributes(plan, "peak_bytes", "reserved_bytes", "time_s", "recomputed"),
    )
    return PlanComparison((own, *build_baselines(timeline.graph, plan)), plan.budget_bytes)


def render_plan(plan: PlanRecord, graph: Graph | None) -> str:
    """Return `plan` as HTML for a notebook: its text, and the chart of its memory if the graph is known."""
    lines = f"<pre>{escape(escape_lines(str(plan)))}</pre>"
    if graph is None:
        return f"<div>{lines}</div>"
    timeline = _build_timeline(plan, graph, "plot")
    model = escape_text(plan.graph.provenance.model or "a model")
    return f"<div><b>Plan for {escape(model)}</b>{draw_sketch(timeline)}{lines}</div>"


def _build_timeline(plan: PlanRecord, graph: Graph | None, method: str) -> Timeline:
    found = plan.source if graph is None else graph
    if found is None:
        raise PlannerError(
            f"the plan does not hold its graph, which this needs: call plan.{method}(graph=...) with what it was solved for, or "
            "load it with Plan.load where the graph's file is beside it"
        )
    check_is_graph(found)
    return Timeline(apply_plan_options(found, plan), plan)

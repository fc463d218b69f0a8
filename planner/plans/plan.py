"""Plans as users have them: the output of ``planner solve``, with its files and views. Never imports torch."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.graphs.documents import PLAN_FORMAT
from planner.graphs.errors import PlannerError
from planner.graphs.io.files import check_writable, is_replaced, read_object
from planner.graphs.io.formats import read_graph, summable, write_graph
from planner.graphs.io.graph_document import build_from_dict
from planner.graphs.ir import Graph
from planner.graphs.short_tracebacks import shorten_traceback
from planner.plans.document import record_from_dict, write_plan
from planner.plans.plan_check import apply_plan_options, check_plan, find_graph_path
from planner.plans.record import PlanRecord
from planner.show.views import plan_views

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plan(PlanRecord):
    """The schedule for one graph and one budget, with predictions: a ``PlanRecord`` with its files and views.

    Examples:
        >>> plan.save("plan.json")
        >>> planner.Plan.load("plan.json").schedule == plan.schedule
        True
    """

    __slots__ = ()

    @classmethod
    def of(cls, record: PlanRecord) -> "Plan":
        """Return the plan with the data of `record`."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(record)})

    @shorten_traceback
    def save(self, path: str | os.PathLike[str], *, graph: str | os.PathLike[str] | None = None) -> None:
        """Write the plan to the file `path`, as ``planner solve -o`` does.

        Args:
            path: the plan's file.
            graph: a file for its graph, which the plan then names, so that ``Plan.load`` and ``planner show`` find it.

        Raises:
            OutputError: a file cannot be written.
            PlannerError: `graph` is given, but the plan does not hold its graph.
        """
        plan: PlanRecord = self
        if graph is not None:
            if self.source is None:
                raise PlannerError(
                    "the plan does not hold its graph, so that it cannot be written: only the plan can (graph=None)"
                )
            for file in (path, graph):
                check_writable(file, suffix=".json")
            write_graph(self.source, graph)
            plan = name_graph(self, path, graph)
        check_writable(path, suffix=".json")
        write_plan(plan, path)

    @staticmethod
    @shorten_traceback
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Return the plan in the file `path`, with its graph if the graph's file still exists.

        Raises:
            FormatError: the file holds no plan that this planner reads.
            MismatchError: the graph exists, but the plan disagrees with its schedule.
        """
        plan = read_plan(path)
        where = find_graph_path(plan, path)
        if where is None or not where.is_file():
            return plan
        graph = apply_plan_options(read_graph(where), plan)
        check_plan(graph, plan)
        return replace(plan, source=graph)

    @shorten_traceback
    def plot(self, graph: Graph | None = None) -> "Figure":
        """Return a ``matplotlib.figure.Figure`` of memory over the step, with keeping everything and checkpointing blocks.

        Args:
            graph: the graph that the plan was solved for; required if the plan does not hold it (`source`).

        Raises:
            PlannerError: the graph is not known, or matplotlib is not installed.
            MismatchError: it is another graph.
        """
        return plan_views.plot(self, graph)

    @shorten_traceback
    def compare(self, graph: Graph | None = None) -> plan_views.PlanComparison:
        """Return a table of this plan, keeping everything and checkpointing blocks, as the judge predicts them.

        Args:
            graph: as for ``plot``.

        Raises:
            PlannerError: the graph is not known.
            MismatchError: it is another graph.
        """
        return plan_views.compare(self, graph)

    def _repr_html_(self) -> str:
        """Return the plan as HTML for a notebook, with the chart of its memory if the graph is known."""
        return plan_views.render_plan(self, self.source)


def name_graph(plan: PlanRecord, path: str | os.PathLike[str], graph: str | os.PathLike[str]) -> PlanRecord:
    """Return `plan`, to be written to `path`, with the file `graph` of its graph relative to the plan's folder.

    If the plan is written to a pipe, the path is absolute.
    """
    full = Path(graph).resolve()
    near = Path(os.path.relpath(full, Path(path).resolve().parent)) if is_replaced(path) else full
    return replace(plan, graph_file=near.as_posix())


def plan_from_dict(data: Mapping[str, object], *, source: str = "plan") -> Plan:
    """Return the plan in `data`; `source` names it in messages.

    Raises:
        FormatError: `data` is no plan of a version that this planner reads.
    """
    return Plan.of(record_from_dict(data, source=source))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in the file `path`. Whether it is valid on a graph is checked by ``simulate``.

    Raises:
        FormatError: the file is not a plan of a version this planner reads.
    """
    return plan_from_dict(read_object(path), source=str(path))


def read_graph_or_plan(path: str | os.PathLike[str]) -> Graph | Plan:
    """Return the graph or plan in the file `path`.

    Raises:
        FormatError, GraphError: as ``read_graph`` and ``read_plan``.
    """
    data = read_object(path)
    if data.get("format") == PLAN_FORMAT:
        return plan_from_dict(data, source=str(path))
    return summable(build_from_dict(data, source=str(path)), str(path))

"""Plans in files, with the graphs that they name, for ``Plan.save`` and ``Plan.load``. Never imports torch."""

import os
from dataclasses import replace
from pathlib import Path

from graphs.errors import PlannerError
from graphs.io.files import is_replaced
from graphs.io.formats import read_graph, write_graph
from planner.plans.document import read_record, write_plan
from planner.plans.plan_check import apply_plan_options, check_plan, find_graph_path
from planner.plans.record import PlanRecord


def save(plan: PlanRecord, path: str | os.PathLike[str], graph: str | os.PathLike[str] | None) -> None:
    """Write `plan` to a file; see ``Plan.save``."""
    if graph is not None:
        if plan.source is None:
            raise PlannerError("the plan does not hold its graph, so that it cannot be written: only the plan can (graph=None)")
        write_graph(plan.source, graph)
        plan = name_graph(plan, path, graph)
    write_plan(plan, path)


def name_graph(plan: PlanRecord, path: str | os.PathLike[str], graph: str | os.PathLike[str]) -> PlanRecord:
    """Return `plan`, to be written to `path`, with the file `graph` of its graph relative to the plan's folder.

    If the plan is written to a pipe, the path is absolute.
    """
    full = Path(graph).resolve()
    near = Path(os.path.relpath(full, Path(path).resolve().parent)) if is_replaced(path) else full
    return replace(plan, graph_file=near.as_posix())


def load(path: str | os.PathLike[str]) -> PlanRecord:
    """Return the plan in the file `path`; see ``Plan.load``."""
    plan = read_record(path)
    where = find_graph_path(plan, path)
    if where is None or not where.is_file():
        return plan
    graph = apply_plan_options(read_graph(where), plan)
    check_plan(graph, plan)
    return replace(plan, source=graph)

"""Checks of a plan's claims against its schedule, since files are edited and graphs traced again. Never imports torch.

A plan file claims a peak, a time and a bound. The first two are simulated anew; of the bound only what must hold is checked,
since a proof is not part of a file.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

from planner.graphs.errors import MismatchError, PlannerError, ScheduleError
from planner.graphs.io.formats import read_graph
from planner.graphs.ir import Graph
from planner.graphs.options import extract_eager_program
from planner.graphs.options.compress import predict_gradient_error
from planner.graphs.options.selection import describe_differences
from planner.graphs.simulate import Simulation, simulate
from planner.graphs.units import format_bytes, format_seconds
from planner.memory.reserved import DeviceTraining
from planner.plans.record import GraphSummary, PlanRecord
from planner.plans.summary import check_same_graph, get_other_peaks, summarize
from planner.settings.option_settings import apply_recorded_options
from planner.solvers.order.peak import keep_everything_peak_bytes

_ROUNDING = 1e-9  # relative tolerance of sums of seconds
_BOUND_ROUNDING = 1e-4  # relative tolerance of bounds from linear programs


def check_plan(graph: Graph, plan: PlanRecord) -> Simulation:
    """Return the judge's simulation of `plan` on `graph`, after checking that the plan agrees with it.

    Raises:
        MismatchError: the plan is for another graph, or for this one with other times or sizes, or was edited.
    """
    check_same_graph(plan.graph, found := summarize(graph))
    if again := _describe_summary_differences(plan.graph, found):
        raise MismatchError(
            f"the graph of the plan has changed ({again}): it was traced again since, or one of the files was edited; solve again"
        )
    try:
        simulation = simulate(graph, plan.schedule)
    except ScheduleError as error:
        raise MismatchError(
            f"the plan's schedule does not run on its graph: {error}; one of the two files was edited; solve again"
        ) from error
    wrong = list_figure_differences(plan, simulation)
    if plan.differs != describe_differences(graph, plan.schedule.computed):
        wrong.append(
            f"that it differs by {list(plan.differs)}, but its ops by {list(describe_differences(graph, plan.schedule.computed))}"
        )
    found_error = predict_gradient_error(graph, plan.schedule.computed)
    if (found_error is None) != (plan.gradient_error is None) or not _is_same_time(
        found_error or 0.0, plan.gradient_error or 0.0
    ):
        wrong.append(f"a gradient error of {plan.gradient_error!r}, but its ops one of {found_error!r}")
    if wrong := [*wrong, *_list_other_peaks(plan, graph, simulation), *_list_reserved_differences(plan, graph)]:
        raise MismatchError(f"the plan says {'; '.join(wrong)}: its file was edited; solve again")
    return simulation


def check_with_its_graph(plan: PlanRecord, plan_path: str | os.PathLike[str]) -> None:
    """Check `plan`, read from `plan_path`, if its graph's file still exists.

    Raises:
        MismatchError: the plan disagrees with its schedule.
    """
    path = find_graph_path(plan, plan_path)
    if path is None or not path.is_file():
        return
    try:
        graph = apply_plan_options(read_graph(path), plan)
    except MismatchError:
        raise
    except PlannerError:
        return  # it is read for this check only
    found = summarize(graph)
    if found.fingerprint == plan.graph.fingerprint and not _describe_summary_differences(plan.graph, found):
        check_plan(graph, plan)


def check_sizes(graph: Graph, plan: PlanRecord) -> None:
    """Check `plan` on the graph of a captured step, whose times and workspaces are not measured.

    Args:
        graph: with the options of `plan` that are found in a step, without the others.

    Raises:
        MismatchError: the plan is for another graph; its peak, or that without recomputation, is below the tensors' own memory;
            or its times and its bound contradict each other or the schedule.
        ScheduleError: its schedule does not run on the graph.
    """
    offered = apply_recorded_options(graph, plan.settings)
    check_same_graph(plan.graph, summarize(offered))
    more_bytes = plan.graph.static_bytes - graph.static_bytes
    found, program = simulate(offered, plan.schedule), extract_eager_program(graph)
    peaks = (
        ("a peak", plan.peak_bytes, found.peak_bytes),
        (
            "a peak without recomputation",
            plan.graph.keep_everything_peak_bytes,
            keep_everything_peak_bytes(program),
        ),
    )
    for what, said_bytes, found_bytes in peaks:
        least_bytes = found_bytes + more_bytes
        if least_bytes > said_bytes:
            raise MismatchError(
                f"the plan says {what} of {_format_exact(said_bytes)}, but its tensors alone take {_format_exact(least_bytes)}: "
                "its file was edited; solve again"
            )
    stood_for = any(offered.ops[op].replaces for op in plan.schedule.computed)  # other times than the program has
    wrong = _list_other_peaks(plan, offered, found)
    wrong += [] if stood_for else _time_differences(plan, plan.recomputed + plan.copied)
    if wrong := [*wrong, *_bound_differences(plan, plan.time_s)]:
        raise MismatchError(f"the plan says {'; '.join(wrong)}: its file was edited; solve again")


def apply_plan_options(graph: Graph, plan: PlanRecord) -> Graph:
    """Return `graph` with the options that `plan` was solved with, unless it has them already.

    Raises:
        MismatchError: the settings of the plan are none that a solve records.
        GraphError: an option cannot be added to this graph.
        UsageError: the graph was traced without it.
    """
    return graph if graph.fingerprint == plan.graph.fingerprint else apply_recorded_options(graph, plan.settings)


def find_graph_path(plan: PlanRecord, plan_path: str | os.PathLike[str]) -> Path | None:
    """Return the path of the graph of `plan`, which was read from `plan_path`; None if the plan has none."""
    return None if plan.graph_file is None else Path(plan_path).resolve().parent / plan.graph_file


def list_figure_differences(plan: PlanRecord, simulation: Simulation) -> list[str]:
    """Return the claims of `plan` that disagree with the `simulation` of its schedule."""
    found = []
    if plan.peak_bytes != simulation.peak_bytes:
        found.append(f"a peak of {_format_exact(plan.peak_bytes)}, but its schedule takes {_format_exact(simulation.peak_bytes)}")
    if simulation.peak_bytes > plan.budget_bytes:
        found.append(
            f"a budget of {_format_exact(plan.budget_bytes)}, but its schedule takes {_format_exact(simulation.peak_bytes)}"
        )
    if not _is_same_time(plan.time_s, simulation.time_s):
        found.append(f"a step time of {plan.time_s!r} s, but its schedule takes {simulation.time_s!r} s")
    return [*found, *_bound_differences(plan, simulation.time_s)]


def _list_other_peaks(plan: PlanRecord, graph: Graph, simulation: Simulation) -> list[str]:
    others = get_other_peaks(graph, simulation)
    if plan.pool_peaks_bytes == others:
        return []
    return [f"peaks of {dict(plan.pool_peaks_bytes)} in other pools than the device's, but its schedule has {others}"]


def _list_reserved_differences(plan: PlanRecord, graph: Graph) -> list[str]:
    """Return the errors in the predictions of reserved memory of `plan`."""
    said = plan.reserved
    if said is None:
        return []
    training = DeviceTraining.of(graph, plan.schedule, plan.memory)
    found = training.predict(said.eager_bytes, in_arena=plan.arena_bytes is not None)
    found = replace(found, context_bytes=said.context_bytes)  # that was measured where the graph was traced
    return [] if found == said else [f"that {_format_exact(said.total_bytes)} are reserved, but its schedule has {found}"]


def _time_differences(plan: PlanRecord, again: int) -> list[str]:
    """Return errors in the times of `plan`, whose schedule has `again` recomputations and transfers."""
    said = f"a step time of {plan.time_s!r} s, and {plan.graph.time_s!r} s without recomputation"
    if plan.time_s < plan.graph.time_s * (1 - _ROUNDING):
        return [said]
    if not again and not _is_same_time(plan.time_s, plan.graph.time_s):
        return [f"{said}, but its schedule neither recomputes nor transfers anything"]
    return []


def _bound_differences(plan: PlanRecord, time_s: float) -> list[str]:
    """Return errors in the bound of `plan`, whose schedule takes `time_s`."""
    found = []
    if plan.bound_s is not None and plan.bound_s > time_s * (1 + _BOUND_ROUNDING):
        found.append(
            f"that no schedule takes less than {format_seconds(plan.bound_s)}, but its own takes {format_seconds(time_s)}"
        )
    return found


def _describe_summary_differences(planned: GraphSummary, found: GraphSummary) -> str:
    pairs = [
        ("ops", str(planned.ops), str(found.ops)),
        ("tensors", str(planned.tensors), str(found.tensors)),
        ("static memory", _format_exact(planned.static_bytes), _format_exact(found.static_bytes)),
        (
            "peak without recomputation",
            _format_exact(planned.keep_everything_peak_bytes),
            _format_exact(found.keep_everything_peak_bytes),
        ),
    ]
    differences = [f"{what} {there} there, {here} here" for what, there, here in pairs if there != here]
    if not _is_same_time(planned.time_s, found.time_s):
        differences.append(f"step time {planned.time_s!r} s there, {found.time_s!r} s here")
    return "; ".join(differences)


def _is_same_time(one_s: float, other_s: float) -> bool:
    return math.isclose(one_s, other_s, rel_tol=_ROUNDING)


def _format_exact(size_bytes: int) -> str:
    """Return a size to the byte, so that different sizes read differently."""
    return f"{format_bytes(size_bytes)} ({size_bytes:,} B)" if size_bytes >= 1000 else f"{size_bytes} B"

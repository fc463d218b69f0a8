"""Joint planning of the graphs of a step, once all are known."""

import math
from collections.abc import Callable, Mapping, Sequence

from planner.graphs.errors import InfeasibleError
from planner.graphs.options import remove_options
from planner.graphs.schedule import Schedule, count_kept_bytes, keep_everything
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes, format_enough
from planner.memory.fit import find_largest
from planner.solvers.clock import WallClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.train.backend.planned_graph import PlannedGraph
from planner.train.backend.rest_of_step import add_rest, build_keep_everything, find_lean_schedule, find_least_schedule
from planner.train.backend.shared_channels import compute_host_room
from planner.train.backend.step_memory import (
    PassStorages,
    compute_bytes_of_others,
    compute_peak_bytes,
    compute_peak_of_unplanned,
    shrink_left_out,
)

_HALVINGS = 4  # bisection steps for the share that graphs may keep
_WITNESS_S = 2.0  # seconds to show that a graph fits


class JointPlanning:
    """Joint planning of all graphs of some steps: each keeps the same share of the memory that it can recompute.

    Args:
        steps: for each step its graphs, in the order of their forward passes, and the storages that each of these passes uses; a
            graph may occur several times, and in several steps.
        leaving: returns a schedule of a graph that leaves part of a budget free between the passes, given such a schedule and
            the graph's host memory.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Sequence[PlannedGraph], Sequence[PassStorages]]],
        whole_bytes: int,
        leaving: Callable[[PlannedGraph, int, int, Schedule, int], Schedule],
        *,
        host_bytes: int,
        limit_s: float,
    ) -> None:
        self._steps, self._whole = steps, whole_bytes
        self._graphs = tuple(dict.fromkeys(graph for order, _ in steps for graph in order))
        self._leaving, self._host_bytes, self._limit_s = leaving, host_bytes, limit_s

    def plan(self) -> None:
        """Set the plan of each graph; raise InfeasibleError, with what each keeps, if none that fit together were found."""
        most = {
            graph: count_kept_bytes(graph.captured.graph, build_keep_everything(graph.captured.graph)) for graph in self._graphs
        }
        kept, known = self._find_shares(most)
        on_host: dict[PlannedGraph, tuple[int, int]] = {}
        for graph in self._graphs:
            room = self._compute_room(graph, kept)
            there = min(compute_host_room(order, graph, on_host, self._host_bytes) for order in self._list_orders_with(graph))
            schedule = self._leaving(graph, room, self._compute_rest(graph, room, kept), known[graph], there)
            kept = {**kept, graph: count_kept_bytes(graph.captured.graph, schedule)}
            graph.schedule = schedule
            on_host[graph] = graph.on_host

    def copy_inputs(self) -> None:
        """Copy inputs in the next step, in case they change between the passes, as far as that fits beside all graphs."""
        room_bytes = max(0, self._whole - self._compute_peak_bytes())
        for graph in self._graphs:
            runs = max(order.count(graph) for order in self._list_orders_with(graph))
            each_bytes = room_bytes // runs
            room_bytes -= runs * (each_bytes - graph.copy_inputs(each_bytes))

    def _compute_peak_bytes(self) -> int:
        """Return the highest peak of a step by the plans of its graphs."""
        return self._compute_peak_bytes_by({graph: graph.schedule for graph in self._graphs})

    def _compute_peak_bytes_by(self, schedules: Mapping[PlannedGraph, Schedule]) -> int:
        return max(
            compute_peak_bytes([(graph.captured.graph, schedules[graph]) for graph in order], seen) for order, seen in self._steps
        )

    def _list_orders_with(self, graph: PlannedGraph) -> list[Sequence[PlannedGraph]]:
        return [order for order, _ in self._steps if graph in order]

    def _find_shares(self, most: Mapping[PlannedGraph, int]) -> tuple[dict[PlannedGraph, int], dict[PlannedGraph, Schedule]]:
        """Return the bytes that each graph may keep between its passes, at most those in `most`, and schedules that keep no more.

        All graphs get the same share of the bytes between the least that they keep and those in `most`; the largest that fits.
        """
        everything = self._find_fitting(most)
        if everything is not None:
            return dict(most), everything
        lean = self._find_leanest()
        least = {graph: count_kept_bytes(graph.captured.graph, schedule) for graph, schedule in lean.items()}

        def try_share(share: float) -> tuple[dict[PlannedGraph, int], dict[PlannedGraph, Schedule]] | None:
            kept = {graph: int(least[graph] + share * max(0, most[graph] - least[graph])) for graph in self._graphs}
            fitting = self._find_fitting(kept)
            return None if fitting is None else (kept, fitting)

        return find_largest(try_share, 0.0, 1.0, halvings=_HALVINGS) or (least, lean)

    def _find_leanest(self) -> dict[PlannedGraph, Schedule]:
        """Return schedules that keep little."""
        kept = dict.fromkeys(self._graphs, 0)
        found: dict[PlannedGraph, Schedule] = {}
        repeated = any(len(order) > len(set(order)) for order, _ in self._steps)
        for _ in range(1 + repeated):  # a graph that runs several times coexists with itself
            for graph in self._graphs:
                room = self._compute_room(graph, kept)
                schedule = find_lean_schedule(graph.captured.graph, graph.tangents, room, time_limit_s=self._limit_s)
                if schedule is None:  # rules find none; the solve before the first step has
                    schedule = graph.schedule
                if simulate(graph.captured.graph, schedule).peak_bytes > room:
                    raise self._build_infeasible_error(graph, room, found)
                found[graph], kept[graph] = schedule, count_kept_bytes(graph.captured.graph, schedule)
        unplanned_bytes = self._compute_peak_of_unplanned(kept)
        excess_bytes = unplanned_bytes - self._whole
        runs = [run for _, seen in self._steps for run in seen]
        if excess_bytes > 0 and (left_out_bytes := shrink_left_out(runs, excess_bytes)):
            warn_caller(
                f"code of the model that Dynamo leaves out takes about {format_bytes(left_out_bytes)}, and steps exceed the "
                f"budget of {format_bytes(self._whole)} by about {format_bytes(excess_bytes)}, though the planned graphs keep as "
                "little as they can. TORCH_LOGS=graph_breaks names the lines: rewrite them, raise the budget, or train in a "
                "block of planner.rematerialize(budget=...), which needs no graph"
            )
            unplanned_bytes = self._compute_peak_of_unplanned(kept)
        if unplanned_bytes > self._whole:
            raise InfeasibleError(
                f"budget {format_bytes(self._whole)} is too small: a graph that runs without a plan takes "
                f"{format_bytes(unplanned_bytes)} with the memory that the planned graphs keep at least. Raise the budget, or "
                "lower the batch size"
            )
        for graph, schedule in found.items():
            if simulate(graph.captured.graph, schedule).peak_bytes > self._compute_room(graph, kept):
                raise self._build_infeasible_error(graph, self._compute_room(graph, kept), found)
        return found

    def _find_fitting(self, kept: Mapping[PlannedGraph, int]) -> dict[PlannedGraph, Schedule] | None:
        """Return schedules that keep no more than `kept`; None if none are found."""
        if self._compute_peak_of_unplanned(kept) > self._whole:
            return None
        found = {}
        for graph in self._graphs:
            captured, room = remove_options(graph.captured.graph), self._compute_room(graph, kept)
            roomy = add_rest(captured, graph.tangents, self._compute_rest(graph, room, kept))
            schedule: Schedule | None = keep_everything(roomy.graph)
            if schedule is not None and simulate(roomy.graph, schedule).peak_bytes > room:
                schedule = find_least_evicting_schedule(roomy.graph, WallClock(min(_WITNESS_S, self._limit_s)))
            if schedule is None or simulate(roomy.graph, schedule).peak_bytes > room:
                return None
            found[graph] = roomy.map_back(schedule)
        return found

    def _compute_room(self, graph: PlannedGraph, kept: Mapping[PlannedGraph, int]) -> int:
        """Return the bytes available to `graph` in all its runs, given the bytes that the other graphs keep."""
        return self._whole - max(
            compute_bytes_of_others(seen, i, [kept[other] for other in order])
            for order, seen in self._steps
            for i, each in enumerate(order)
            if each is graph
        )

    def _compute_peak_of_unplanned(self, kept: Mapping[PlannedGraph, int]) -> int:
        return max(compute_peak_of_unplanned(seen, [kept[graph] for graph in order]) for order, seen in self._steps)

    def _compute_rest(self, graph: PlannedGraph, room: int, kept: Mapping[PlannedGraph, int]) -> int:
        """Return the part of `room` for the rest of the step after `graph`."""
        if not any(graph in order[:-1] or (graph in order and seen[-1].followed_by) for order, seen in self._steps):
            return 0
        return max(0, room - graph.captured.graph.static_bytes - kept[graph])

    def _build_infeasible_error(self, graph: PlannedGraph, room: int, found: Mapping[PlannedGraph, Schedule]) -> InfeasibleError:
        order = self._list_orders_with(graph)[0]
        others = [other for other in order if other in found and other is not graph]
        kept_bytes = sum(count_kept_bytes(other.captured.graph, found[other]) for other in others)
        keeping = f" (they keep {format_bytes(kept_bytes)} between the passes)" if kept_bytes else ""
        graphs = "graph of the model"
        if len(order) > 1:
            left = f"the others leave {format_bytes(max(0, room))} to graph {order.index(graph) + 1}{keeping}"
            graphs = f"{len(order)} graphs that the model is captured as: {left}"
        return InfeasibleError(
            f"budget {format_bytes(self._whole)} is too small for the {graphs}, and no schedule was found for it."
            f"{self._describe_known()} Raise the budget, lower the batch size, or remove graph breaks (TORCH_LOGS=graph_breaks "
            "shows them)"
        )

    def _describe_known(self) -> str:
        """Return a sentence with the budget that the schedules of least peak need, and its share of what eager PyTorch takes."""
        least = {each: find_least_schedule(each.captured.graph, each.tangents)[1] for each in self._graphs}
        eager = {each: build_keep_everything(each.captured.graph) for each in self._graphs}
        known_bytes, eager_bytes = map(self._compute_peak_bytes_by, (least, eager))
        share = f", {math.ceil(100 * known_bytes / eager_bytes)}% of what eager PyTorch takes" if eager_bytes else ""
        return f" Schedules are known for {format_enough(known_bytes)}{share}." if known_bytes > self._whole else ""

"""Plans and runs as text and as plain data.

One list of lines and one dict for each, which the commands, notebooks and logs share: five rooms had words of their own for a
plan before, with other units. Predicted and measured values stand in lines of their own, since only some of them are known for a
plan that has not run. A budget is given as a share of eager PyTorch's memory only where that says something.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from planner.capture.options import needs
from planner.graphs.escape import escape_text
from planner.graphs.ir import Op
from planner.graphs.optimizers import MeasuredOptimizer
from planner.graphs.pools import HOST, Pool
from planner.graphs.provenance import Provenance
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.plans.eager import describe_slower
from planner.plans.plan import Plan
from planner.plans.record import GraphSummary
from planner.plans.select_attributes import select_attributes
from planner.settings.counted_memory import CountedMemory
from planner.settings.link import MEASURED_LINK, get_measured_link
from planner.settings.option_settings import read_recorded_link, read_recorded_options
from planner.settings.other_devices import DEVICES_KEY, decode_devices
from planner.show.views.text import format_aligned, format_table
from planner.solvers.result import SolveSettings

if TYPE_CHECKING:
    from planner.measure.run_plan import RunReport
    from planner.show.facts.streams import IdleTime

_MANY = 10  # times eager PyTorch's memory, from which a budget is not given as a percentage of it


def plan_data(plan: Plan) -> dict[str, object]:
    """Return the facts about a plan that ``planner solve`` and ``planner info`` print, as plain data."""
    return {
        "holds": "plan",
        "status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "memory": str(plan.memory),
        "predicted_peak_bytes": plan.peak_bytes,
        "reserved": None if plan.reserved is None else asdict(plan.reserved),
        **select_attributes(plan, "measured_peak_bytes", "arena_bytes", "outside_arena_bytes"),
        "predicted_time_s": plan.time_s,
        "predicted_step_s": plan.step_s,
        "predicted_ratio": 1 + plan.overhead,
        "overhead": plan.overhead,
        "eager": None
        if plan.eager is None
        else {**asdict(plan.eager), "identical": plan.eager.identical, "overhead": plan.eager.overhead},
        **select_attributes(plan, "bound_s", "gap", "solver", "seconds", "ended", "ending"),
        "settings": dict(plan.settings),
        "versions": dict(plan.versions),
        "steps": len(plan.schedule.steps),
        **select_attributes(plan, "recomputed", "copied"),
        "pool_peaks_bytes": dict(plan.pool_peaks_bytes),
        "differs": list(plan.differs),
        "gradient_error": plan.gradient_error,
        "graph": build_summary_data(plan.graph),
    }


def plan_text(plan: Plan) -> str:
    """Return the text that ``planner solve`` prints about a plan: budget, predictions, bound, gap and status."""
    eager, counted = plan.eager_bytes, "" if plan.memory is CountedMemory.ALLOCATED else f" {plan.memory}"
    needs = "needs" if plan.memory is CountedMemory.ALLOCATED else "reserves"
    share = plan.budget_bytes / eager if eager else 0.0
    of_eager = f"{format_ratio(share)} of" if share < _MANY else f"over {_MANY:.0f} times"
    said = f", {of_eager} the {format_bytes(eager)} that eager PyTorch {needs}" if eager else ""
    time_s, ratio = format_seconds(plan.predicted_s), f"{1 + plan.overhead:.4f}"
    ending = f": {plan.ending}" if plan.ending else ""
    lines = [
        ("budget", f"{format_bytes(plan.budget_bytes)}{counted}{said}"),
        *_describe_price(plan.settings),
        ("predicted peak", format_bytes(plan.peak_bytes)),
        *(() if plan.reserved is None else plan.reserved.list_lines()),
        *(() if plan.measured_peak_bytes is None else [("measured peak", format_bytes(plan.measured_peak_bytes))]),
        *([("arena", plan.arena.removeprefix("arena: "))] if plan.arena else []),
        *([("no arena", plan.no_arena.removeprefix("no arena: "))] if plan.no_arena else []),
        ("predicted step time", f"{time_s}, {ratio} times that of keeping everything"),
        *([("host-bound", plan.host_bound)] if plan.host_bound else []),
        *_describe_eager_ops(plan),
        *((f"{escape_text(pool)} memory", format_bytes(peak)) for pool, peak in plan.pool_peaks_bytes.items()),
        *(() if (link := read_recorded_link(plan.settings)) is None else [("link", str(link))]),
        *(("may differ", escape_text(what)) for what in plan.differs),
        *([("lossy", escape_text(plan.lossy))] if plan.lossy else []),
        ("overhead", f"{100 * plan.overhead:z.2f}%, {plan.recomputed:,} ops recomputed{_format_copied(plan)}"),
        (
            "bound",
            "unknown" if plan.step_bound_s is None else f"{format_seconds(plan.step_bound_s)}: {_bound_of(plan)}",
        ),
        ("gap", "unknown" if plan.gap is None else f"{format_ratio(plan.gap)}{_format_tolerance(plan)}"),
        ("status", f"{plan.status}, by {escape_text(plan.solver)} in {plan.seconds:.2f} s{ending}"),
    ]
    return format_aligned(lines)


def _format_copied(plan: Plan) -> str:
    if not plan.copied:
        return ""
    if not all(needs((name,)) for name in read_recorded_options(plan.settings)):
        return f", {plan.copied:,} optional ops"
    return f", {plan.copied:,} copies{'' if plan.pool_peaks_bytes.keys() <= {HOST} else ' and ops on other devices'}"


def _describe_price(settings: SolveSettings) -> list[tuple[str, str]]:
    """Return the line on the overhead that the budget was derived from; empty if the budget itself was given."""
    overhead, proved_bytes = settings.max_overhead, settings.least_budget_proved_bytes
    if overhead is None or proved_bytes is None:
        return []
    return [("at max overhead", f"{format_ratio(overhead)}: proved to need no less than {format_bytes(proved_bytes)}")]


def _format_tolerance(plan: Plan) -> str:
    """Return the tolerance of the solve as text; "" if the settings do not contain it."""
    tolerance = plan.settings.tolerance
    return f", tolerance {100 * tolerance:g}%" if tolerance is not None else ""


def _describe_eager_ops(plan: Plan) -> list[tuple[str, str]]:
    if plan.eager is None:
        return []
    measured = [("measured", plan.eager.slowdown)] if plan.eager.slowdown else []
    return [*measured, (f"beside {plan.eager.reference}", escape_text(plan.eager))]


def plan_info_text(plan: Plan) -> str:
    """Return the text that ``planner info`` prints about a plan, its graph and its settings."""
    lines = [
        *list_provenance(plan.graph.provenance),
        ("graph", f"{plan.graph.ops:,} ops, {plan.graph.tensors:,} tensors, fingerprint {escape_text(plan.graph.fingerprint)}"),
        ("steps", f"{len(plan.schedule.steps):,}"),
        *(
            (escape_text(name), escape_text(value))
            for name, value in (*_list_plain_settings(plan.settings), *plan.versions.items())
        ),
    ]
    return f"{plan_text(plan)}\n\n{format_aligned(lines)}"


def _list_plain_settings(settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the settings for people to read, without nested parameters of the solver and its windows."""
    hidden = (DEVICES_KEY, "windows")
    return [(name, value) for name, value in settings.items() if not isinstance(value, Mapping) and name not in hidden]


def run_data(report: "RunReport") -> dict[str, object]:
    """Return the predictions and measurements of a run as plain data, as ``planner run`` prints them; without the timeline."""
    return {
        **select_attributes(
            report, "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "arena_bytes", "outside_arena_bytes"
        ),
        **select_attributes(report, "needed_bytes", "predicted_reserved_bytes", "reserved_bytes", "library_bytes"),
        **select_attributes(report, "predicted_host_bytes", "measured_host_bytes"),
        "predicted_pools_bytes": dict(report.predicted_pools_bytes),
        "measured_pools_bytes": dict(report.measured_pools_bytes),
        **select_attributes(report, "predicted_time_s", "measured_time_s", "predicted_ratio", "measured_ratio", "eager_ratio"),
        **select_attributes(report, "overhead", "spread", "identical"),
        "differences": None if report.differences is None else list(report.differences),
        "eager_differences": None if report.eager_differences is None else list(report.eager_differences),
        "differs": list(report.differs),
        **select_attributes(report, "predicted_gradient_error", "measured_gradient_error", "eager_error", "not_compared"),
    }


def run_text(report: "RunReport") -> str:
    """Return the text that ``planner run`` prints: a table of predictions and measurements, and how results compare."""
    rows = [
        ("peak memory", format_bytes(report.predicted_peak_bytes), format_bytes(report.measured_peak_bytes)),
        ("step time", format_seconds(report.predicted_time_s), format_seconds(report.measured_time_s)),
        ("times keeping everything", f"{report.predicted_ratio:.4f}", _format_ratio(report.measured_ratio)),
    ]
    if report.predicted_host_bytes is not None and report.measured_host_bytes is not None:
        rows.insert(1, ("host memory", format_bytes(report.predicted_host_bytes), format_bytes(report.measured_host_bytes)))
    if report.predicted_reserved_bytes is not None and report.reserved_bytes is not None:
        predicted, measured = format_bytes(report.predicted_reserved_bytes), format_bytes(report.reserved_bytes)
        rows.insert(1, ("reserved memory", predicted, measured))
    for pool, peak in report.predicted_pools_bytes.items():
        rows.insert(1, (f"{pool} memory", format_bytes(peak), format_bytes(report.measured_pools_bytes[pool])))
    if report.predicted_gradient_error is not None and report.measured_gradient_error is not None:
        rows.append(("gradient error", f"{report.predicted_gradient_error:.2e}", f"{report.measured_gradient_error:.2e}"))
    within = "within" if report.needed_bytes <= report.budget_bytes else "OVER"
    libraries = f"{format_bytes(report.library_bytes)} of workspaces that libraries keep are not in it"
    beside = f"; {libraries}" if report.library_bytes else ""
    return "\n".join(
        (
            format_table(("", "predicted", "measured"), rows, numbers=3),
            f"measured peak: {within} the budget of {format_bytes(report.budget_bytes)}{beside}",
            *_describe_arena(report),
            *_describe_times(report),
            *(f"may differ, as the plan says: {escape_text(what)}" for what in report.differs),
            *_describe_comparison("keeping everything", report.differences, allowed=bool(report.differs or report.is_exact)),
            *_describe_comparison("plain PyTorch", report.eager_differences, allowed=bool(report.differs or report.is_exact)),
            *_describe_repeated_eager_steps(report),
        )
    )


def _describe_arena(report: "RunReport") -> list[str]:
    if report.arena_bytes is None or report.outside_arena_bytes is None:
        return []
    return [f"arena: {format_bytes(report.arena_bytes)}, {format_bytes(report.outside_arena_bytes)} outside"]


def _format_ratio(measured: float | None) -> str:
    return "not run" if measured is None else f"{measured:.4f}"


def _describe_times(report: "RunReport") -> list[str]:
    if report.overhead is None or report.spread is None or report.eager_ratio is None:
        return [f"keeping everything and plain PyTorch: not run to compare with, {report.not_compared}"]
    planned, keeping = (describe_slower("plain PyTorch", over) for over in (report.overhead, 1 / report.eager_ratio - 1))
    return [f"planned step: {planned}, ±{100 * report.spread:.1f}%", f"keeping everything: {keeping}"]


def _describe_comparison(reference: str, differences: Sequence[str] | None, *, allowed: bool) -> list[str]:
    if differences is None:
        return []
    if not differences:
        return [f"loss, gradients, buffers and random state: identical to {reference}"]
    return [
        f"{'different' if allowed else 'DIFFERENT'} from {reference}:",
        *(f"  {escape_text(difference)}" for difference in differences),
    ]


def _describe_repeated_eager_steps(report: "RunReport") -> list[str]:
    if report.eager_error is None or report.measured_gradient_error is None:
        return []
    own, error = report.eager_error, report.measured_gradient_error
    line = f"plain PyTorch run twice differs from itself: gradient error {own:.1e}, and that of the plan is {error:.1e}"
    return [f"{line}. Under torch.use_deterministic_algorithms(True) bits can be compared"]


def _bound_of(plan: Plan) -> str:
    """Return for which schedules the bound holds; solvers that search a smaller class name it in their settings."""
    taken = escape_text(plan.settings.schedules or "each op first in program order")
    order = " as reordered" if plan.settings.reordered else ""
    return f"no schedule that fits, and takes {taken}{order}, is faster"


def build_summary_data(summary: GraphSummary) -> dict[str, object]:
    """Return the summary of a graph with its provenance last."""
    data = asdict(summary)
    del data["provenance"]
    return {**data, "provenance": dict(summary.provenance)}


def list_provenance(provenance: Provenance) -> list[tuple[str, str]]:
    """Return the provenance of a graph as names and values; raise a MismatchError if the link to the host in it is impossible."""
    return [(escape_text(name), escape_text(_format_provenance(provenance, name))) for name in provenance]


def _format_provenance(provenance: Provenance, name: str) -> str:
    value = provenance[name]
    if name == MEASURED_LINK:
        return str(get_measured_link(provenance))
    if name == "optimizer" and isinstance(measured := provenance.optimizer, MeasuredOptimizer):
        return measured.name
    if name == DEVICES_KEY:
        return "; ".join(map(str, decode_devices(provenance)))
    if name == "left_out":
        return f"{len(provenance.left_out)} optional ops that are neither faster nor smaller"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def format_name(name: str) -> str:
    """Return the name of a stream or pool for people, with spaces for underscores."""
    return escape_text(name).replace("_", " ")


def name_end_of_wait(wait: "IdleTime") -> str:
    """Return the name of the event that ends a wait."""
    match wait.following:
        case None:
            return "the end of the step"
        case Op(name=name):
            return name
        case tensor:
            return f"memory of {tensor.name} goes"


def format_capacity(pool: Pool) -> str:
    """Return the capacity of a pool as text."""
    return "without a limit" if pool.capacity_bytes is None else f"of {format_bytes(pool.capacity_bytes)}"

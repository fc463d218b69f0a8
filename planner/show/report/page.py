"""A plan as one self-contained HTML page: nothing is loaded from elsewhere.

One file without references, so that it can be sent and opened anywhere: scripts and data are inside. Names of ops and modules
come from users and are escaped.
"""

import math
import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from planner.graphs.errors import UsageError
from planner.graphs.escape import escape_text
from planner.graphs.io.files import check_writable, write_text
from planner.graphs.pools import COMPUTE
from planner.graphs.provenance import Times
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.plans.eager import EagerComparison
from planner.show.facts.addresses import compute_reserved_addresses
from planner.show.facts.step import StepFacts
from planner.show.facts.timeline import Burst, Execution, ModuleCost, PeakTensor, Timeline, get_module
from planner.show.report.chart import draw_charts
from planner.show.report.chrome_trace import build_chrome_trace
from planner.show.report.describe import list_provenance
from planner.show.report.other_streams import describe_other_streams, describe_travels

if TYPE_CHECKING:
    from planner.studies.curve import CurveRow

_LISTED = 15

Tile: TypeAlias = tuple[str, str, str]  # name, value, and a line in small type


def write_pages(
    timeline: Timeline,
    path: str | os.PathLike[str] | None,
    trace: str | os.PathLike[str] | None = None,
    curve: Sequence["CurveRow"] = (),
) -> None:
    """Write the page of `timeline` with the trade-off `curve` to `path`, and its Chrome trace to `trace`; None: not that one.

    Raises:
        OutputError: a file cannot be written.
        PlannerError: Bokeh is not installed.
        UsageError: both are None.
    """
    if path is None and trace is None:
        raise UsageError("nothing to write: name a page, 'report.html', or a trace, trace='trace.json'")
    for target, suffix in ((path, ".html"), (trace, ".json")):
        if target is not None:
            check_writable(target, suffix=suffix)
    if path is None:
        reserved = compute_reserved_addresses(timeline)
    else:
        facts = StepFacts.of(timeline)
        write_text(path, render_page(facts, curve))
        reserved = facts.reserved
    if trace is not None:
        write_text(trace, build_chrome_trace(timeline, reserved))


def render_page(facts: StepFacts, curve: Sequence["CurveRow"] = ()) -> str:
    """Return the whole page of a step, with the trade-off `curve` if there is one."""
    timeline = facts.timeline
    plan, graph, held = timeline.plan, timeline.graph, timeline.held
    drawn = draw_charts(facts, curve)
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    others, listed = describe_other_streams(timeline, _LISTED), held[:_LISTED]
    places = describe_travels(timeline, listed)
    elsewhere = [[where] for where in places] if any(places) else [[] for _ in listed]
    costs, bursts = timeline.module_costs, timeline.bursts
    dearest = max((cost.time_s for cost in costs[:1]), default=0.0) or 1e-12
    longest = sorted(sorted(bursts, key=lambda burst: -burst.time_s)[:_LISTED], key=lambda burst: burst.start_s)
    # Names come from files: they are escaped for HTML, and control characters are made visible.
    made = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True, finalize=_format_value)
    model = escape_text(graph.provenance.model or "a model")
    values = {
        "style": Markup(_read_resource("page.css")),
        "model": model,
        "peak": format_bytes(plan.peak_bytes),
        "whole": format_bytes(plan.graph.keep_everything_peak_bytes),
        "overhead": format_ratio(plan.overhead),
        "executions": sum(not execution.op.optional for execution in timeline.executions),
        "recomputations": sum(execution.again for execution in timeline.executions),
        "other_streams": others,
        "proof": _format_proof(plan.gap),
        "facts": [*_list_tiles(timeline), *((name, value, "") for name, value in others.facts)],
        "modelled_for": escape_text(graph.device or "a device") if _is_modelled(timeline) else "",
        "names": [root.name for root in drawn.document.roots],
        "keys": drawn.keys,
        "pools": drawn.pools,
        "addresses": drawn.addresses,
        "costs": [_build_cost_row(cost, dearest) for cost in costs[:_LISTED]],
        "costs_left_out": len(costs) - _LISTED,
        "bursts": [_build_burst_row(burst) for burst in longest],
        "bursts_in_all": len(bursts),
        **_collect_peak_values(timeline),
        "held": [[*_build_held_row(one), *where] for one, where in zip(listed, elsewhere, strict=True)],
        "travels": any(places),
        "held_in_all": len(held),
        "held_left_out": len(held) - _LISTED,
        "status": plan.status,
        "solver": plan.solver,
        "seconds": f"{plan.seconds:.2f}",
        "ending": plan.ending,
        "versions": ", ".join(f"{name} {version}" for name, version in plan.versions.items()),
        "provenance": ", ".join(f"{name} {value}" for name, value in list_provenance(graph.provenance)),
        "fingerprint": plan.graph.fingerprint,
    }
    template = made.from_string(_read_resource("page.html"))
    text: str = file_html(drawn.document, INLINE, f"Plan for {model}", template=template, template_variables=values)
    return text


def _list_tiles(timeline: Timeline) -> list[Tile]:
    plan = timeline.plan
    reserved = [] if plan.reserved_bytes is None else [f"{format_bytes(plan.reserved_bytes)} reserved"]
    measured = [] if plan.measured_peak_bytes is None else [f"{format_bytes(plan.measured_peak_bytes)} measured"]
    bound = "unknown" if plan.step_bound_s is None else f"+{format_ratio(_divide(plan.step_bound_s, plan.graph.predicted_s))}"
    gap = "unknown" if plan.gap is None else format_ratio(plan.gap)
    predicted = "modelled" if _is_modelled(timeline) else "predicted"
    return [
        (f"Budget, {plan.memory}", format_bytes(plan.budget_bytes), ""),
        ("Peak, predicted", format_bytes(plan.peak_bytes), ", ".join([*reserved, *measured])),
        ("Keep everything", format_bytes(plan.graph.keep_everything_peak_bytes), format_seconds(plan.graph.predicted_s)),
        (f"Step time, {predicted}", format_seconds(plan.predicted_s), plan.host_bound and f"host-bound: {plan.host_bound}"),
        (f"Overhead, {predicted}", f"+{format_ratio(plan.overhead)}", f"lower bound {bound}, gap {gap}"),
        *_build_eager_tile(plan.eager),
    ]


def _build_eager_tile(eager: EagerComparison | None) -> list[Tile]:
    """Return a tile for the comparison with eager PyTorch; differences are written in full."""
    if eager is None:
        return []
    if eager.failure or eager.overhead is None:
        return [(f"Beside {eager.reference}", str(eager), "")]
    bits = f"bits identical to {eager.reference}" if eager.identical else eager.describe_differences()
    return [("Measured", eager.slowdown, f"{bits}; its peak is {format_bytes(eager.peak_bytes)}")]


def _is_modelled(timeline: Timeline) -> bool:
    return timeline.graph.provenance.times is Times.MODELLED


def _format_proof(gap: float | None) -> str:
    if gap is None:
        return ""
    within = "" if gap < 5e-5 else f"more than {format_ratio(gap)} "
    return f" Proof: no schedule within the budget is {within}faster, if first executions keep this order."


def _collect_peak_values(timeline: Timeline) -> dict[str, object]:
    """Return the values of the template about the execution at the peak."""
    peak = timeline.peak
    return {
        "at_peak": format_bytes(peak.memory_bytes),
        "peak_at": format_seconds(timeline.reached_s[peak.step]),
        "peak_op": peak.op,
        "peak_runs": _choose_verb(peak),
        "static": format_bytes(timeline.graph.static_bytes),
        "in_tensors": format_bytes(math.fsum(one.tensor.size_bytes for one in timeline.held)),
        "workspace": format_bytes(peak.op.workspace_bytes if peak.op.stream == COMPUTE else 0),
    }


def _choose_verb(peak: Execution) -> str:
    """Return the verb for the execution at the peak: ops on other streams allocate memory when they are issued."""
    if peak.op.stream != COMPUTE:
        return "is issued"
    return "is recomputed" if peak.again else "runs"


def _build_cost_row(cost: ModuleCost, dearest: float) -> list[str]:
    share = f"{100 * cost.time_s / dearest:.1f}"
    times = format_seconds(cost.time_s), share
    return [
        cost.module or "outside modules",
        f"{cost.ops:,}",
        format_bytes(cost.saved_bytes),
        *times,
        _format_names(cost.targets),
    ]


def _build_burst_row(burst: Burst) -> list[str]:
    return [
        format_seconds(burst.start_s),
        format_seconds(burst.time_s),
        f"{burst.ops:,}",
        _format_names(name or "outside modules" for name in burst.modules),
        "" if burst.reader is None else burst.reader.name,
    ]


def _build_held_row(held: PeakTensor) -> list[str]:
    tensor = held.tensor
    return [
        format_bytes(tensor.size_bytes),
        tensor.name,
        f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]",
        get_module(held.op),
        format_seconds(held.since_s),
    ]


def _format_names(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others."""
    every = list(names)
    more = f" and {len(every) - 3} more" if len(every) > 3 else ""
    return ", ".join(every[:3]) + more


def _divide(time_s: float, base_s: float) -> float:
    return max(0.0, time_s / base_s - 1) if base_s else 0.0


def _format_value(value: object) -> object:
    return value if isinstance(value, Markup) else escape_text(value)


def _read_resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

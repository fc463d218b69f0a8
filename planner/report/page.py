"""A plan as one self-contained HTML page: no scripts, nothing loaded from elsewhere."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from graphs.eager import EagerComparison
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.report.chart import figure
from planner.report.timeline import Burst, Held, ModuleCost, Timeline
from planner.visible import visible

_LISTED = 15


def page(timeline: Timeline) -> str:
    """The whole page."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    model = _text(timeline.graph.provenance.get("model", "a model"))
    heading = model.replace(",", ",<wbr>")  # the options of a model are one long word
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Plan for {model}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<h1>Plan for {heading}</h1>\n"
        f"{_summary(timeline)}\n{_memory(timeline)}\n{_recomputation(timeline)}\n{_peak(timeline)}\n{_footer(timeline)}\n"
        "</body>\n</html>\n"
    )


def _summary(timeline: Timeline) -> str:
    plan, executed = timeline.plan, len(timeline.executions)
    peak, whole = format_bytes(plan.peak_bytes), format_bytes(plan.graph.store_all_peak_bytes)
    bound = "unknown" if plan.bound_s is None else f"+{format_ratio(_over(plan.bound_s, plan.graph.time_s))}"
    facts = [
        ("Budget", format_bytes(plan.budget_bytes)),
        ("Peak, predicted", peak),
        *([] if plan.measured_peak_bytes is None else [("Peak, measured", format_bytes(plan.measured_peak_bytes))]),
        ("Keeping everything", whole),
        ("Step time", format_seconds(plan.time_s)),
        ("Overhead", f"+{format_ratio(plan.overhead)}"),
        *_beside_eager(plan.eager),
        ("Least possible", bound),
        ("Gap", "unknown" if plan.gap is None else format_ratio(plan.gap)),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    within = "" if plan.gap is None or plan.gap < 5e-5 else f"more than {format_ratio(plan.gap)} "
    proof = "" if plan.gap is None else f" No schedule of its kind that fits is {within}faster."
    return (
        f"<p>The step takes {peak} instead of {whole}, and {format_ratio(plan.overhead)} more time: "
        f"{executed - len(timeline.graph.ops):,} of {executed:,} executions are repetitions.{proof}</p>"
        f"<dl>{tiles}</dl>"
    )


def _beside_eager(eager: EagerComparison | None) -> list[tuple[str, str]]:
    """Tiles for what was measured; what differs is said in full, for it is what matters most."""
    if eager is None:
        return []
    if eager.failure or eager.overhead is None:
        return [("Beside eager", str(eager))]
    return [
        ("Over eager, measured", f"{100 * eager.overhead:+.1f}%"),
        ("Eager's peak", format_bytes(eager.peak_bytes)),
        ("Bits", "identical to eager" if eager.identical else eager.what_differs()),
    ]


def _memory(timeline: Timeline) -> str:
    key = [("memory", "in use"), ("static", "throughout: parameters, inputs, states"), ("budget", "budget")]
    key += [("again", "computing again"), ("backward", "backward pass")]
    entries = "".join(f'<li><i style="background:var(--{name})"></i>{text}</li>' for name, text in key)
    return f'<h2>Memory over the step</h2>{figure(timeline)}<ul class="key">{entries}</ul>'


def _recomputation(timeline: Timeline) -> str:
    costs, bursts = timeline.module_costs, timeline.bursts
    if not costs:
        return "<h2>What is computed again</h2><p>Nothing: all that is needed stays in memory.</p>"
    dearest = max(costs[0].time_s, 1e-12)
    longest = sorted(sorted(bursts, key=lambda burst: -burst.time_s)[:_LISTED], key=lambda burst: burst.start_s)
    return (
        "<h2>What is computed again, by module</h2>"
        + _table(
            ["module", "*ops", "*time", "", ">mostly"],
            (_cost_row(cost, dearest) for cost in costs[:_LISTED]),
            left_out=len(costs) - _LISTED,
        )
        + f"<h2>When</h2><p class='soft'>The longest of {len(bursts):,} times, in order of the step.</p>"
        + _table(["*at", "*takes", "*ops", "of", ">needed for"], (_burst_row(burst) for burst in longest), left_out=0)
    )


def _cost_row(cost: ModuleCost, dearest: float) -> list[str]:
    bar = f'<span style="width:{100 * cost.time_s / dearest:.1f}%"></span>'
    return [_text(cost.module or "outside modules"), f"{cost.ops:,}", format_seconds(cost.time_s), bar, _listed(cost.targets)]


def _burst_row(burst: Burst) -> list[str]:
    reader = "" if burst.reader is None else burst.reader.name
    return [
        format_seconds(burst.start_s),
        format_seconds(burst.time_s),
        f"{burst.ops:,}",
        _listed(name or "outside modules" for name in burst.modules),
        _text(reader),
    ]


def _peak(timeline: Timeline) -> str:
    peak, held = timeline.peak, timeline.held
    op = peak.op
    return (
        f"<h2>At the peak</h2><p>{format_bytes(peak.memory_bytes)} at {format_seconds(peak.start_s)}, while "
        f"<b>{_text(op.name)}</b> {'is computed again' if peak.again else 'runs'}: {format_bytes(timeline.graph.static_bytes)} "
        f"throughout, {format_bytes(math.fsum(one.tensor.size_bytes for one in held))} in {len(held):,} tensors of the step, "
        f"{format_bytes(op.workspace_bytes)} of workspace. The largest tensors:</p>"
        + _table(["*size", "tensor", ">shape", "made in", "*since"], map(_held_row, held[:_LISTED]), left_out=len(held) - _LISTED)
    )


def _held_row(held: Held) -> list[str]:
    tensor = held.tensor
    shape = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    return [
        format_bytes(tensor.size_bytes),
        _text(tensor.name),
        _text(shape),
        _text(held.op.module.removeprefix("model.") or held.op.target),
        format_seconds(held.since_s),
    ]


def _footer(timeline: Timeline) -> str:
    plan = timeline.plan
    provenance = ", ".join(f"{name} {visible(value)}" for name, value in timeline.graph.provenance.items())
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return (
        f"<footer><p>{_text(plan.status)}, by {_text(plan.solver)} in {plan.seconds:.2f} s ({_text(versions)}). "
        f"{_text(provenance)}. Graph {_text(plan.graph.fingerprint)}.</p></footer>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left_out: int) -> str:
    """A table of cells that are HTML already; a header with ``*`` is of numbers, one with ``>`` for wide pages only."""
    kinds = ["number" if h.startswith("*") else "wide" if h.startswith(">") else "" if h else "share" for h in header]
    head = "".join(f'<th class="{kind}">{h.strip("*>")}</th>' for kind, h in zip(kinds, header, strict=True))
    cells = ([f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)] for row in rows)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    more = f'<p class="soft">{left_out:,} more are not shown.</p>' if left_out > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _listed(names: Iterable[str]) -> str:
    """The first three, and how many more."""
    every = list(names)
    more = f" and {len(every) - 3} more" if len(every) > 3 else ""
    return _text(", ".join(every[:3]) + more)


def _over(time_s: float, base_s: float) -> float:
    return max(0.0, time_s / base_s - 1) if base_s else 0.0


def _text(value: object) -> str:
    """`value` as HTML that shows it."""
    return escape(visible(value))

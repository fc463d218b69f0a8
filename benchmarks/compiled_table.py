"""The tables of ``make bench-compiled``, as a pure function of its rows."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks.compiled_rows import ATEN, OURS, REFERENCE, Row
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.report.tables import as_markdown

# What a plan over Inductor's kernels is to reach.
_MISPREDICTED = 0.01  # of the measured peak
_SLOWER = 0.02  # at the reference's peak, of its time

_METHODS = {OURS: "Inductor's kernels", ATEN: "ATen's ops"}
_CAPTION = """\
Step times as multiples of `torch.compile`'s, medians of those in the same turns. Budgets are shares of its measured peak; what is
infeasible says which share is known to do. Behind a time: how Inductor compiled the kernels, where not as `torch.compile` does;
and how loss and gradients compare, where not identical, with eager PyTorch's for ATen's ops, else with `torch.compile`'s.
"""
_PEAKS_CAPTION = """\
Each setting of `activation_memory_budget`, and the plan over Inductor's kernels within what it was measured to take.
"""


def table(rows: Sequence[Row]) -> str:
    """What is reached in all, each method at each budget, and plans within the peaks of PyTorch's Memory Budget API."""
    models = list(dict.fromkeys(row.model for row in rows))
    return "\n".join(
        (
            "\n".join(f"- {line}" for line in summary(rows)) + "\n",
            "## Plans at shares of torch.compile's peak\n",
            _CAPTION,
            as_markdown(list(_budgets(rows, models))),
            "## At the Memory Budget API's own peaks\n",
            _PEAKS_CAPTION,
            as_markdown(list(_peaks(rows))),
        )
    )


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What plans over Inductor's kernels reach in all, and what each misses."""
    ours = [row for row in rows if row.method == OURS and row.measured_peak_bytes is not None]
    counted = f"of {len(ours)} plans over Inductor's kernels"
    over = [row for row in ours if (row.measured_peak_bytes or 0) > (row.budget_bytes or 0)]
    yield f"{counted}, {len(over)} take more than their budget{_named(over)}"
    errors = {row: row.misprediction or 0.0 for row in ours}
    far = [row for row, error in errors.items() if error > _MISPREDICTED]
    exact = sum(error == 0 for error in errors.values())
    yield (
        f"{counted}, {len(ours) - len(far)} have a measured peak within {_MISPREDICTED:.0%} of the predicted one, {exact} to the "
        f"byte{_named(far)}"
    )
    other = [row for row in ours if row.bits != "identical"]
    yield f"{counted}, {len(ours) - len(other)} have the loss and gradients of torch.compile to the last bit{_named(other)}"
    whole = [row for row in ours if row.budget == "100%" and row.ratio is not None]
    slow = [row for row in whole if (row.ratio or 0.0) > 1 + _SLOWER]
    yield f"at torch.compile's own peak: {_spread(row.ratio for row in whole)} of its time{_named(slow)}"
    peers = [row for row in ours if row.peer_ratio is not None]
    slow = [row for row in peers if (row.peer_ratio or 0.0) > 1]
    yield f"at the Memory Budget API's peaks: {_spread(row.peer_ratio for row in peers)} of its time{_named(slow)}"
    none = [row for row in rows if row.method == OURS and row.peer and row.measured_peak_bytes is None]
    yield f"at the Memory Budget API's peaks: {len(none)} without a plan{_named(none)}"
    baselines = [row for row in rows if row.method.startswith("memory-budget")]
    wrong = [row for row in baselines if row.bits == "wrong" or row.error]
    yield f"of {len(baselines)} runs of the Memory Budget API, {len(wrong)} fail or compute other gradients{_named(wrong)}"


def _spread(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"median {median(known):.3f}x, worst {max(known):.3f}x" if known else "nothing measured"


def _named(rows: Sequence[Row]) -> str:
    named = (f"{row.model} {row.budget or row.method}" for row in rows)
    return f" ({', '.join(named)})" if rows else ""


def _budgets(rows: Sequence[Row], models: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A line for each model and method, with a cell for each budget."""
    budgets = list(dict.fromkeys(row.budget for row in rows if row.budget and not row.peer))
    yield ("model", "torch.compile", "kernels", *budgets)
    for model in models:
        own = [row for row in rows if row.model == model]
        reference = next(row for row in own if row.method == REFERENCE)
        taken = _taken(reference) if reference.time_s is not None else reference.error
        for method, name in _METHODS.items():
            found = {row.budget: row for row in own if row.method == method}
            if found:
                yield (model, taken, name, *(_cell(found[b], reference) if b in found else "" for b in budgets))
        if not any(row.method in _METHODS for row in own):
            yield (model, taken, "none", *("" for _ in budgets))


def _taken(row: Row) -> str:
    return f"{format_seconds(row.time_s or 0.0)}, {format_bytes(row.measured_peak_bytes or 0)}"


def _cell(row: Row, reference: Row) -> str:
    if row.ratio is None:
        if row.least_bytes is None:
            return row.error
        return f"infeasible, needs {row.least_bytes / (reference.measured_peak_bytes or 1):.1%}"
    kernels = f" {row.variant}" if row.variant not in ("", "default") else ""
    return f"{row.ratio:.3f}x{kernels}{'' if row.bits == 'identical' else f' ({row.bits})'}"


def _peaks(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A line for each setting of the Memory Budget API that ran, or did not."""
    yield (
        "model",
        "setting",
        "peak",
        "of torch.compile's",
        "time",
        "gradients",
        "plan's time",
        "plan over it",
        "gap",
        "planned in",
        "of it compiled in",
    )
    reference = {row.model: row for row in rows if row.method == REFERENCE}
    plans = {(row.model, row.peer): row for row in rows if row.method == OURS and row.peer}
    for row in rows:
        if row.method.startswith("memory-budget"):
            yield (row.model, row.method.split()[1], *_beside(row, reference[row.model], plans.get((row.model, row.method))))


def _beside(row: Row, reference: Row, plan: Row | None) -> Iterator[str]:
    if row.ratio is None or row.measured_peak_bytes is None or plan is None:
        yield from (row.error, *[""] * 8)
        return
    yield format_bytes(row.measured_peak_bytes)
    yield f"{row.measured_peak_bytes / (reference.measured_peak_bytes or 1):.1%}"
    yield f"{row.ratio:.3f}x"
    yield row.bits
    yield _cell(plan, reference)
    yield "" if plan.peer_ratio is None else f"{plan.peer_ratio:.3f}x"
    yield "" if plan.gap is None else format_ratio(plan.gap)
    yield "" if plan.plan_s is None else f"{plan.plan_s:.0f} s"
    yield "" if plan.compile_s is None else f"{plan.compile_s:.0f} s"

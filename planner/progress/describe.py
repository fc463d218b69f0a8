"""Progress and plans as single lines of text."""

from graphs.units import format_bytes, format_ratio
from planner.plans.eager import slower_than
from planner.plans.plan import Plan
from planner.progress.stages import Progress, Stage


def describe(progress: Progress) -> str:
    """Return the current activity in one line; schedules are shown as overhead over keeping everything."""
    parts = [progress.activity]
    if progress.stage is Stage.SOLVE and progress.base_s is not None:
        parts.append("best so far " + ("none yet" if progress.best_s is None else _overhead(progress.best_s, progress.base_s)))
        if progress.bound_s is not None:
            parts.append(f"bound {_overhead(progress.bound_s, progress.base_s)}")
        if progress.gap is not None:
            parts.append(f"gap {format_ratio(progress.gap)}")
    elif progress.fraction is not None:
        parts.append(f"{100 * progress.fraction:.0f}%")
    if progress.left_s is not None and progress.left_s >= 1:
        parts.append(f"about {progress.left_s:.0f} s left")
    return ", ".join(parts)


def plan_line(plan: Plan) -> str:
    """Return the memory and the overhead of a plan, in one line."""
    return saved_line(plan.peak_bytes, plan.graph.keep_everything_peak_bytes, plan.overhead, plan.gap)


def saved_line(peak_bytes: int, keep_everything_peak_bytes: int, overhead: float, gap: float | None) -> str:
    """Return the memory and the overhead of a schedule against keeping everything, in one line; `gap` is None without a bound."""
    if gap is None:
        proof = ""
    elif gap < 5e-5:
        proof = " (proved optimal)"
    else:
        proof = f" (proved within {100 * gap:.2g}%)"
    memory = f"{format_bytes(peak_bytes)} of {format_bytes(keep_everything_peak_bytes)}"
    return f"planned: {memory}, predicted {slower_than('keeping everything', overhead)}{proof}"


def _overhead(time_s: float, base_s: float | None) -> str:
    return f"{100 * (time_s / base_s - 1):+z.2f}%" if base_s else f"{time_s:.4g} s"

"""A plan as one line of text."""

from graphs.units import format_bytes
from planner.plans.eager import describe_slower
from planner.plans.plan import Plan


def plan_line(plan: Plan) -> str:
    """Return the memory and the overhead of a plan, in one line."""
    return describe_saved(plan.peak_bytes, plan.graph.keep_everything_peak_bytes, plan.overhead, plan.gap)


def describe_saved(peak_bytes: int, keep_everything_peak_bytes: int, overhead: float, gap: float | None) -> str:
    """Return the memory and the overhead of a schedule against keeping everything, in one line; `gap` is None without a bound."""
    if gap is None:
        proof = ""
    elif gap < 5e-5:
        proof = " (proved optimal)"
    else:
        proof = f" (proved within {100 * gap:{'.2g' if gap < 0.99 else '.0f'}}%)"
    memory = f"{format_bytes(peak_bytes)} of {format_bytes(keep_everything_peak_bytes)}"
    return f"planned: {memory}, predicted {describe_slower('keeping everything', overhead)}{proof}"

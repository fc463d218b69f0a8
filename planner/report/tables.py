"""Result tables: predicted and measured values as text."""

from typing import TYPE_CHECKING

from graphs.units import format_bytes, format_ratio, format_seconds
from planner.plans.plan import Plan

if TYPE_CHECKING:
    from planner.running import RunReport

COLUMNS = (
    "budget",
    "of peak",
    "predicted peak",
    "measured peak",
    "predicted time",
    "measured time",
    "predicted",
    "measured",
    "bound",
    "gap",
    "identical",
)


def kept(report: "RunReport") -> bool:
    """Return whether the run stayed within its budget and, if results were compared, matched them bit by bit."""
    return report.needed_bytes <= report.budget_bytes and report.is_exact is not False


def run_row(plan: Plan, report: "RunReport") -> tuple[str, ...]:
    """Return the cells of COLUMNS for one run: times in seconds, then as multiples of keeping everything."""
    return (
        format_bytes(report.budget_bytes),
        f"{100 * report.budget_bytes / plan.eager_bytes:.0f}%",
        format_bytes(report.predicted_peak_bytes),
        format_bytes(report.measured_peak_bytes),
        format_seconds(report.predicted_time_s),
        format_seconds(report.measured_time_s),
        f"{report.predicted_ratio:.3f}x",
        "not run" if report.measured_ratio is None else f"{report.measured_ratio:.3f}x",
        "none" if plan.bound_s is None else f"{plan.bound_s / plan.graph.time_s:.3f}x",
        "none" if plan.gap is None else format_ratio(plan.gap),
        _identical(report),
    )


def _identical(report: "RunReport") -> str:
    if report.identical is None:
        return "not compared"
    return "yes" if not report.eager_differences else "to keeping all" if report.identical else "NO"

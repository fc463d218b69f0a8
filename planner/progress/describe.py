"""Progress as one line of text."""

from planner.graphs.units import format_ratio
from planner.progress.stages import Event, Progress, Stage


def describe(progress: Progress) -> str:
    """Return the current activity in one line; schedules are shown as overhead over keeping everything."""
    parts = [progress.activity]
    if progress.stage is Stage.SOLVE and progress.base_s is not None:
        parts.append(
            "best so far " + ("none yet" if progress.best_s is None else _format_overhead(progress.best_s, progress.base_s))
        )
        if progress.bound_s is not None:
            parts.append(f"bound {_format_overhead(progress.bound_s, progress.base_s)}")
        if progress.gap is not None:
            parts.append(f"gap {format_ratio(progress.gap)}")
    elif progress.fraction is not None and progress.event != Event.END:  # what is left belongs to the next stages
        parts.append(f"{100 * progress.fraction:.0f}%")
    if progress.left_s is not None and progress.left_s >= 1:
        parts.append(f"about {progress.left_s:.0f} s left")
    return ", ".join(parts)


def _format_overhead(time_s: float, base_s: float | None) -> str:
    return f"{100 * (time_s / base_s - 1):+z.2f}%" if base_s else f"{time_s:.4g} s"

"""The tables of ``make bench-first-step``: a pure function of its rows."""

from collections.abc import Callable, Sequence

from benchmarks.first_step_rows import OUT_OF_MEMORY, RAN, RSS_TOLERANCE, START_S, Row, Trained, by_model
from graphs.units import format_bytes, format_ratio, format_seconds
from planner.report.tables import as_markdown

_CHECKS = (
    "model",
    "eager's peak",
    "budget",
    "trained",
    "bits equal",
    "highest RSS, training",
    "allowed",
    "check",
    "capture",
    "first step ends",
    "allowed",
    "check",
)
_TRAINING = (
    "model",
    "VmData may grow by",
    "grows in eager",
    "eager, no cap",
    "planned",
    "planned, large pages",
    "first plan (gap)",
    "last plan (gap)",
    "measured peak",
    "plans swapped in",
    "eager, capped",
    "checkpointing, capped",
)
_RSS = (
    "model",
    "library of the model",
    "before planning",
    "highest, planning",
    "highest, training",
    "with large pages",
    "eager, no cap",
    "eager, capped",
    "checkpointing, capped",
)
_NONE = "-"


def table(rows: Sequence[Row]) -> str:
    """Return what was checked, how each model trained, and what its processes took, with the method and what it was made with."""
    models = by_model(rows)
    if not models:
        return "No model has all of its rows.\n"
    some = models[0].planned
    method = (
        f"Each model is trained for {some.steps} steps of SGD, in a process of its own for each way, with one thread. The "
        "budget is a share of the peak of eager PyTorch's step. Under the cap (RLIMIT_DATA) VmData may grow, from where it is "
        "with model and batches in memory, by half the sum of what the budget leaves for the step (the budget without "
        "parameters, buffers and batch) and what VmData grows by in eager training: planning, too, has no more. Bits are equal "
        "where all losses, and in the end parameters, buffers and the random state, are those of eager PyTorch without a cap."
    )
    allowed = (
        f"Allowed: an RSS of the budget and what a process has that has imported torch ({_bytes(some.torch_rss_bytes)}; with "
        f"torch._dynamo, which captures the step, {_bytes(some.dynamo_rss_bytes)}) and the library of the model, and "
        f"{RSS_TOLERANCE:.0%} of both; a first step that ends, from the "
        f"call of planner.compile, after the capture, {START_S:g} s, and as many steps of eager PyTorch as are named in brackets."
    )
    checks = as_markdown([_CHECKS, *map(_check_line, models)])
    training = as_markdown([_TRAINING, *map(_training_line, models)])
    rss = as_markdown([_RSS, *map(_rss_line, models)])
    parts = [method, allowed, checks, "## Training", _LEGEND, training, "## RSS of the processes", rss]
    if messages := [f"- {row.model}, {row.way}: {row.status}: {row.message}" for row in _ended_early(models)]:
        parts += ["## Not trained", "\n".join(messages)]
    return "\n\n".join(part.strip() for part in [*parts, _made_with(models)]) + "\n"


_LEGEND = (
    "Seconds are medians of the last steps, with the optimizer's; in brackets multiples of eager PyTorch's without a cap. Of "
    "plans the overhead over keeping everything is predicted, and the gap proved; the last is in use after the last step. "
    "Under the cap memory is returned to the system as soon as it is freed, and to take it again costs the time that steps take "
    "above the prediction: less of it in pages of 2 MB, which PyTorch asks for where THP_MEM_ALLOC_ENABLE=1."
)


def _check_line(trained: Trained) -> tuple[str, ...]:
    planned = trained.planned
    return (
        trained.model,
        _bytes(planned.eager_peak_bytes),
        _share(planned.budget_bytes, planned.eager_peak_bytes),
        "yes" if planned.status == RAN else f"NO: {planned.status}",
        "yes" if trained.same_bits else "NO",
        _bytes(planned.training_rss_bytes),
        _bytes(trained.allowed_rss_bytes),
        _verdict(trained.excess_rss_bytes, format_bytes),
        _seconds(planned.capture_s),
        _seconds(planned.first_step_s),
        f"{_seconds(trained.allowed_first_step_s)} ({planned.planning_steps})",
        _verdict(trained.excess_s, format_seconds),
    )


def _training_line(trained: Trained) -> tuple[str, ...]:
    planned = trained.planned
    return (
        trained.model,
        _bytes(planned.room_bytes),
        _bytes(planned.eager_growth_bytes),
        _seconds(trained.uncapped.step_s),
        _step(planned, trained.uncapped),
        _step(trained.large_pages, trained.uncapped),
        _plan(planned.first_overhead, planned.first_gap),
        _plan(planned.last_overhead, planned.last_gap),
        _bytes(planned.measured_peak_bytes),
        planned.swaps or ("none" if planned.status == RAN else _NONE),
        _step(trained.eager, trained.uncapped),
        _step(trained.checkpointing, trained.uncapped),
    )


def _rss_line(trained: Trained) -> tuple[str, ...]:
    planned = trained.planned
    taken = (row.training_rss_bytes for row in (*trained.plans, trained.uncapped, trained.eager, trained.checkpointing))
    sizes = (planned.library_rss_bytes, planned.ready_rss_bytes, planned.planning_rss_bytes, *taken)
    return (trained.model, *map(_bytes, sizes))


def _step(row: Row, uncapped: Row) -> str:
    """Return the seconds of a step and the multiple of eager PyTorch's, or why there are none."""
    if row.status != RAN:
        return row.status
    ratio = "" if row.step_s is None or uncapped.step_s is None else f" ({row.step_s / uncapped.step_s:.2f}x)"
    return f"{_seconds(row.step_s)}{ratio}"


def _plan(overhead: float | None, gap: float | None) -> str:
    if overhead is None:
        return _NONE
    return f"+{format_ratio(overhead)} ({'unknown' if gap is None else format_ratio(gap)})"


def _verdict(excess: float | None, written: Callable[[float], str]) -> str:
    if excess is None:
        return _NONE
    return "met" if excess <= 0 else f"missed by {written(excess)}"


def _share(size_bytes: int | None, peak_bytes: int | None) -> str:
    return _NONE if size_bytes is None or peak_bytes is None else f"{format_bytes(size_bytes)} ({size_bytes / peak_bytes:.0%})"


def _bytes(size_bytes: int | None) -> str:
    return _NONE if size_bytes is None else format_bytes(size_bytes)


def _seconds(time_s: float | None) -> str:
    return _NONE if time_s is None else format_seconds(time_s)


def _ended_early(models: Sequence[Trained]) -> list[Row]:
    """Return the rows that did not run for another reason than that eager PyTorch needs more than the cap."""
    capped = [row for trained in models for row in (*trained.plans, trained.eager, trained.checkpointing)]
    return [
        row
        for row in capped
        if row.status != RAN and not (row.status == OUT_OF_MEMORY and row.message.startswith("RuntimeError"))
    ]


def _made_with(models: Sequence[Trained]) -> str:
    def values(column: str) -> str:
        return " and ".join(dict.fromkeys(str(getattr(trained.planned, column)) for trained in models))

    return (
        f"Seed {values('seed')}; {values('machine')}; torch {values('torch')}, transformers {values('transformers')}; "
        f"commit {values('commit')}."
    )

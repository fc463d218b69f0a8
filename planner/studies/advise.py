"""Which budget? Advice for a model, and the overhead of a graph at several budgets."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature

import torch
from torch import nn

from planner.capture.options import OPTIONS, check_options, list_options_for_any_step, list_step_option_names
from planner.capture.signature import Batch, list_leaves
from planner.capture.step import LossFn
from planner.graphs.errors import BudgetError
from planner.graphs.ir import Graph, check_is_graph
from planner.graphs.short_tracebacks import shorten_traceback
from planner.measure.steps import describe_device
from planner.measure.tracing import trace
from planner.memory.auto_budget import compute_auto_budget_bytes, reserve_bytes
from planner.memory.reserved import choose_memory_on
from planner.progress import OnProgress, Stage, Stages, list_views
from planner.settings.counted_memory import CountedMemory
from planner.settings.devices import get_device
from planner.settings.option_settings import build_option_settings
from planner.settings.plan import check_positive, select_settings
from planner.solvers.tolerance import Tolerance
from planner.studies.advice import Advice
from planner.studies.budget_analysis import advise_graph
from planner.studies.curve import Curve
from planner.studies.settings import StudySettings
from planner.studies.solve_curve import solve_curve as solve_budgets
from planner.studies.workers import return_false

_LEAST_S = 20.0  # for the analysis, even after a long trace


@shorten_traceback
def advise(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = "none",
    accumulate: bool = False,
    roofline: str | None = None,
    passes: int = 5,
    options: Sequence[str] | None = None,
    memory: str | None = None,
    link: str | float | None = None,
    host_budget: str | int | None = None,
    time_limit_s: float = 55.0,
    name: str = "",
    on_progress: OnProgress = None,
    should_stop: Callable[[], bool] | None = None,
) -> Advice:
    """Return the memory that the step of `model` needs, the cost of smaller budgets, and the budget to choose.

    ``print`` shows the result. The step is traced, then solved for a short time at several budgets, and once with each option.

    Args:
        model, loss_fn, batch, optimizer, accumulate, roofline, passes, name, on_progress: as in ``planner.trace``.
        options: options to try, each alone. None: ``offload`` and all that are found in the step; ``compress:4`` with a roofline
            only, since measuring its error takes a backward pass for each compressible tensor.
        memory, link, host_budget: as in ``planner.solve``.
        time_limit_s: for trace and analysis together; the analysis has at least 20 s.
        should_stop: polled; when it returns True, the results so far are returned.

    Raises:
        TraceError: as ``planner.trace``.
        UsageError: there is no such memory on the device.
        PlannerError: an option cannot be tried.

    Examples:
        >>> advice = planner.advise(model, loss_fn, (x, y), time_limit_s=20)
        >>> print(advice)
        eager PyTorch needs ...
    """
    given = {name: value for name, value in select_settings(locals()).items() if name in signature(trace).parameters}
    began = time.monotonic()
    check_positive("time limit", time_limit_s, "seconds")
    names = _list_options_to_try(options, roofline)
    kind, device, available_bytes = _find_device(model, batch, roofline)
    counted = choose_memory_on(kind, CountedMemory.of(memory))
    graph = trace(model, loss_fn, batch, **given | {"options": list_step_option_names(names)}, on_progress=on_progress)
    with _report_solves(on_progress) as say:
        return advise_graph(
            graph,
            available_bytes=available_bytes,
            device=device,
            options=names,
            memory=counted,
            link=link,
            host_budget=host_budget,
            time_limit_s=max(_LEAST_S, time_limit_s - (time.monotonic() - began)),
            on_activity=say,
            should_stop=should_stop or return_false,
        )


@shorten_traceback
def curve(
    graph: Graph,
    budgets: int | Sequence[str | int] = 10,
    *,
    options: Sequence[str] = (),
    link: str | float | None = None,
    host_budget: str | int | None = None,
    memory: str | None = None,
    time_limit_s: float = 30.0,
    tolerance: float = 1e-3,
    jobs: int = 1,
    on_progress: OnProgress = None,
) -> Curve:
    """Return the overhead of `graph` at several budgets, each with its bound.

    ``print`` shows the result, its ``plot()`` draws it, and its ``rows`` have the numbers.

    Args:
        graph: as from ``planner.trace``.
        budgets: how many, evenly from the least feasible one to what plain eager PyTorch takes; or the budgets themselves, in
            bytes or as text (``8GB``, ``60%`` of the latter).
        options, link, host_budget, memory: as in ``planner.solve``.
        time_limit_s: for all budgets together.
        tolerance: on each gap, relative to the whole step.
        jobs: processes that solve at the same time. With more than one, the main module is imported in each: a script needs
            ``if __name__ == "__main__":``.
        on_progress: as in ``planner.trace``.

    Raises:
        BudgetError: a budget cannot be read, or there is none.
        PlannerError: settings out of range, an option that the graph does not have, or a solve failed.

    Examples:
        >>> curve = planner.curve(graph, ["90%", "100%"])
        >>> [row.budget_bytes for row in curve.rows] == [int(0.9 * graph_peak_bytes), graph_peak_bytes]
        True
    """
    check_is_graph(graph)
    if isinstance(budgets, str) or not isinstance(budgets, int | Iterable):
        raise BudgetError(f"budgets is {budgets!r}: must be how many, or a list of budgets, [{budgets!r}]")
    check_positive("time limit", time_limit_s, "seconds")
    settings = StudySettings(
        tolerance=Tolerance.of(tolerance).first,
        time_limit_s=math.inf,
        total_time_limit_s=time_limit_s,
        options=build_option_settings(options, link=link, host_budget=host_budget),
        memory=CountedMemory.of(memory),
        jobs=jobs,
    )
    with _report_solves(on_progress) as say:
        return solve_budgets(graph, budgets, settings, on_activity=say)


@contextmanager
def _report_solves(on_progress: OnProgress) -> Iterator[Callable[[str], None]]:
    """Yield the function that is called with a line about each of many solves."""
    with Stages(*list_views(on_progress), stages=(Stage.SOLVE,)) as stages:
        with stages.run_stage(Stage.SOLVE) as stage:
            yield stage.report_activity
        stages.finish()


def _list_options_to_try(given: Sequence[str] | None, roofline: str | None) -> tuple[str, ...]:
    """Return the options that are `given`, or by default those that any step may have; raise UsageError for others."""
    if given is not None:
        check_options(given)
        return tuple(given)
    offered = (OPTIONS[name] for name in list_options_for_any_step())
    return tuple(option.to_try for option in offered if roofline is not None or not option.lossy)


def _find_device(model: nn.Module, batch: Batch, roofline: str | None) -> tuple[str, str, int | None]:
    """Return the type of the device, its name, and the bytes that a step may use on it.

    A device that is modelled by a roofline is otherwise unused.
    """
    if roofline is not None:
        known = get_device(roofline)
        kind = "cpu" if roofline == "cpu" else "cuda"
        reserve = reserve_bytes(kind, known.memory_bytes)
        return kind, f"{roofline} (modelled)", known.memory_bytes - reserve
    parameters = list(model.parameters())
    inputs = [leaf for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = next((tensor.device for tensor in (*parameters, *inputs)), torch.device("cpu"))
    available_bytes = compute_auto_budget_bytes(device, (*parameters, *model.buffers(), *gradients), inputs)
    return device.type, describe_device(device), available_bytes

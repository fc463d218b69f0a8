"""Training by a plan: one call that traces, measures, solves and compiles a step."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs.errors import PlannerError
from graphs.options.option import Setting
from planner.budgets import allowed_overhead, budget_or_overhead, cache_key
from planner.capture.lowering.lower import Capture
from planner.capture.options import DEFAULTS, check_goes_with
from planner.capture.signature import Batch, as_leaves
from planner.capture.step import LossFn
from planner.choices import check_amount, choices_of, is_amount
from planner.distributed.wrappers import Unwrapped, unwrap
from planner.plan_check import check_sizes
from planner.profiling.kernel_settings import kernel_settings
from planner.progress import LoggingView, Stages, View
from planner.progress.describe import plan_line
from planner.runtime.cuda_graph import CudaGraphs
from planner.runtime.executor import check_no_transform
from planner.runtime.graphed_step import Recorder
from planner.runtime.measure import device_name
from planner.search import Search, Wait
from planner.training.auto_budget import with_auto_resolved
from planner.training.cache import PlanCache, warn_unusable
from planner.training.compiler import Compiler
from planner.training.dynamic import DynamicStep
from planner.training.optimizers import optimizer_kind
from planner.training.replan import ReplannedStep
from planner.training.step import PlannedStep
from solvers.tolerance import WIDENING, Tolerance


def compile(  # noqa: A001
    model: nn.Module | Unwrapped,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    budget: str | float | None = None,
    max_overhead: str | float | None = None,
    optimizer: str | torch.optim.Optimizer = "none",
    accumulate: bool = False,
    solver: str = "windows",
    tolerance: float | Tolerance = WIDENING,
    time_limit_s: float = 60.0,
    passes: int = 5,
    reorder: bool | None = None,
    options: Sequence[str] | None = None,
    link: str | float | None = None,
    host_budget: str | int | None = None,
    exact: bool = False,
    cache: str | os.PathLike[str] | None = None,
    dynamic: bool = False,
    max_plans: int = 32,
    cuda_graph: bool = False,
    replan: bool = False,
    compare_eager: bool = True,
    kernels: str = "eager",
    other_devices: Sequence[str] = (),
    wait: Wait | str | float | None = None,
    swap: str = "exact",
    check_writes: bool = False,
    on_progress: View | None = None,
) -> PlannedStep:
    """Plan the training step of `model` and return it ready to run: the fastest step that fits `budget`.

    The call captures the step, measures each distinct op once, and solves for a short time (`wait`). Solving then goes on in a
    background process, and a better plan replaces the first between two steps. Planning needs no more memory than the budget. It
    leaves no trace: parameters, buffers, gradients, random states and attributes of the model are afterwards as before.

    A model wrapped in ``DistributedDataParallel`` or ``fully_shard`` is planned on all processes at once. Rank 0 measures and
    solves, the others receive its plan, and an error on one rank is raised on all.

    Args:
        model: in the mode it is trained in.
        loss_fn, batch: as in ``planner.trace``. Each process passes a batch of its own.
        budget: memory of the whole step, with parameters, gradients, inputs and optimizer state: bytes, ``8GB``, ``7.5GiB``;
            ``60%`` or 0.6 of the predicted peak of plain eager PyTorch; or ``auto`` for what the device has free.
        max_overhead: in place of a budget: plan the least memory at which the step takes at most this much longer than keeping
            everything, as 0.1 or ``10%``. Not with ``kernels="inductor"``.
        optimizer: the optimizer, or ``none``, ``sgd``, ``momentum`` or ``adamw``: its state is counted in memory.
        accumulate: True if gradients of earlier batches are in memory when a step begins (gradient accumulation).
        solver, tolerance, time_limit_s, reorder: as in ``planner.solve``.
        passes: how often each distinct op is timed.
        options: what the schedule may do besides recomputing: ``offload``, ``chunks``, ``pack``, ``kernels``, ``in-place``,
            ``compress:4``, ``placement`` (``docs/options``). None: the exact defaults (``in-place``). Some round differently
            than eager PyTorch; ``plan.differs`` lists what does.
        link: bytes a second to host memory and back, as ``50GB/s``. None: measured.
        host_budget: host memory for offloaded tensors: bytes, ``64GB``, or a share of what is free. Each of several processes
            takes as much, and it must be an amount then.
        exact: of the options, use only what was verified to give the same bits.
        cache: folder for plans. A plan for the same graph, budget, device, options and versions is loaded from there, and
            nothing is measured or solved.
        dynamic: True if batches of other sizes follow. The step is then a ``DynamicStep``, which plans each size.
        max_plans: with `dynamic` or `replan`: how many plans are kept. The least recently used one is dropped first.
        cuda_graph: replay the step as CUDA graphs. The memory that they hold is counted; random ops are not recomputed.
        replan: plan again, with a warning, when the model, the loss function or a value that they read has changed. False: raise
            MismatchError.
        compare_eager: run the step beside plain eager PyTorch if that fits, and warn where results differ (``EagerWarning``).
            This takes as long as a few steps.
        kernels: ``eager`` for the kernels of eager PyTorch, or ``inductor`` for those of ``torch.compile``, whose bits the
            results then have.
        other_devices: devices for ``options=["placement"]``, as in ``planner.trace``.
        wait: how good the plan must be before the call returns: seconds of solving (10 or ``10s``), a gap (``1%``), or work
            (``20 work``). None: 3 s or 1%, whichever is first. With a gap or work the plan is the same on every run, and is not
            replaced.
        swap: which better plans may replace the first: ``exact`` (those with the same bits), ``any``, or ``never``.
        check_writes: check in each step that nothing has written to parameters, buffers or inputs between the forward and the
            backward pass without autograd's notice. This costs time in each step.
        on_progress: called with each ``planner.progress.Progress``; ``LineView()`` and ``NotebookView()`` show them. None: log to
            the logger ``planner``.

    Returns:
        A callable like ``loss_fn(model(*inputs), target)`` with the same result, bits and gradients. ``step.plan`` is the plan in
        use, ``step.wait()`` waits for the background solve, ``step.history`` lists the plans so far.

    Raises:
        TraceError: the step cannot be captured as one static graph, or the wrapper is not supported.
        InfeasibleError: proved: no schedule fits the budget.
        LimitError: no schedule was found within the time limit.
        BudgetError: the budget cannot be read, the measured peak stays above it, or both or neither of `budget` and
            `max_overhead` are given.
        UsageError, PlannerError: an option has a wrong value, or does not go with another option or the device; or gradients are
            turned off.
        OutOfMemoryError: one op alone needs more than is free.
        OutputError: plans cannot be written to `cache`.
    """
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PlannerError(f"planner.compile is called under torch.{mode}(), where nothing is trained: call it outside")
    check_no_transform("planner.compile is called")
    optimizer = optimizer if isinstance(optimizer, str) else optimizer_kind(optimizer)
    settings: dict[str, Any] = {"solver": solver, "tolerance": tolerance, "time_limit_s": time_limit_s, "reorder": reorder}
    wrapper = unwrap(model)
    budget = with_auto_resolved(budget_or_overhead(budget, max_overhead), wrapper, batch)
    if kernels == "inductor" and allowed_overhead(budget) is not None:
        raise PlannerError("max_overhead= is not for kernels='inductor', whose steps are compiled for a budget: give budget=")
    channels, asked = None, {}
    choices = choices_of(DEFAULTS if options is None else options, link, host_budget, exact=exact)
    if choices is not None:
        settings |= {"options": choices.options, "exact": exact}
        for setting, given in ((Setting.VARYING_SIZES, dynamic), (Setting.INDUCTOR, kernels == "inductor")):
            if given:
                check_goes_with(choices.options, setting)
    if choices is not None and choices.host_bytes is not None:
        if type(wrapper) is not Unwrapped:
            check_amount(host_budget)
        channels = wrapper.channels(choices.host_bytes)
        host_bytes = int(channels.memory.capacity_bytes)  # of which as much may be free as before: earlier plans have taken it
        settings |= {"link": choices.link_bytes_per_s, "host_budget": host_bytes}
        asked = {"host_budget": choices.host_bytes if is_amount(host_budget) else host_budget}
    places = choices is not None and choices.places
    if places != bool(other_devices):
        raise PlannerError("other_devices= and options=['placement'] go together: give both, or leave both out")
    if places and (cuda_graph or type(wrapper) is not Unwrapped):
        raise PlannerError(
            "ops are placed on other devices in one process and run op by op: leave out cuda_graph=True and the wrapper, or "
            "options=['placement']"
        )
    recorder = _recorder(wrapper, dynamic=dynamic) if cuda_graph else None
    compiler = _compiler_for(kernels)(
        wrapper,
        loss_fn,
        optimizer,
        accumulate,
        passes,
        Search(settings, Wait.of(wait), swap),
        recorder,
        compare_eager=compare_eager,
        channels=channels,
        measure_link=choices is not None and choices.measures_link,
        options=() if choices is None else choices.options,
        other_devices=tuple(other_devices),
        check_writes=check_writes,
        stages=_stages(wrapper, on_progress),
    )
    if max_plans < 1:
        raise PlannerError(f"max_plans is {max_plans}: at least one plan must be kept")
    if replan and cuda_graph:
        raise PlannerError("a CUDA graph keeps its memory, and there would be one for each plan: leave out replan=True")
    if dynamic and type(wrapper) is not Unwrapped:
        raise PlannerError(
            "batches of varying sizes are not planned for several processes: leave out dynamic=True, and pad the batches"
        )
    if replan and type(wrapper) is not Unwrapped:
        raise PlannerError("one of several processes cannot plan again while the others wait for it: leave out replan=True")

    placed = {"other_devices": list(other_devices)} if places else {}
    made_with = {**settings, **asked, **placed, "tolerance": Tolerance.of(tolerance).steps, "kernels": kernels}

    def plan_size(batch: Batch, budget: str | int, *, compare_eager: bool = compare_eager) -> PlannedStep:
        with compiler.stages.again() as stages:
            planning = replace(compiler, stages=stages, compare_eager=compare_eager)
            return _planned(planning, batch, budget, cache, made_with)

    def plan_other_size(batch: Batch, budget_bytes: int) -> PlannedStep:
        return plan_size(batch, budget_bytes, compare_eager=False)

    def make(batch: Batch, budget: str | int) -> PlannedStep:
        first = plan_size(batch, budget)
        return DynamicStep(first, batch, plan_other_size, max_plans=max_plans) if dynamic else first

    if replan:
        return ReplannedStep(make, as_leaves(batch), budget, max_plans=max_plans)
    return make(as_leaves(batch), budget)


def _planned(
    compiler: Compiler, batch: Batch, budget: str | int, cache: str | os.PathLike[str] | None, options: Mapping[str, object]
) -> PlannedStep:
    """The step for batches like `batch`, from the cache if it is there.

    Args:
        options: with which graphs are solved; another plan is made for others.
    """
    wrapper = compiler.wrapper
    plans = wrapper.ranks.each(lambda: None if cache is None else PlanCache(cache))
    with wrapper.opened():
        captured = wrapper.ranks.each(lambda: compiler.capture(batch))

        def make() -> PlannedStep:
            return compiler.make(captured, batch, budget)

        def find_or_make() -> PlannedStep:
            step = find()
            compiler.stages.finish(plan_line(step.plan))
            return step

        def find() -> PlannedStep:
            if plans is None:
                return make()
            path = plans.path({"budget": cache_key(budget), **_made_for(captured, wrapper.module), **options})
            kept = plans.load(path, budget)
            if kept is not None:
                try:
                    planned = compiler.captured_for(kept, captured, batch)
                    check_sizes(planned.graph, kept)
                    return compiler.reuse(planned, batch, kept, None)
                except PlannerError as error:
                    warn_unusable(path, error)
            step = make()
            step.keep_with(lambda plan: plans.store(plan, path))
            return step

        return wrapper.ranks.first(
            find_or_make,
            share=lambda step: (step.plan, step.measured, step.improves),
            adopt=lambda shared: compiler.reuse(
                compiler.captured_for(shared[0], captured, batch), batch, *shared[:2], improves=shared[2]
            ),
        )


def _stages(wrapper: Unwrapped, on_progress: View | None) -> Stages:
    """Return what planning is reported to: of several processes, the first one reports."""
    return Stages(on_progress or LoggingView()) if wrapper.ranks.is_first else Stages()


def _recorder(wrapper: Unwrapped, *, dynamic: bool) -> Callable[[], Recorder]:
    if dynamic:
        raise PlannerError(
            "a CUDA graph keeps its memory, and there would be one for each size: leave out cuda_graph=True, or dynamic=True and "
            "pad the batches"
        )
    if type(wrapper) is not Unwrapped:
        raise PlannerError("CUDA graphs are not planned for several processes: leave out cuda_graph=True")
    device = next(wrapper.module.parameters()).device
    if device.type != "cuda":
        raise PlannerError(f"cuda_graph=True is for models on a CUDA device, and this one is on {device}: leave it out")
    return partial(CudaGraphs, device)


def _compiler_for(kernels: str) -> type[Compiler]:
    """Return the class that plans steps of these kernels."""
    if kernels == "eager":
        return Compiler
    if kernels != "inductor":
        raise PlannerError(f"kernels is {kernels!r}: choose eager or inductor")
    from planner.training.inductor_compiler import InductorCompiler  # importing Inductor takes a second

    return InductorCompiler


def _made_for(captured: Capture, model: nn.Module) -> dict[str, object]:
    """What the schedule of a captured step depends on, besides budget and options."""
    device = next(model.parameters()).device
    return {
        "graph": captured.graph.fingerprint,
        "static_bytes": captured.graph.static_bytes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device_name(device),
        "settings": kernel_settings(device),
        "torch": torch.__version__,
    }

"""Training by a plan: one call that traces, measures, solves and compiles a step."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch, as_leaves
from graphs.capture.step import LossFn
from graphs.cost.kernel_settings import kernel_settings
from graphs.errors import PlannerError
from graphs.options import DEFAULTS, Setting, check_goes_with
from planner.budgets import allowed_overhead, budget_or_overhead, cache_key
from planner.choices import check_amount, choices_of, is_amount
from planner.distributed.wrappers import Unwrapped, unwrap
from planner.plan_check import check_sizes
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
    budget: str | int | None = None,
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
    """Trace, profile, solve and compile the training step of `model`: the fastest that fits `budget`.

    The step is run on `batch` to measure its peak, and some times beside plain eager PyTorch, whose bits, time and peak
    become part of the plan. Parameters, buffers, gradients, random states and what the model's attributes hold are
    afterwards as they were, also where an optimizer steps in the backward pass: no hook of a parameter acts meanwhile.

    A model in ``DistributedDataParallel`` or under ``fully_shard`` is planned on all its processes at once: rank 0
    profiles and solves, the others get its plan, and an error on one is raised on all.

    Args:
        model, loss_fn, batch, optimizer, accumulate, passes: as in ``trace``; each process has a batch of its own. A
            model may come with how it is wrapped (``planner.distributed.wrappers``), where its own type does not say so.
            `optimizer` may be the optimizer itself, of ``torch.optim`` or as Accelerate wraps it.
        budget: bytes, ``8GB``, ``7.5GiB``, ``60%`` of the predicted peak of plain eager PyTorch, or ``auto`` for what the
            device has free (``planner.training.auto_budget``); parameters, inputs, gradients and optimizer state included.
        max_overhead: in place of a budget, how much longer than keeping everything the step may take, as 0.1 or ``10%``: the
            budget is then the least memory at that price. Not with ``kernels="inductor"``.
        solver, tolerance, time_limit_s, reorder: as in ``solve``, which ends within the tolerance or when its
            time is up, with the best schedule so far.
        options, link, host_budget: as in ``solve``: with ``options=["offload"]`` tensors also go to the host and come back.
            Without `link` copies are measured beside the step. On several processes each takes as much of the host's memory:
            `host_budget` is in bytes, or ``8GB``, there. With ``options=["chunks"]`` loss heads, and other large stretches by
            rows, may be computed in chunks: what is added up over rows is then rounded otherwise, and ``plan.differs`` says what.
            With ``options=["kernels"]`` convolutions, attention and rows of ops may be computed by other kernels, likewise.
            With ``options=["pack"]`` masks, indices and signs may be kept in bits and bytes, exactly. None: those that are so by
            default, ``in-place``; ``[]``: none at all.
        exact: of the options, offer only ops that differ in not a bit: with ``dynamic`` these are of the first size.
        cache: a folder where plans are kept. For the same graph, sizes, budget, device, options and versions
            the plan is loaded, and nothing is profiled or solved.
        dynamic: batches of other sizes may follow: the step is a ``planner.training.dynamic.DynamicStep``, which makes a plan
            for each.
        max_plans: with `dynamic` or `replan`, how many are kept; the one that was used longest ago goes first.
        cuda_graph: replay the step as CUDA graphs, at one launch for each pass (docs/guides/cuda-graphs.md). What they hold
            between steps, and the copies of what goes in and out, count; random ops are not computed again.
        replan: where the model, the loss function or a value that they read changes, or a batch is unlike `batch`, plan again,
            with a warning that says what changed; without it, each is a MismatchError of the step.
        compare_eager: run the step beside eager PyTorch (of varying sizes, the first), and warn where they differ
            (``graphs.errors.EagerWarning``). It takes as long as some steps.
        kernels: ``eager``, those that eager PyTorch runs; or ``inductor``, those that ``torch.compile`` compiles the step to, in
            several ways where recomputation costs much, of which the fastest is kept (docs/guides/inductor.md). Bits are then
            those of ``torch.compile``, which also stands for eager PyTorch in what is compared.
        other_devices: as in ``trace``, with ``options=["placement"]``.
        wait: how good the plan must be before this returns: seconds of solving (10, ``10s``), after which any plan will do, a gap
            (``1%``), or ``20 work``. None: 3 seconds or 1%, whichever comes first. Solving then goes on in a process of its own
            while the step trains, up to `tolerance` or `time_limit_s`, and a better plan takes the place of the first between two
            steps. With a gap or work the plan is the same for the same costs, and stays.
        swap: which better plans do: ``exact``, those that make the same bits; ``any``, also those whose options round otherwise;
            ``never``.
        check_writes: compare checksums of parameters, buffers and inputs that the backward pass reads, as the forward pass ends
            and as the backward pass begins, to find writes that autograd does not see: it takes time in each step, and some MB.
        on_progress: called with each ``planner.progress.Progress`` from the begin of the capture on, each time that a step is
            planned; of several processes, on the first one only. ``LineView()`` and ``NotebookView()`` of ``planner.progress``
            show it. None: log to the logger ``planner``, at INFO.

    Raises:
        TraceError: the step cannot be captured as one static graph, or the wrapper is one that is not planned; or, with
            `cuda_graph`, an op cannot be captured.
        PlannerError: an option does not go with another, or with the device; or gradients are turned off.
        InfeasibleError: no schedule meets the budget.
        LimitError: none was found in time.
        BudgetError: the measured peak stays above the budget; the budget cannot be read, or nothing is free; or not exactly
            one of budget and overhead is given.
        OutputError: plans cannot be kept in `cache`.
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

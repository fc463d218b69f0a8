"""``planner.compile``: trace, measure, solve and compile a training step in one call."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from planner.capture.frontend.preserved_state import initialize_lazy_layers
from planner.capture.signature import Batch
from planner.capture.step import LossFn, TrainingStep
from planner.graphs.optimizers import MeasuredOptimizer
from planner.graphs.short_tracebacks import shorten_traceback
from planner.measure.optimizers import find_memory
from planner.progress import OnProgress
from planner.settings.budget import read_budget_or_overhead
from planner.settings.option_settings import list_default_options
from planner.settings.plan import PlanSettings, Wait, select_settings
from planner.solvers.tolerance import WIDENING, Tolerance
from planner.train.compile.planning import Planning
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import Unwrapped, unwrap


@shorten_traceback
def compile(  # noqa: A001
    model: nn.Module | Unwrapped,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    budget: str | float | None = None,
    max_overhead: str | float | None = None,
    optimizer: str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MeasuredOptimizer = "none",
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
    arena: bool | None = None,
    replan: bool | None = None,
    compare_eager: bool = True,
    kernels: str = "eager",
    other_devices: Sequence[str] = (),
    wait: Wait | str | float | None = None,
    swap: str = "exact",
    params: object = None,
    check_writes: bool = False,
    memory: str | None = None,
    on_progress: OnProgress = None,
) -> PlannedStep:
    """Plan the training step of `model` and return it ready to run: the fastest step that fits `budget`.

    The call captures the step, measures each distinct op once, and solves for a short time (`wait`). Solving then goes on in a
    background process, and a better plan replaces the first between two steps. Planning needs no more memory than the budget. It
    does not change parameters, buffers, gradients, random states or attributes of the model.

    A model wrapped in ``DistributedDataParallel`` or ``fully_shard`` is planned on all processes at once. Rank 0 measures and
    solves, the others receive its plan, and an error on one rank is raised on all.

    Args:
        model: in the mode it is trained in.
        loss_fn, batch: as in ``planner.trace``. Each process passes a batch of its own.
        budget: memory of the whole step, with parameters, gradients, inputs and optimizer state: bytes, ``8GB``, ``7.5GiB``;
            ``60%`` or 0.6 of the predicted peak of plain eager PyTorch; or ``auto`` for what the device has free.
        max_overhead: in place of a budget: plan the least memory at which the step takes at most this much longer than keeping
            everything, as 0.1 or ``10%``. Not with ``kernels="inductor"``.
        optimizer: the optimizer, whose state is counted in memory: any, made from parameters of the model, or a list of them; or
            ``none``, ``sgd``, ``momentum`` or ``adamw``.
        accumulate: True if gradients of earlier batches are in memory when a step begins (gradient accumulation).
        solver, tolerance, time_limit_s, reorder: as in ``planner.solve``.
        passes: number of times that each distinct op is timed.
        options: names of options that the schedule may use besides recomputation: ``offload``, ``chunks``, ``pack``, ``kernels``,
            ``in-place``, ``compress:4``, ``placement``, ``overlap`` (``docs/options``). None: the exact defaults (``in-place``).
            Some round differently than eager PyTorch; ``plan.differs`` lists what does.
        link: bytes a second to host memory and back, as ``50GB/s``. None: measured.
        host_budget: host memory for offloaded tensors: bytes, ``64GB``, or a share of what is free. If several
            processes train, each may use as much, and it must be an amount.
        exact: use only those ops of the options that were verified to be bit-identical.
        cache: folder for plans. A plan for the same graph, budget, device, options and versions is loaded from there, and
            nothing is measured or solved.
        dynamic: True if batches of other sizes follow. The step is then a ``DynamicStep``, which plans each size. Otherwise only
            batches that are smaller in their first dimension get plans of their own, not under DDP or with CUDA graphs.
        max_plans: the number of plans that are kept for other sizes, or with `replan`. The least recently used one is dropped
            first.
        cuda_graph: replay the step as CUDA graphs. The memory that they hold is counted; random ops are not recomputed.
        arena: run the step in one block of memory, at planned addresses, which is kept from step to step (``docs/addresses.md``).
            It is at most the budget, and on a CPU needs a C++ compiler. None: on CUDA, where the plan would otherwise reserve
            more than its budget; on a CPU, on one process, if twice the memory of keeping everything does not fit.
        replan: plan again, with a warning, when the model, the loss function or a value that they read has changed. None: only
            where numbers or flags have changed, not under DDP or with CUDA graphs; other changes raise MismatchError.
            False: any change does. In each case a plan is kept where only arguments of ops differ.
        compare_eager: compare the step with plain eager PyTorch, or with FSDP2's, if that fits, and warn where results differ
            (``EagerWarning``). This takes as long as a few steps.
        kernels: ``eager`` for the kernels of eager PyTorch, or ``inductor`` for those of ``torch.compile``; results are then
            bit-identical to its own.
        other_devices: devices for ``options=["placement"]``, as in ``planner.trace``.
        wait: required quality of the plan before the call returns: seconds of solving (10 or ``10s``), a gap (``1%``), or work
            (``20 work``). None: 3 s or 1%, whichever is first. With a gap or work the plan is the same on every run, and is not
            replaced.
        swap: the better plans that may replace the first: ``exact`` (those with the same bits), ``any``, or ``never``.
        params: of the solver, as in ``planner.solve``.
        check_writes: check in each step that nothing has written to parameters, buffers or inputs between the forward and the
            backward pass without autograd's notice. This costs time in each step.
        memory: kind of memory that the budget counts: ``reserved`` for all that PyTorch's allocator reserves on CUDA,
            ``reserved-expandable`` with expandable segments, ``device`` or ``device-expandable`` for that and CUDA's context, or
            ``allocated`` for tensors in use. None: ``reserved`` on CUDA, except with `max_overhead`, and ``allocated`` on the
            CPU.
        on_progress: called with each ``planner.progress.Progress``. None: show progress in one line on a terminal and by a bar in
            a notebook, and log to the logger ``planner``. False: only log.

    Returns:
        A callable like ``loss_fn(model(*inputs), target)`` with the same result, bits and gradients. ``step.plan`` is the plan in
        use, ``step.wait()`` waits for the background solve, ``step.history`` lists the plans so far.

    Raises:
        TraceError: the step cannot be captured as one static graph, or the wrapper is not supported.
        InfeasibleError: it is proved that no schedule fits the budget.
        LimitError: no schedule was found within the time limit.
        BudgetError: the budget cannot be read, the measured peak stays above it, or both or neither of `budget` and
            `max_overhead` are given.
        UsageError, PlannerError: an option has an invalid value, or is incompatible with another option or the device; or
            gradients are turned off.
        OutOfMemoryError: one op alone needs more than is free.
        OutputError: plans cannot be written to `cache`.

    Examples:
        >>> step = planner.compile(model, loss_fn, (x, y), budget="1GB")
        >>> loss = step(x, y)
        >>> loss.backward()
        >>> step.plan.peak_bytes <= 1_000_000_000
        True
    """
    given = select_settings(locals())
    wrapper = unwrap(model)
    step = TrainingStep(wrapper.module, loss_fn)
    initialize_lazy_layers(step, batch)  # before their optimizer is measured
    given |= {"optimizer": find_memory(optimizer, step), "options": list_default_options(solver) if options is None else options}
    settings = PlanSettings.of(**given)
    settings = replace(settings, measure_link=settings.options.measures_link)
    return Planning(wrapper, loss_fn, settings, on_progress).step(batch, read_budget_or_overhead(budget, max_overhead))

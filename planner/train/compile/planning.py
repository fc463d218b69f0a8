"""From settings to a planned step: the settings are checked together, and one compiler makes the steps of a model."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch, detach_batch
from planner.capture.step import LossFn
from planner.graphs.errors import PlannerError, UsageError
from planner.graphs.options.option import Feature
from planner.measure.kernel_settings import collect_kernel_settings
from planner.measure.steps import describe_device
from planner.memory.release import leave_out_present_objects
from planner.plans.cache import PlanCache, warn_unusable
from planner.plans.plan_check import check_sizes
from planner.plans.record import plan_line
from planner.progress import OnProgress, Stages, list_views
from planner.runtime.cuda.cuda_graph import CudaGraphs
from planner.runtime.cuda.device_arena import create_shared_slab
from planner.runtime.eager_block import check_no_block
from planner.runtime.executor import check_no_transform
from planner.settings.budget import Budget, Bytes, Overhead
from planner.settings.compatibility import check_compatible, find_conflict
from planner.settings.plan import PlanSettings
from planner.train.compile.auto_budget import resolve_auto
from planner.train.compile.compiler import Compiler
from planner.train.compile.dynamic import DynamicStep
from planner.train.compile.replan import ReplannedStep
from planner.train.compile.sizes import SizePlans
from planner.train.compile.step import PlannedStep
from planner.train.distributed.wrappers import Unwrapped


@dataclass(frozen=True, slots=True)
class Planning:
    """The settings of ``planner.compile`` for the steps of a model.

    Attributes:
        wrapper: the model with its wrapper for one or several processes.
        loss_fn, on_progress: as in ``planner.compile``.
        settings: of capture, solves and runs.

    Raises:
        UsageError: settings are incompatible with each other, or with how the model is trained.
    """

    wrapper: Unwrapped
    loss_fn: LossFn | None
    settings: PlanSettings
    on_progress: OnProgress = None

    def __post_init__(self) -> None:
        check_compatible(self._features)
        if self.settings.options.places != bool(self.settings.other_devices):
            raise UsageError("other_devices= and options=['placement'] go together: give both, or leave both out")

    @property
    def _features(self) -> set[str]:
        """The features in these settings, and in how the model is trained, that may exclude others."""
        shared = not self.wrapper.ranks.is_alone
        around = {
            Feature.SEVERAL_PROCESSES: shared,
            Feature.DDP: not self.wrapper.can_replan,
            Feature.ON_CPU: any(parameter.device.type != "cuda" for parameter in self.wrapper.module.parameters()),
            Feature.SHARED_GPU: shared and any(parameter.device.type == "cuda" for parameter in self.wrapper.module.parameters()),
        }
        found = {feature for feature, there in around.items() if there}
        return self.settings.features | found

    def step(self, batch: Batch, budget: Budget) -> PlannedStep:
        """Return the planned step for batches like `batch`, as ``planner.compile`` does."""
        check_trains()
        batch = detach_batch(batch)
        budget = resolve_auto(budget, self.wrapper, batch)
        if isinstance(budget, Overhead):
            check_compatible(self.settings.features | {Feature.MAX_OVERHEAD})
        make, settings = partial(self._make, self._build_compiler()), self.settings
        return ReplannedStep(make, batch, budget, max_plans=settings.max_plans) if settings.replan else make(batch, budget)

    def _make(self, compiler: Compiler, batch: Batch, budget: Budget) -> PlannedStep:
        """Return the planned step, which plans for other sizes and modes itself, as far as the settings allow."""
        first, settings = _plan_size(compiler, batch, budget), self.settings
        others = replace(compiler, compare_eager=False) if settings.dynamic else compiler.plan_at_once()
        plan_size = partial(_plan_size, others)
        sizes = SizePlans(plan_size, Bytes(first.plan.budget_bytes), self.wrapper, max_plans=settings.max_plans)
        if settings.dynamic:
            return DynamicStep(first, batch, sizes)
        if not settings.replan and find_conflict(self._features | {Feature.VARYING_SIZES}) is None:
            first.take_smaller(sizes)
        if self.wrapper.mode is not None:
            first.take_modes(sizes)
        return first

    def _build_compiler(self) -> Compiler:
        make, settings = Compiler, self.settings
        if settings.kernels == "inductor":
            from planner.train.compile.inductor_compiler import InductorCompiler  # importing Inductor takes a second

            make = InductorCompiler
        device = next(self.wrapper.module.parameters()).device
        channels = None if settings.options.host_bytes is None else self.wrapper.create_channels(settings.options.host_bytes)
        if channels is not None:  # whose memory all plans share: the buffers of earlier ones count as free
            options = replace(settings.options, host_bytes=int(channels.memory.capacity_bytes))
            settings = replace(settings, options=options)
        if find_conflict(self._features | {Feature.ARENA}) is not None:
            settings = replace(settings, arena=False)
        if find_conflict(self._features | {Feature.REPLAN}) is not None:
            settings = replace(settings, replan=False)
        first = self.wrapper.ranks.is_first  # of several processes, only the first one reports
        return make(
            self.wrapper,
            self.loss_fn,
            settings,
            partial(CudaGraphs, device) if settings.cuda_graph else None,
            compare_eager=settings.compare_eager,
            channels=channels,
            slab=create_shared_slab(device),
            follows=settings.replan is not False,
            stages=Stages(*list_views(self.on_progress)) if first else Stages(),
        )


def check_trains() -> None:
    """Raise PlannerError if gradients are turned off, or a transform of torch.func or a block of rematerialize is active."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PlannerError(f"planner.compile is called under torch.{mode}(), where nothing is trained: call it outside")
    check_no_transform("planner.compile is called")
    check_no_block("planner.compile is called")


def _plan_size(compiler: Compiler, batch: Batch, budget: Budget) -> PlannedStep:
    """Return the step for batches like `batch`, from the cache if possible."""
    wrapper, cache = compiler.wrapper, compiler.settings.cache
    with compiler.stages.restart() as stages, leave_out_present_objects():
        compiler = replace(compiler, stages=stages)
        plans = wrapper.ranks.run_each(lambda: None if cache is None else PlanCache(cache))
        with wrapper.open():
            captured = compiler.capture(batch)
            compiler = compiler.choose_arena(captured.graph, budget)
            find_or_make = partial(_find_or_make, compiler, plans, captured, batch, budget)
            if not wrapper.together.is_alone:
                return find_or_make()
            return wrapper.ranks.run_first(
                find_or_make,
                share=lambda step: (step.plan, step.measured, step.improves),
                adopt=lambda shared: compiler.reuse(
                    compiler.adapt_capture(shared[0], captured, batch), batch, *shared[:2], improves=shared[2]
                ),
            )


def _find_or_make(compiler: Compiler, plans: PlanCache | None, captured: Capture, batch: Batch, budget: Budget) -> PlannedStep:
    wrapper, step = compiler.wrapper, None
    if plans is not None:
        dependencies = _collect_dependencies(captured, wrapper)
        path = plans.get_path({"budget": repr(budget), **dependencies, **compiler.settings.made_with})
        kept = wrapper.together.share(lambda: plans.load(path, budget))
        if kept is not None:
            try:
                planned = compiler.adapt_capture(kept, captured, batch)
                check_sizes(planned.graph, kept)
                step = compiler.reuse(planned, batch, kept, None)
            except PlannerError as error:
                warn_unusable(path, error)
    if step is None:
        step = compiler.make(captured, batch, budget)
        if plans is not None and wrapper.together.is_first:
            step.keep_with(lambda plan: plans.store(plan, path))
    compiler.stages.finish(plan_line(step.plan))
    return step


def _collect_dependencies(captured: Capture, wrapper: Unwrapped) -> dict[str, object]:
    """Return all that the schedule of a captured step depends on, except budget and options."""
    device = next(wrapper.module.parameters()).device
    sharding = wrapper.sharding.description
    return {
        **({"sharding": (sharding, wrapper.mode)} if sharding else {}),
        "graph": captured.graph.fingerprint,
        "static_bytes": captured.graph.static_bytes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else describe_device(device),
        "settings": collect_kernel_settings(device),
        "torch": torch.__version__,
    }

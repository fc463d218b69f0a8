"""The joint graph of a training step: Dynamo captures the forward pass, AOTAutograd adds the backward pass."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from graphs.errors import TraceError, first_line
from planner.capture.frontend.eager_ops import ASKING_FOR_COMPILERS, not_compiling, ops_as_eager
from planner.capture.frontend.effects import Effect, UnsettledError, check_effects, recording_effects, settle
from planner.capture.frontend.failures import failure, own_message, unlogged
from planner.capture.frontend.fakes import on_fakes
from planner.capture.frontend.lines import at, where_made
from planner.capture.frontend.tolerated import gradients_asked_for, install_hooks, no_cudnn_flags, unchecked_distributions
from planner.capture.frontend.unchanged import restored
from planner.capture.guards.branches import Branches, asks_for_values
from planner.capture.guards.conditions import DataGuards
from planner.capture.guards.messages import readable
from planner.capture.guards.python_random import no_python_draws
from planner.capture.guards.python_values import Guards, build_guards, guarded_names
from planner.capture.guards.replaced_names import Frames, recording_frames
from planner.capture.rewrites.cuda_attention import attention_as_on_cuda
from planner.capture.rewrites.outputs import CHECKS
from planner.capture.rewrites.own_generators import own_generator, own_generators
from planner.capture.rewrites.sparse import sparse_matrices_in_parts, without_sparse_buffers
from planner.capture.signature import Batch, arguments, call, leaves
from planner.capture.step import TrainingStep
from planner.torch_private.capture import (
    GUARD_SETTINGS,
    CaptureOutput,
    JointWithDescriptors,
    TracingContext,
    aot_export_joint_with_descriptors,
    compiling_state,
    create_fx_graph_from_captured_output,
    dynamo_config,
    dynamo_phase,
    forget_compiled,
    fullgraph_capture,
    functorch_config,
    get_traced_fn,
    tracing,
)
from planner.torch_private.core import FakeTensor, disable_current_modes, kept_in_graphs

T = TypeVar("T")
# What makes something of a module that Dynamo captured, called in its tracing context.
Make = Callable[[ExitStack, fx.GraphModule, tuple[object, ...], dict[str, object]], T]
# What makes a joint graph, called as ``aot_export_joint_with_descriptors``.
Export = Callable[..., JointWithDescriptors]
Traced = tuple[JointWithDescriptors, Guards | None, Branches | None]


def joint_graph(step: TrainingStep, batch: Batch, *, as_on_cuda: bool) -> Traced:
    """The joint graph of `step`, its guards, and the branches on data that it takes, if any.

    Python values that the first call of the step sets are as after it.

    Args:
        as_on_cuda: choose the kernels that CUDA would.

    Raises:
        TraceError: the step cannot be captured as one graph.
    """

    def trace() -> Traced:
        with ops_as_eager(), attention_as_on_cuda() if as_on_cuda else nullcontext():
            return _with_branches(step, batch)

    return _settled(step, batch, trace)


def compiled_graph(
    step: TrainingStep, batch: Batch, make: Callable[[Export], Make[T]]
) -> tuple[T, Guards | None, DataGuards | None]:
    """What is made of `step` as ``torch.compile`` captures it, its guards, and those of the branches on data that it takes.

    Args:
        make: given what makes a joint graph of a module, what makes something of the module.

    Raises:
        TraceError: the step cannot be captured as one graph.
    """

    def trace() -> tuple[T, Guards | None, DataGuards | None]:
        stopped: Exception | None = None
        traced = None
        try:
            traced = _traced(step, batch, None, make(_export_for_inductor))
        except UnsettledError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever stops it, the user gets one line
            stopped = error
        if stopped is not None and "data-dependent" not in str(stopped).lower():
            raise failure(stopped, step, batch, None)
        return _compiled_with_branches(step, batch, make) if traced is None else (*traced, None)

    return _settled(step, batch, trace)


def _export_for_inductor(*args: Any, **options: Any) -> JointWithDescriptors:
    joint = aot_export_joint_with_descriptors(*args, **options)
    for node in joint.graph_module.graph.nodes:
        if own_generator(node) is not None:
            raise TraceError(
                f"{at(where_made(node.meta.get('stack_trace')))} gives an op a generator, which Inductor's kernels do not draw "
                "from: leave it out, or kernels='inductor'"
            )
    return joint


def _compiled_with_branches(
    step: TrainingStep, batch: Batch, make: Callable[[Export], Make[T]]
) -> tuple[T, Guards | None, DataGuards | None]:
    """As ``compiled_graph``, with the branches that `batch` takes."""
    branches = Branches(batch)
    conditions: list[DataGuards | None] = []

    def export(*args: Any, **options: Any) -> JointWithDescriptors:
        with branches.followed():
            joint = _export_for_inductor(*args, **options)
        with disable_current_modes():  # what decides them is computed on the batch, and not on fake tensors
            conditions.append(branches.guards(joint.graph_module.graph, step, batch))
        return joint

    return *_followed(step, batch, branches, make(export)), conditions[-1]


def _settled(step: TrainingStep, batch: Batch, trace: Callable[[], T]) -> T:
    """What `trace` returns, at last; the step and the batch are afterwards as they were."""

    def once() -> T:
        with restored(step, batch), unlogged():
            return trace()

    try:
        return once()
    except UnsettledError as unsettled:
        args, kwargs = arguments(batch)

        @contextmanager
        def called() -> Iterator[None]:
            with restored(step, batch), torch.no_grad():
                call(step, batch)
                yield

        settle(unsettled.effects, called, {"self": step, "args": args, "kwargs": kwargs}, TrainingStep.forward.__globals__)
    except TraceError as error:
        if "maybe_install_capturing_hooks" not in str(error):
            raise
        install_hooks(step)  # they stay, as after the model's first step
    try:
        return once()
    except UnsettledError as unsettled:
        raise TraceError(f"{unsettled} changes in the second step too: run the model before it is planned") from unsettled


def _with_branches(step: TrainingStep, batch: Batch) -> Traced:
    """The joint graph of `step`, its guards, and the branches on data that were taken, if any.

    Every node carries fake values, inputs and outputs descriptors. Where a model asks whether it is compiled, and the way
    that it takes in eager PyTorch can be captured without looking at data, that is the way; each part of it that asked last
    before an attempt failed takes the other way in the next. To know values takes longer than to do without, which most
    models can.
    """
    found = _attempts(step, batch)
    if isinstance(found, tuple):
        return found
    if isinstance(found, UnsettledError):
        raise found
    if found and (known := own_message(found)):
        raise TraceError(known) from found
    branches = Branches(batch)
    return *_followed(step, batch, branches, partial(_joint, branches=branches)), branches


def _followed(step: TrainingStep, batch: Batch, branches: Branches, make: Make[T]) -> tuple[T, Guards | None]:
    """What `make` makes of `step` with the branches that it takes, and its guards.

    Raises:
        TraceError: whatever stops the capture, in one line; an exception of the user's own code is raised as it is.
    """
    try:
        traced = _traced(step, batch, branches, make)
    except UnsettledError:
        raise
    except Exception as error:  # noqa: BLE001
        stopped = error
    else:
        assert traced is not None
        return traced
    raise failure(stopped, step, batch, branches)


def _attempts(step: TrainingStep, batch: Batch) -> Traced | Exception | None:
    """What comes of attempts in which the model hears that it is not compiled, as far as it can."""
    told = set(ASKING_FOR_COMPILERS)
    while True:
        with not_compiling(told) as asked:
            found = _attempt(step, batch)
        if isinstance(found, tuple) or not asked:
            return found
        if found is None or isinstance(found, UnsettledError) or own_message(found):
            return _attempt(step, batch)
        told.add(asked[-1])


def _attempt(step: TrainingStep, batch: Batch) -> Traced | Exception | None:
    """What ``_traced`` returns without knowing any data, or raises; another attempt may do better."""
    try:
        traced = _traced(step, batch, None, _joint)
    except Exception as error:  # noqa: BLE001
        return error
    return None if traced is None else (*traced, None)


def _joint(
    stack: ExitStack,
    module: fx.GraphModule,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    branches: Branches | None = None,
) -> JointWithDescriptors:
    # A training loop calls backward() outside autocast. Without the shape environment every size is a plain number.
    stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
    with branches.followed() if branches else nullcontext():
        return aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=True)


def _traced(step: TrainingStep, batch: Batch, branches: Branches | None, make: Make[T]) -> tuple[T, Guards | None] | None:
    """What `make` makes of `step` as Dynamo captures it, with its guards; None where `branches` are needed, and not given."""
    args, kwargs = arguments(batch)
    with ExitStack() as stack:
        _settings(stack)
        with ExitStack() as dynamo:
            dynamo.enter_context(no_python_draws())
            dynamo.enter_context(gradients_asked_for())
            dynamo.enter_context(no_cudnn_flags(device_of(step, batch)))
            dynamo.enter_context(unchecked_distributions())
            if branches:
                dynamo.enter_context(branches.taken())
            matrices = dynamo.enter_context(sparse_matrices_in_parts())
            generators = dynamo.enter_context(own_generators())
            effects = dynamo.enter_context(recording_effects())
            frames = dynamo.enter_context(recording_frames())
            with compiling_state(), dynamo_phase("fullgraph_capture"):
                output = fullgraph_capture(step, args, kwargs)
        module = create_fx_graph_from_captured_output(output, step, args, kwargs)
        forget_compiled(output)
        matrices.attach(module)
        if branches:
            branches.settle(module)
        elif asks_for_values(module.graph):
            return None
        stack.enter_context(tracing(TracingContext(module.meta["fake_mode"])))
        with kept_in_graphs(CHECKS), without_sparse_buffers(module):
            made = make(stack, module, args, kwargs)
        with disable_current_modes():  # what guards look at is real
            return made, _guards(output, effects, frames, [*generators, *matrices.names], step, batch)


def _settings(stack: ExitStack) -> None:
    """Enter the settings that steps are traced with."""
    stack.enter_context(torch.enable_grad())
    stack.enter_context(
        dynamo_config.patch(
            assume_static_by_default=True,
            automatic_dynamic_shapes=False,
            allow_rnn=True,
            ignore_logger_methods=logging_methods(),
            # What a planned step does not do is looked at by planner.capture.frontend.effects.
            replay_side_effects=False,
            skip_nnmodule_hook_guards=False,
            **GUARD_SETTINGS,
        )
    )


def _guards(
    output: CaptureOutput,
    effects: list[Effect],
    frames: Frames,
    constants: Iterable[str],
    step: TrainingStep,
    batch: Batch,
) -> Guards | None:
    """The guards of what was captured; None where it is on fake tensors, and never executed."""
    args, kwargs = arguments(batch)
    local = {"self": step, "args": args, "kwargs": kwargs}
    scope = output.graph_capture_output.f_globals
    with on_fakes(step, batch) as run:
        check_effects(effects, guarded_names(output), run, local, scope)
    if any(isinstance(value, FakeTensor) for value in (*step.parameters(), *step.buffers(), *leaves(batch))):
        return None
    try:
        guards = build_guards(output, get_traced_fn(step)[0].__code__, frames, step, args, kwargs, constants)
    except AssertionError as error:
        raise TraceError(
            f"the step reads a value that is another each time: {first_line(error)}; compute it outside of what is planned, and "
            "pass it with the batch as a tensor"
        ) from error
    for outside in guards.outside:
        if isinstance(outside.value, torch.Tensor) and outside.value.requires_grad:
            name = readable(outside.name, local, scope)
            raise TraceError(
                f"{name} requires a gradient, and is no parameter of the model: a plan would give it none; make it one of the "
                "model, or make the loss function an nn.Module that holds it"
            )
    return guards


def logging_methods() -> set[object]:
    """Return what writes to a log, methods that libraries have added included: no part of the graph."""
    levels = ("debug", "info", "warning", "error", "critical", "exception", "log")
    return {getattr(logging.Logger, name) for name in dir(logging.Logger) if name.startswith(levels)}


def device_of(model: nn.Module, batch: Batch) -> torch.device:
    """The one device that `model` and `batch` are on.

    Raises:
        TraceError: there are several, or none.
    """
    tensors = [*model.parameters(), *model.buffers(), *leaves(batch)]
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor)}
    if len(devices) != 1:
        raise TraceError(f"model and batch must be on one device, found {', '.join(sorted(map(str, devices))) or 'no tensor'}")
    return devices.pop()

"""Capture of a model's training step as a static graph with the program that executes it.

Dynamo captures the step as one graph, AOTAutograd adds the backward pass (the *joint graph*);
``graphs.trace_lower`` turns that into ops and storages. Nothing is executed: on fake tensors a
model of any size is captured without allocating it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture, get_traced_fn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._export.utils import _compiling_state_context
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from graphs.errors import PlannerError, TraceError
from graphs.ir import Kind
from graphs.profile_unchanged import restored
from graphs.trace_attention import attention_as_on_cuda
from graphs.trace_branches import Branches, asks_for_values
from graphs.trace_drawn import no_python_draws
from graphs.trace_dropout import dropout_as_eager
from graphs.trace_eager import ASKING_FOR_COMPILERS, not_compiling, ops_as_eager, refuse_kernels_of_the_cpu, separate_biases
from graphs.trace_effects import Effect, UnsettledError, check_effects, recording_effects, settle
from graphs.trace_fakes import on_fakes
from graphs.trace_guards import Guards, build_guards, guarded_names, readable
from graphs.trace_layouts import layouts_as_eager
from graphs.trace_lower import Capture, StaticTensors, allocated_bytes, lower
from graphs.trace_outputs import fix_outputs
from graphs.trace_signature import Batch, Signature, arguments, call, leaves, take_apart, target_names
from graphs.trace_steps import gradients_asked_for, install_hooks, no_cudnn_flags

LossFn = Callable[..., object]

# Copies of the parameters that an optimizer keeps from the first step on.
OPTIMIZER_COPIES = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
# AdamW counts the steps of each parameter in a tensor, which is on the CPU wherever the parameter is.
_COUNTER_BYTES = {"adamw": 4}


class TrainingStep(nn.Module):
    """One step's loss, and whatever else the loss function returns, detached.

    Called by position, the last item is the loss function's target: ``loss_fn(model(*inputs), target)``. Called by
    name, the loss function gets what it names, the model the others: ``loss_fn(model(**inputs), **targets)``.
    Without a loss function the model gets all, and returns the loss itself, a tuple that begins with it, a dict
    with a "loss", or an object with an attribute ``loss``.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._target_names = target_names(loss_fn)

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
        """The loss, and what else is returned (``take_apart``)."""
        if self.loss_fn is None:
            returned = self.model(*args, **kwargs)
        elif args:
            returned = self.loss_fn(self.model(*args[:-1]), args[-1])
        else:
            targets = {name: value for name, value in kwargs.items() if name in self._target_names}
            inputs = {name: value for name, value in kwargs.items() if name not in self._target_names}
            returned = self.loss_fn(self.model(**inputs), **targets)
        loss, rest = take_apart(returned)
        return loss, pytree.tree_map(torch.Tensor.detach, rest)


def capture(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str = "none",
    accumulate: bool = False,
    as_on_cuda: bool = False,
    name: str = "",
) -> Capture:
    """Capture one training step of `model` on `batch`.

    Args:
        loss_fn: what makes the loss of the model's output, or None if the model returns it: see ``TrainingStep``.
        batch: tensors (or nested lists, tuples and dicts of them), real or fake: a sequence of what is given by
            position, or a mapping of what is given by name.
        optimizer: none, sgd, momentum or adamw: its state counts as static bytes.
        accumulate: gradients of earlier batches are in memory as well.
        as_on_cuda: choose the kernels that CUDA would (attention), for planning without it.
        name: of the model, for the provenance.

    Raises:
        TraceError: the step cannot be captured as one static graph, or has no scalar loss to train on.
    """
    if optimizer not in OPTIMIZER_COPIES:
        raise TraceError(f"unknown optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZER_COPIES)}")
    if torch.is_inference_mode_enabled():
        raise TraceError("under torch.inference_mode() nothing is trained, so that there is nothing to plan: call it outside")
    step = TrainingStep(model, loss_fn)
    joint, guards, branches = _settled_graph(step, batch, as_on_cuda=as_on_cuda)
    graph = joint.graph_module.graph
    conditions = branches.guards(graph, step, batch) if branches else None
    if as_on_cuda:
        refuse_kernels_of_the_cpu(graph)
    separate_biases(graph)
    layouts_as_eager(graph)
    fix_outputs(graph)
    if not as_on_cuda:
        dropout_as_eager(graph)
    device = _device(model, batch)
    planned_device = torch.device("cuda") if as_on_cuda else device
    statics = StaticTensors(step, batch, planned_device)
    trained = [allocated_bytes(p.nbytes, planned_device) for p in step.parameters() if p.requires_grad]
    trained_bytes = sum(trained)
    counted_bytes = _COUNTER_BYTES.get(optimizer, 0) * len(trained) if planned_device.type == "cpu" else 0
    statics.reserve("optimizer_state", Kind.OPTIMIZER_STATE, OPTIMIZER_COPIES[optimizer] * trained_bytes + counted_bytes)
    statics.reserve("accumulated_gradients", Kind.ACCUMULATED_GRADIENT, accumulate * trained_bytes)
    provenance = {
        "model": name or type(model).__name__,
        "inputs": [_describe(leaf) for leaf in leaves(batch)],
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_dtype": "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        "device": planned_device.type,
        "optimizer": optimizer,
        "accumulate": accumulate,
        "torch": torch.__version__,
    }
    signature = Signature.of(batch, joint.out_spec)
    lowered = lower(graph, statics, signature, generator=_generator(device), provenance=provenance)
    return replace(lowered, guards=guards, conditions=conditions)


_Traced = tuple[JointWithDescriptors, Guards | None, Branches | None]


def _settled_graph(step: TrainingStep, batch: Batch, *, as_on_cuda: bool) -> _Traced:
    """What ``_joint_graph`` returns, of a step whose Python values are as after its first call."""
    try:
        return _joint_graph(step, batch, as_on_cuda=as_on_cuda)
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
        return _joint_graph(step, batch, as_on_cuda=as_on_cuda)
    except UnsettledError as unsettled:
        raise TraceError(f"{unsettled} changes in the second step too: run the model before it is planned") from unsettled


def _joint_graph(step: TrainingStep, batch: Batch, *, as_on_cuda: bool) -> _Traced:
    """What ``_with_branches`` returns; the step and the batch are afterwards as they were."""
    with restored(step, batch), ExitStack() as stack:
        stack.enter_context(ops_as_eager())
        if as_on_cuda:
            stack.enter_context(attention_as_on_cuda())
        return _with_branches(step, batch)


def _with_branches(step: TrainingStep, batch: Batch) -> _Traced:
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
    if found and (known := _own_message(found)):
        raise TraceError(known) from found
    branches = Branches(batch)
    try:
        traced = _traced(step, batch, branches)
    except UnsettledError:
        raise
    except Exception as error:  # whatever stops the capture, the user gets one line
        raise TraceError(_why(error, step, batch, branches)) from error
    assert traced is not None
    return traced


def _attempts(step: TrainingStep, batch: Batch) -> _Traced | Exception | None:
    """What comes of attempts in which the model hears that it is not compiled, as far as it can."""
    told = set(ASKING_FOR_COMPILERS)
    while True:
        with not_compiling(told) as asked:
            found = _attempt(step, batch)
        if isinstance(found, tuple) or not asked:
            return found
        if found is None or isinstance(found, UnsettledError) or _own_message(found):
            return _attempt(step, batch)
        told.add(asked[-1])


def _attempt(step: TrainingStep, batch: Batch) -> _Traced | Exception | None:
    """What ``_traced`` returns without knowing any data, or raises; another attempt may do better."""
    try:
        return _traced(step, batch, None)
    except Exception as error:  # noqa: BLE001
        return error


def _traced(step: TrainingStep, batch: Batch, branches: Branches | None) -> _Traced | None:
    """The joint graph of `step` with its guards; None where `branches` are needed for it, and not given."""
    args, kwargs = arguments(batch)
    with ExitStack() as stack:
        _settings(stack)
        with ExitStack() as dynamo:
            dynamo.enter_context(no_python_draws())
            dynamo.enter_context(gradients_asked_for())
            dynamo.enter_context(no_cudnn_flags(_device(step, batch)))
            if branches:
                dynamo.enter_context(branches.taken())
            effects = dynamo.enter_context(recording_effects())
            with _compiling_state_context(), get_metrics_context(), dynamo_timed("fullgraph_capture"):
                output = fullgraph_capture(step, args, kwargs)
        module = create_fx_graph_from_captured_output(output, step, args, kwargs)
        if branches:
            branches.settle(module)
        elif asks_for_values(module.graph):
            return None
        stack.enter_context(tracing(TracingContext(module.meta["fake_mode"])))
        # Without the shape environment every size is a plain number.
        with branches.followed() if branches else nullcontext():
            joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=True)
        return joint, _guards(output, effects, step, batch), branches


def _settings(stack: ExitStack) -> None:
    """How steps are traced."""
    stack.enter_context(torch.enable_grad())
    stack.enter_context(
        torch._dynamo.config.patch(
            assume_static_by_default=True,
            automatic_dynamic_shapes=False,
            allow_rnn=True,
            ignore_logger_methods=_logging_methods(),
            # What a planned step does not do is looked at by graphs.trace_effects.
            replay_side_effects=False,
            skip_nnmodule_hook_guards=False,
        )
    )
    # A training loop calls backward() outside autocast.
    stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))


def _guards(output: CaptureOutput, effects: list[Effect], step: TrainingStep, batch: Batch) -> Guards | None:
    """The guards of what was captured; None where it is on fake tensors, and never executed."""
    args, kwargs = arguments(batch)
    local = {"self": step, "args": args, "kwargs": kwargs}
    scope = output.graph_capture_output.f_globals
    with on_fakes(step, batch) as run:
        check_effects(effects, guarded_names(output), run, local, scope)
    if any(isinstance(value, FakeTensor) for value in (*step.parameters(), *step.buffers(), *leaves(batch))):
        return None
    try:
        guards = build_guards(output, get_traced_fn(step)[0].__code__, step, args, kwargs)
    except AssertionError as error:
        raise TraceError(
            f"the step reads a value that is another each time: {_first_line(error)}; compute it outside of what is planned, and "
            "pass it with the batch as a tensor"
        ) from error
    for outside in guards.outside:
        if outside.tensor.requires_grad:
            name = readable(outside.name, local, scope)
            raise TraceError(
                f"{name} requires a gradient, and is no parameter of the model: a plan would give it none; make it one of the "
                "model, or make the loss function an nn.Module that holds it"
            )
    return guards


def _logging_methods() -> set[object]:
    """What writes to a log, methods that libraries have added included: no part of the graph."""
    levels = ("debug", "info", "warning", "error", "critical", "exception", "log")
    return {getattr(logging.Logger, name) for name in dir(logging.Logger) if name.startswith(levels)}


def _why(error: Exception, step: TrainingStep, batch: Batch, branches: Branches) -> str:
    """What stopped the capture, in one line."""
    if known := _own_message(error) or branches.refusal:
        return known
    try:
        with on_fakes(step, batch) as run:
            run()
    except TraceError as own:
        return str(own)
    except Exception:  # noqa: BLE001  # the error of the capture says more
        pass
    if "expected to have an entirely functional graph" in str(error):
        return (
            "the step writes in place to a tensor that is neither a parameter, a buffer nor an input, which cannot be planned: "
            "make it a buffer (register_buffer)"
        )
    frames = [line.strip() for line in str(error).splitlines() if line.lstrip().startswith("File ")]
    where = f" ({frames[-1]})" if frames else ""
    kind = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return f"the step cannot be captured as one graph: {kind}{_first_line(error)}{where}"


def _own_message(error: BaseException) -> str | None:
    """What the planner says of an error that it raised inside the capture; None of others."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PlannerError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else str(cause)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _describe(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _device(model: nn.Module, batch: Batch) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *leaves(batch)]
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor)}
    if len(devices) != 1:
        raise TraceError(f"model and batch must be on one device, found {', '.join(sorted(map(str, devices))) or 'no tensor'}")
    return devices.pop()


def _generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on `device` draw from."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator

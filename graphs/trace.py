"""Capture of a model's training step as a static graph with the program that executes it.

Dynamo captures the step as one graph, AOTAutograd adds the backward pass (the *joint graph*);
``graphs.trace_lower`` turns that into ops and storages. Nothing is executed: on fake tensors a
model of any size is captured without allocating it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphs.errors import TraceError
from graphs.ir import Kind
from graphs.trace_attention import attention_as_on_cuda
from graphs.trace_lower import Capture, StaticTensors, allocated_bytes, lower
from graphs.trace_outputs import fix_outputs

LossFn = Callable[..., object]

# Copies of the parameters that an optimizer keeps from the first step on.
OPTIMIZER_COPIES = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}


class TrainingStep(nn.Module):
    """``forward(*batch)`` is the loss, followed by whatever else the loss function returns, detached.

    With a loss function the last item of the batch is its target: ``loss_fn(model(*inputs), target)``;
    without one the model returns the loss itself: ``model(*batch)``.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *batch: object) -> tuple[torch.Tensor, ...]:
        """The loss and what else is returned."""
        if self.loss_fn is None:
            returned = self.model(*batch)
        else:
            returned = self.loss_fn(self.model(*batch[:-1]), batch[-1])
        values = returned if isinstance(returned, tuple) else (returned,)
        for value in values:
            if not isinstance(value, torch.Tensor):
                raise TraceError(
                    f"the loss function returns a {type(value).__name__} where the loss or another tensor is expected: "
                    "return a scalar tensor, or a tuple of tensors that begins with it"
                )
        return (values[0], *(extra.detach() for extra in values[1:]))


def capture(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Sequence[object],
    *,
    optimizer: str = "none",
    accumulate: bool = False,
    as_on_cuda: bool = False,
    name: str = "",
) -> Capture:
    """Capture one training step of `model` on `batch`.

    Args:
        loss_fn: called as ``loss_fn(model(*inputs), target)`` with the last item of `batch` as
            target; None if ``model(*batch)`` returns the loss. Returns a scalar, or a tuple of a
            scalar and further tensors.
        batch: tensors (or nested lists, tuples and dicts of them), real or fake.
        optimizer: none, sgd, momentum or adamw: its state counts as static bytes.
        accumulate: gradients of earlier batches are in memory as well.
        as_on_cuda: choose the kernels that CUDA would (attention), for planning without it.
        name: of the model, for the provenance.

    Raises:
        TraceError: the step cannot be captured as one static graph, or has no scalar loss to train on.
    """
    if optimizer not in OPTIMIZER_COPIES:
        raise TraceError(f"unknown optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZER_COPIES)}")
    step = TrainingStep(model, loss_fn)
    with ExitStack() as stack:
        if as_on_cuda:
            stack.enter_context(attention_as_on_cuda())
        joint = _joint_graph(stack, step, tuple(batch))
    fix_outputs(joint)
    device = _device(model, batch)
    planned_device = torch.device("cuda") if as_on_cuda else device
    statics = StaticTensors(step, batch, planned_device)
    trained_bytes = sum(allocated_bytes(p.nbytes, planned_device) for p in model.parameters() if p.requires_grad)
    statics.reserve("optimizer_state", Kind.OPTIMIZER_STATE, OPTIMIZER_COPIES[optimizer] * trained_bytes)
    statics.reserve("accumulated_gradients", Kind.ACCUMULATED_GRADIENT, accumulate * trained_bytes)
    provenance = {
        "model": name or type(model).__name__,
        "inputs": [_describe(leaf) for leaf in pytree.tree_leaves(tuple(batch))],
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_dtype": "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        "device": planned_device.type,
        "optimizer": optimizer,
        "accumulate": accumulate,
        "torch": torch.__version__,
    }
    return lower(joint, statics, generator=_generator(device), provenance=provenance)


def _joint_graph(stack: ExitStack, step: TrainingStep, batch: tuple[object, ...]) -> fx.Graph:
    """The joint graph of `step`; every node carries fake values, inputs and outputs descriptors."""
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False, allow_rnn=True))
    try:
        module = dynamo_graph_capture_for_export(step)(*batch)
        stack.enter_context(tracing(TracingContext(module.meta["fake_mode"])))
        # Without the shape environment every size is a plain number.
        joint = aot_export_joint_with_descriptors(stack, module, batch, ignore_shape_env=True)
    except Exception as error:  # whatever stops the capture, the user gets one line
        raise TraceError(_why(error, step, batch)) from error
    return joint.graph_module.graph


def _why(error: Exception, step: TrainingStep, batch: tuple[object, ...]) -> str:
    """What stopped the capture, in one line."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            step(*batch)
    except TraceError as own:
        return str(own)
    except Exception:  # noqa: BLE001  # the error of the capture says more
        pass
    frames = [line.strip() for line in str(error).splitlines() if line.lstrip().startswith("File ")]
    where = f" ({frames[-1]})" if frames else ""
    kind = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return f"the step cannot be captured as one graph: {kind}{_first_line(error)}{where}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _describe(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _device(model: nn.Module, batch: Sequence[object]) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(tuple(batch))]
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor)}
    if len(devices) != 1:
        raise TraceError(f"model and batch must be on one device, found {', '.join(sorted(map(str, devices))) or 'no tensor'}")
    return devices.pop()


def _generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on `device` draw from."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator

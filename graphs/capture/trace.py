"""Capture of a model's training step as a static graph with the program that executes it.

Dynamo captures the step as one graph, AOTAutograd adds the backward pass (the *joint graph*);
``graphs.capture.lower`` turns that into ops and storages. Nothing is executed: on fake tensors a
model of any size is captured without allocating it.
"""

from dataclasses import replace

import torch
from torch import nn

from graphs.capture.dropout import dropout_as_eager
from graphs.capture.eager_ops import refuse_kernels_of_the_cpu, separate_biases
from graphs.capture.joint import device_of, joint_graph
from graphs.capture.layouts import layouts_as_eager
from graphs.capture.lower import Capture, lower
from graphs.capture.outputs import fix_outputs
from graphs.capture.signature import Batch, Signature, leaves
from graphs.capture.statics import StaticTensors, allocated_bytes
from graphs.capture.step import LossFn, TrainingStep
from graphs.errors import TraceError
from graphs.ir import Kind
from graphs.optimizers import OPTIMIZERS


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
        optimizer: a name in ``graphs.optimizers``: its state counts as static bytes.
        accumulate: gradients of earlier batches are in memory as well.
        as_on_cuda: choose the kernels that CUDA would (attention), for planning without it.
        name: of the model, for the provenance.

    Raises:
        TraceError: the step cannot be captured as one static graph, or has no scalar loss to train on.
    """
    if optimizer not in OPTIMIZERS:
        raise TraceError(f"unknown optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    if torch.is_inference_mode_enabled():
        raise TraceError("under torch.inference_mode() nothing is trained, so that there is nothing to plan: call it outside")
    step = TrainingStep(model, loss_fn)
    joint, guards, branches = joint_graph(step, batch, as_on_cuda=as_on_cuda)
    graph = joint.graph_module.graph
    conditions = branches.guards(graph, step, batch) if branches else None
    if as_on_cuda:
        refuse_kernels_of_the_cpu(graph)
    separate_biases(graph)
    layouts_as_eager(graph)
    fix_outputs(graph)
    if not as_on_cuda:
        dropout_as_eager(graph)
    device = device_of(model, batch)
    planned_device = torch.device("cuda") if as_on_cuda else device
    statics = StaticTensors(step, batch, planned_device)
    trained = [allocated_bytes(p.nbytes, planned_device) for p in step.parameters() if p.requires_grad]
    trained_bytes = sum(trained)
    state = OPTIMIZERS[optimizer]
    counted_bytes = state.counter_bytes * len(trained) if planned_device.type == "cpu" else 0
    statics.reserve("optimizer_state", Kind.OPTIMIZER_STATE, state.copies * trained_bytes + counted_bytes)
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


def _describe(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on `device` draw from."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator

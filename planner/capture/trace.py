"""Capture of a model's training step as a static graph, with the program that executes it.

Dynamo captures the step as one graph, AOTAutograd adds the backward pass (the *joint graph*), and
``planner.capture.lowering.lower`` turns that into ops and storages. Nothing is executed: on fake tensors a
model of any size is captured without allocating it.
"""

import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from planner.capture.frontend.eager_ops import refuse_cpu_only_kernels, separate_biases
from planner.capture.frontend.joint import capture_compiled, capture_joint_graph, find_device
from planner.capture.frontend.preserved_state import initialize_lazy_layers
from planner.capture.lowering.lower import Capture, lower
from planner.capture.lowering.statics import StaticTensors, compute_allocated_bytes
from planner.capture.program.draws import get_default_generator
from planner.capture.rewrites.constants import read_constants
from planner.capture.rewrites.dropout import replace_dropout
from planner.capture.rewrites.layouts import record_eager_layouts
from planner.capture.rewrites.outputs import fix_outputs
from planner.capture.signature import Batch, Signature, check_batch, list_leaves
from planner.capture.step import LossFn, TrainingStep, check_module, check_tensors
from planner.graphs.errors import TraceError
from planner.graphs.ir import Kind
from planner.graphs.optimizers import MeasuredOptimizer, get_optimizer_memory
from planner.graphs.provenance import Provenance

if TYPE_CHECKING:
    from planner.capture.kernels.variants import CompileVariant


def capture(  # noqa: PLR0913  # what a step consists of, and how it is captured
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    optimizer: str | MeasuredOptimizer = "none",
    accumulate: bool = False,
    as_on_cuda: bool = False,
    name: str = "",
    numbers: Collection[str] | None = (),
    looks: bool = True,
) -> Capture:
    """Capture one training step of `model` on `batch`.

    Args:
        loss_fn: a function from the model's output to the loss, or None if the model returns it: see ``TrainingStep``.
        batch: real or fake tensors, or nested lists, tuples and dicts of them: a sequence of positional arguments, or a mapping
            of named ones.
        optimizer: a name in ``planner.graphs.optimizers``, or a measured one: its state counts as static bytes.
        accumulate: count gradients of earlier batches as memory too.
        as_on_cuda: choose the kernels that CUDA would (attention), to plan without a GPU.
        name: name of the model, for the provenance.
        numbers: names of numbers that the program reads in each step, as Dynamo writes them; None if it can read none.
        looks: let libraries look at the masks in the batch, as in eager PyTorch: steps with other masks are then refused.

    Raises:
        TraceError: the step cannot be captured as one static graph, or has no scalar loss to train on.
    """
    step = _step(model, loss_fn, batch)
    device = find_device(model, batch)
    joint, guards, branches = capture_joint_graph(step, batch, as_on_cuda=as_on_cuda, numbers=numbers, looks=looks)
    graph = joint.graph_module.graph
    conditions = branches.build_guards(graph, step, batch) if branches else None
    if as_on_cuda:
        refuse_cpu_only_kernels(graph)
    separate_biases(graph)
    read_constants(graph)
    record_eager_layouts(graph)
    fix_outputs(graph)
    if not as_on_cuda:
        replace_dropout(graph)
    planned_device = torch.device("cuda") if as_on_cuda else device
    statics = _build_statics(step, batch, planned_device, optimizer, accumulate=accumulate)
    provenance = _build_provenance(model, batch, planned_device, optimizer, accumulate=accumulate, name=name)
    signature = Signature.of(batch, joint.out_spec, set() if guards is None else guards.find_unread(batch))
    lowered = lower(graph, statics, signature, generator=get_default_generator(device), provenance=provenance)
    if guards is not None and guards.numbers is not None:
        lowered = replace(lowered, program=replace(lowered.program, numbers=guards.numbers.count))
    return replace(lowered, guards=guards, conditions=conditions)


def capture_kernels(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    *,
    variant: "CompileVariant",
    optimizer: str | MeasuredOptimizer = "none",
    accumulate: bool = False,
    name: str = "",
) -> Capture:
    """Capture one training step of `model` as the kernels that Inductor compiles.

    Args:
        model, loss_fn, batch, optimizer, accumulate, name: as in ``capture``; nothing is fake.

    Raises:
        TraceError: as in ``capture``; or Inductor cannot compile the step, or its code cannot be planned.
    """
    from planner.capture.kernels.halves import compile_halves  # importing Inductor takes a second
    from planner.capture.kernels.lower import lower_step

    step = _step(model, loss_fn, batch)
    begin = time.perf_counter()
    halves, guards, conditions = capture_compiled(
        step, batch, lambda export: partial(compile_halves, variant=variant, export=export)
    )
    device = find_device(model, batch)
    statics = _build_statics(step, batch, device, optimizer, accumulate=accumulate)
    provenance = _build_provenance(model, batch, device, optimizer, accumulate=accumulate, name=name)
    seconds = round(time.perf_counter() - begin, 2)
    provenance = provenance.record(kernels="inductor", variant=variant, compile_seconds=seconds)
    signature = Signature.of(batch, halves.joint.out_spec)
    lowered = lower_step(halves, statics, signature, generator=get_default_generator(device), provenance=provenance)
    return replace(lowered, guards=guards, conditions=conditions, whole=halves.build_call(step))


def _step(model: nn.Module, loss_fn: LossFn | None, batch: Batch) -> TrainingStep:
    check_module(model)
    check_batch(batch)
    if torch.is_inference_mode_enabled():
        raise TraceError("under torch.inference_mode() nothing is trained, so that there is nothing to plan: call it outside")
    step = TrainingStep(model, loss_fn)
    initialize_lazy_layers(step, batch)
    check_tensors(model)
    return step


def _build_statics(
    step: TrainingStep, batch: Batch, device: torch.device, optimizer: str | MeasuredOptimizer, *, accumulate: bool
) -> StaticTensors:
    """Return the static tensors of the step; `device` is the one that is planned for."""
    statics = StaticTensors(step, batch, device)
    trained = [p.nbytes for p in step.parameters() if p.requires_grad]
    state = get_optimizer_memory(optimizer).list_state_sizes(trained, is_cpu=device.type == "cpu")
    statics.reserve("optimizer_state", Kind.OPTIMIZER_STATE, sum(compute_allocated_bytes(size, device) for size in state))
    gradients_bytes = sum(compute_allocated_bytes(size, device) for size in trained)
    statics.reserve("accumulated_gradients", Kind.ACCUMULATED_GRADIENT, accumulate * gradients_bytes)
    return statics


def _build_provenance(
    model: nn.Module, batch: Batch, device: torch.device, optimizer: str | MeasuredOptimizer, *, accumulate: bool, name: str
) -> Provenance:
    recorded = {
        "model": name or type(model).__name__,
        "inputs": [_describe(leaf) for leaf in list_leaves(batch)],
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_dtype": "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        "device": device.type,
        "optimizer": optimizer if isinstance(optimizer, str) else optimizer.recorded,
        "accumulate": accumulate,
        "torch": torch.__version__,
    }
    return Provenance.of(recorded)


def _describe(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)

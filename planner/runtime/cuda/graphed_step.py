"""A planned step whose two passes are recorded once, and then replayed.

A recording repeats the same work on the same memory. A batch and the gradient of the loss are therefore copied to fixed inputs,
parameters and buffers must stay where they are, and results are copied out: autograd may keep a returned gradient as ``p.grad``,
and the next replay would overwrite it.

Known weaknesses: one forward pass may be under way at a time, since a replay overwrites what the last one left; ops that wait for
the device, or are not known to be safe in Inductor's list, are refused; and inputs, the gradient of the loss and results exist
twice, which the plan counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.random_ops import execute_random_ops_once
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.replay import collect_static, collect_written_tensors
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.graphs.errors import MismatchError, PlannerError, TraceError
from planner.graphs.ir import Kind, Op
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.executor import Executor
from planner.runtime.transfers.cuda_channels import StreamChannel, capture_copies
from planner.torch_private.core import backward_retains_graph, foreach_copy_, pytree

T = TypeVar("T")


class FunctionRecorder(Protocol):
    """A recorder of functions, to be replayed in the order of recording."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Call `run` until all one-time work is done."""

    def record(self, function: Callable[..., T], *args: Any) -> tuple[T, Callable[[], None]]:
        """Call `function` once, and record it; return its result, and what repeats it from and into the same tensors."""

    def count_held_bytes(self) -> int:
        """Return the bytes that the recordings keep."""


def prepare_for_recording(captured: Capture) -> Capture:
    """Return `captured` as it is planned for recording, with its copies counted; raise TraceError for an op that cannot be."""
    _check_ops(captured)
    once = execute_random_ops_once(captured)
    graph = once.graph.holding(Kind.INPUT, "recorded_inputs", _count_input_bytes(once))
    for kind in (Kind.OUTPUT, Kind.GRADIENT):
        size_bytes = sum(graph.tensors[t].size_bytes for t in graph.kept if graph.tensors[t].kind is kind)
        graph = graph.holding(kind, f"copied_{kind}s", size_bytes)
    return replace(once, graph=graph)


def remove_host_times(captured: Capture) -> Capture:
    """Return `captured` without the times in which the host issues single ops: it issues a recorded pass at once."""
    ops = tuple(replace(op, host_s=0.0) for op in captured.graph.ops)
    return replace(captured, graph=replace(captured.graph, ops=ops))


def record(captured: Capture, executor: Executor, step: TrainingStep, batch: Batch, recorder: FunctionRecorder) -> None:
    """Replace the passes of `executor` by recordings of `recorder`; `step`, batch and random state are restored."""
    static = collect_static(captured, step, batch)
    with (
        preserve_training_state(step, batch, written=collect_written_tensors(captured, step, batch)),
        torch.no_grad(),
        torch.autocast(static[0].device.type, enabled=False),
    ):
        recording = RecordedPasses(executor, static, recorder)
    executor.run_recorded(recording.forward, recording.backward)


def _run_both(forward: Forward, backward: Backward, static: Sequence[Any]) -> None:
    *_, alive = forward(static)
    backward(static, alive)


class RecordedPasses:
    """The recorded passes of a step."""

    def __init__(self, executor: Executor, static: Sequence[torch.Tensor], recorder: FunctionRecorder) -> None:
        """Record the passes of `executor`, called with `static`."""
        graph, code, sources = executor.graph, executor.launched, executor.program.sources
        self._names = [graph.tensors[source.tensor].name for source in sources]
        self._tangent = next(i for i, source in enumerate(sources) if source.is_tangent)
        self._copied = [i for i, source in enumerate(sources) if source.kind is Kind.INPUT and i != self._tangent]
        self._in_place = [i for i, source in enumerate(sources) if source.kind is not Kind.INPUT]
        overwritten = {t for op in graph.ops for t in op.mutates}
        self._written_back = [i for i in self._copied if sources[i].tensor in overwritten]
        # Held, so that no other tensor is allocated at a recorded address.
        self._static = [t.detach() if i in self._in_place else t.detach().clone() for i, t in enumerate(static)]
        self._turn = 0
        forward, backward = code.forward, code.backward
        if (host := executor.devices.host) is not None:
            channels = [each for each in executor.devices.channels.values() if isinstance(each, StreamChannel)]
            if len(channels) < len(executor.devices.channels):
                raise PlannerError("only copies on streams of CUDA can be recorded: leave out options=, or cuda_graph=True")
            host.let_stay()
            forward, backward = capture_copies(channels)(forward), capture_copies(channels)(backward)
        recorder.warm_up(
            partial(_run_both, forward, backward, self._static)
        )  # allocates all its host memory, which cannot be page-locked in a capture
        (loss, extras, alive), self._replay_forward = recorder.record(forward, self._static)
        self._returned: Sequence[torch.Tensor] = (loss, *extras)
        self._gradients, self._replay_backward = recorder.record(backward, self._static, alive)

    def forward(self, static: Sequence[Any]) -> Returned:
        """Replay the forward pass on `static`; raise MismatchError if a parameter or buffer has moved since it was recorded."""
        for i in self._in_place:
            if static[i].data_ptr() != self._static[i].data_ptr():
                raise MismatchError(
                    f"{self._names[i]} is not where it was in memory when the step was recorded: model.to(), assign=True and "
                    "the like put another tensor there; load values into the model's own tensors, or make another plan"
                )
        for i in self._copied:
            self._static[i].copy_(static[i])
        copies = _allocate_like(self._returned)  # if there is none, nothing has been replayed yet
        self._replay_forward()
        for i in self._written_back:
            static[i].copy_(self._static[i])
        self._turn += 1
        foreach_copy_(copies, list(self._returned))  # a few kernels for any number of tensors
        loss, *extras = copies
        return loss, tuple(extras), [self._turn]

    def backward(self, static: Sequence[Any], alive: list[Any]) -> tuple[Any, ...]:
        """Replay the backward pass of the last forward pass; raise PlannerError if it belongs to an earlier one."""
        if alive != [self._turn]:
            raise PlannerError(
                "backward() came after another call of the step, which has overwritten this one's tensors: a recorded step holds "
                "those of one forward pass; call backward() before the next, or compile without cuda_graph=True"
            )
        if backward_retains_graph():
            raise PlannerError(
                "backward(retain_graph=True) of a recorded step cannot run a second time: leave it out, or cuda_graph=True"
            )
        self._static[self._tangent].copy_(static[self._tangent])
        copies = _allocate_like(self._gradients)
        self._replay_backward()
        foreach_copy_(copies, list(self._gradients))
        return tuple(copies)


def _allocate_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _check_ops(captured: Capture) -> None:
    from planner.torch_private.inductor import is_cudagraph_unsafe_fx_node  # importing Inductor takes a second

    device = captured.graph.device
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        if node is None:
            continue
        if is_cudagraph_unsafe_fx_node(node):
            raise _build_refusal(op, "waits for the device, or does more than launch kernels")
        for tensor in _iterate_tensors(node):
            if tensor.device.type != device:
                raise _build_refusal(op, f"has a tensor on {tensor.device.type}, not on {device}")


def _build_refusal(op: Op, why: str) -> TraceError:
    where = f" in {op.module}" if op.module else ""
    return TraceError(f"op {op.name!r} ({op.target}){where} {why}, which no CUDA graph can hold: leave out cuda_graph=True")


def _iterate_tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the inputs and outputs of `node`: fake tensors, or constants themselves."""
    for value in (node, *node.all_input_nodes):
        constant = value.op == "get_attr" and "val" not in value.meta
        known = getattr(value.graph.owning_module, str(value.target)) if constant else value.meta.get("val")
        yield from (leaf for leaf in pytree.tree_leaves(known) if isinstance(leaf, torch.Tensor))


def _count_input_bytes(captured: Capture) -> int:
    """Return the bytes of the copies of inputs and of the loss gradient."""
    graph = captured.graph
    inputs = [graph.tensors[source.tensor] for source in captured.program.sources if source.kind is Kind.INPUT]
    device = torch.device(graph.device)
    sizes = (torch.Size(t.shape).numel() * getattr(torch, t.dtype).itemsize for t in inputs)
    return sum(compute_allocated_bytes(size, device) for size in sizes)

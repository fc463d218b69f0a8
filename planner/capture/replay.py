"""A captured step on real tensors, executed op by op with everything kept, to observe each op."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from planner.capture.frontend.preserved_state import preserve_tensor
from planner.capture.frontend.random_states import list_gpus, preserve_random_states
from planner.capture.lowering.lower import Capture
from planner.capture.program.builder import PassBuilder
from planner.capture.program.program import Call
from planner.capture.program.writer import PassWriter
from planner.capture.rewrites.explicit_generators import preserve_generator_states
from planner.capture.signature import Batch, list_leaves
from planner.graphs.schedule import Compute, Schedule, schedule_of


class RealStep:
    """A captured step on real tensors.

    Attributes:
        static: the static tensors, in the order of the program's sources.
    """

    def __init__(self, capture: Capture, step: nn.Module, batch: Batch) -> None:
        """Initialize for the `capture` of `step`; arguments as in ``collect_static``."""
        self.capture = capture
        self.static = collect_static(capture, step, batch)
        self._written = collect_written_tensors(capture, step, batch)
        self.device: torch.device = self.static[0].device
        self._schedule = _replay(capture)

    def run(self, calls: Mapping[int, Call]) -> None:
        """Execute the step; after each op, before tensors are freed, make its call in `calls`, if any."""
        graph, program = self.capture.graph, self.capture.program
        builder, writer = PassBuilder(program), PassWriter(graph, program)
        builder.add_tensor_list("static", [source.tensor for source in program.sources])
        for step in self._schedule.steps:
            writer.write(builder, [step])
            if isinstance(step, Compute) and step.op in calls:
                builder.call(calls[step.op])
        builder.finish(None, f"profile of {graph.fingerprint}").run(self.static)

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Disable autograd and autocast, and restore parameters, buffers and random state at the end."""
        with ExitStack() as stack:
            for tensor in self._written:
                stack.enter_context(preserve_tensor(tensor))
            stack.enter_context(preserve_random_states(list_gpus(self.device)))
            stack.enter_context(preserve_generator_states(self.capture.program))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            yield


def _replay(capture: Capture) -> Schedule:
    """Return the schedule that executes each op once, and keeps the program's tensors.

    An optional op follows the last op that it replaces, or that computes one of its inputs or outputs. Tensors that it
    recomputes are freed. Optional ops that call an op of the program on other tensors are left out.
    """
    graph = capture.graph
    made_at = {t: op.id for op in graph.program for t in op.outputs}
    behind: dict[int, list[int]] = {}
    for op in graph.ops[len(graph.program) :]:
        if capture.nodes[op.id] is not None:  # that of an op of the program
            continue
        place = max(op.replaces or [made_at.get(t, 0) for t in (*op.inputs, *op.outputs)], default=0)
        behind.setdefault(place, []).append(op.id)
        for t in op.outputs:
            made_at.setdefault(t, place)
    order = [op for program_op in graph.program for op in (program_op.id, *behind.get(program_op.id, ()))]
    first = {t: position for position in reversed(range(len(order))) for t in graph.ops[order[position]].outputs}
    again = {p: [t for t in graph.ops[op].outputs if first[t] < p] for p, op in enumerate(order)}
    return schedule_of(graph, order, again)


def collect_static(capture: Capture, step: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Return the static tensors of `capture` for a call; the gradient of the loss is one of them."""
    static = capture.program.gather(step, list_leaves(batch))
    device = next(tensor.device for tensor in static if tensor is not None)
    for i, source in enumerate(capture.program.sources):
        if source.is_tangent:
            tangent = capture.graph.tensors[source.tensor]
            static[i] = torch.ones(tangent.shape, dtype=getattr(torch, tangent.dtype), device=device)
    return static


def collect_written_tensors(capture: Capture, step: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Return the buffers, inputs and parameters that the step overwrites; arguments as in ``collect_static``."""
    written = {t for op in capture.graph.ops for t in op.mutates}
    static = zip(capture.program.sources, capture.program.gather(step, list_leaves(batch)), strict=True)
    return [tensor for source, tensor in static if source.tensor in written]

"""Refusal of steps that take a number out of a buffer which they change: such a plan is valid for its first step alone."""

from contextlib import suppress

import torch
from torch import fx, nn

from planner.capture.guards.data_guards import DataGuards, GuardWriter
from planner.capture.rewrites.outputs import list_outputs
from planner.capture.signature import Batch, list_leaves
from planner.capture.source_lines import format_location
from planner.graphs.errors import MismatchError, TraceError
from planner.graphs.ir import Kind
from planner.torch_private.capture import BufferAOTInput, InputMutationAOTOutput


def check_next_steps(guards: DataGuards, graph: fx.Graph, step: nn.Module, batch: Batch) -> None:
    """Refuse a step that takes another number out of a buffer in the next step, because of what it writes there.

    That is detected if the new value depends on the batch and on buffers alone. A branch may differ between the first step and
    those that follow (by a flag that the step sets), and is not refused.

    Args:
        guards: those of the joint graph `graph` of AOTAutograd.

    Raises:
        TraceError: with the line and the buffers.
    """
    read = {source.name for source in guards.program.sources if source.kind is Kind.BUFFER}
    writer, written = GuardWriter(graph), dict[str, int]()
    for value, desc in list_outputs(graph):
        if isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, BufferAOTInput):
            assert isinstance(value, fx.Node)
            if desc.mutated_input.target in read:
                with suppress(TraceError):  # the value depends on more
                    written[desc.mutated_input.target] = writer.add_value(value, None)
    if not written:
        return
    update, program = writer.build_computation()
    with torch.no_grad():
        values = update(*program.gather(step, list_leaves(batch)))
    try:
        found = guards.compute_outcomes(step, list_leaves(batch), {name: values[position] for name, position in written.items()})
    except MismatchError:
        return  # the next step is refused when it comes
    for guard, next_outcome in zip(guards.checks, found, strict=True):
        if not isinstance(guard.planned, bool) and next_outcome != guard.planned:
            names = " and ".join(name.removeprefix("model.") for name in written)
            raise TraceError(
                f"{format_location(guard.line)} takes a number out of {names}, which the step itself changes: in a plan it "
                f"would stay {guard.planned}, and the next step needs {next_outcome}. Compute with the buffer instead (in a "
                "queue with a pointer: queue.index_copy_(0, (pointer + torch.arange(len(keys))) % len(queue), keys), "
                "pointer.add_(len(keys))); where it changes in the first step only, call the model once before"
            )

"""Numbers out of buffers that a step itself changes: a plan that holds for its first step alone is refused."""

from contextlib import suppress

import torch
from torch import fx, nn

from graphs.errors import MismatchError, TraceError
from graphs.ir import Kind
from planner.capture.frontend.lines import at
from planner.capture.guards.conditions import DataGuards, GuardWriter
from planner.capture.rewrites.outputs import outputs
from planner.capture.signature import Batch, leaves
from planner.torch_private.capture import BufferAOTInput, InputMutationAOTOutput


def check_next_steps(guards: DataGuards, graph: fx.Graph, step: nn.Module, batch: Batch) -> None:
    """Refuse a step that takes another number out of a buffer in the next step, by what it writes there.

    That is known where it depends on the batch and on buffers alone. A branch may be another in the first step than in all that
    follow (a flag that it sets), and is not refused.

    Args:
        guards: of the joint graph `graph`, as AOTAutograd makes it.

    Raises:
        TraceError: names the line, and the buffers.
    """
    read = {source.name for source in guards.program.sources if source.kind is Kind.BUFFER}
    writer, written = GuardWriter(graph), dict[str, int]()
    for value, desc in outputs(graph):
        if isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, BufferAOTInput):
            assert isinstance(value, fx.Node)
            if desc.mutated_input.target in read:
                with suppress(TraceError):  # it depends on more
                    written[desc.mutated_input.target] = writer.value(value, None)
    if not written:
        return
    update, program = writer.computed()
    with torch.no_grad():
        values = update(*program.gather(step, leaves(batch)))
    try:
        found = guards.outcomes(step, leaves(batch), {name: values[position] for name, position in written.items()})
    except MismatchError:
        return  # what comes then is refused then
    for guard, next_outcome in zip(guards.checks, found, strict=True):
        if not isinstance(guard.planned, bool) and next_outcome != guard.planned:
            names = " and ".join(name.removeprefix("model.") for name in written)
            raise TraceError(
                f"{at(guard.line)} takes a number out of {names}, which the step itself changes: in a plan it would stay "
                f"{guard.planned}, and the next step needs {next_outcome}. Compute with the buffer instead (in a queue with a "
                "pointer: queue.index_copy_(0, (pointer + torch.arange(len(keys))) % len(queue), keys), "
                "pointer.add_(len(keys))); where it changes in the first step only, call the model once before"
            )

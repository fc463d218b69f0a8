"""Random ops that are executed once, where a generator's state can be neither read nor set."""

from dataclasses import replace

from graphs.ir import Graph, Kind
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.program import Call, Launches


def execute_random_ops_once(captured: Capture) -> Capture:
    """Return `captured` without recomputation of random ops and without saved states.

    The ops that save the generator's state stay in the graph, and do nothing.
    """
    graph, program = captured.graph, captured.program
    states = {t.id for t in graph.tensors if t.kind is Kind.RANDOM_STATE}
    ops = tuple(replace(op, recomputable=op.recomputable and not states.intersection(op.inputs)) for op in graph.ops)
    tensors = tuple(replace(t, size_bytes=0) if t.id in states else t for t in graph.tensors)
    calls = tuple(
        Call("None", call.outputs) if states.intersection(op.outputs) else _without_state(call)
        for op, call in zip(graph.ops, program.calls, strict=True)
    )
    return replace(captured, graph=Graph(ops, tensors, graph.kept, graph.provenance), program=replace(program, calls=calls))


def _without_state(call: Call | Launches) -> Call | Launches:
    return replace(call, random_state=None) if isinstance(call, Call) else call

"""Random ops that are executed once, if a generator's state can be neither read nor set."""

from dataclasses import replace

from planner.capture.lowering.lower import Capture
from planner.capture.program.program import OpCalls, Statement
from planner.graphs.ir import Graph, Kind


def execute_random_ops_once(captured: Capture) -> Capture:
    """Return `captured` without recomputation of random ops and without saved states.

    The ops that save the generator's state stay in the graph, and do nothing.
    """
    graph, program = captured.graph, captured.program
    states = {t.id for t in graph.tensors if t.kind is Kind.RANDOM_STATE}
    ops = tuple(replace(op, recomputable=op.recomputable and not states.intersection(op.inputs)) for op in graph.ops)
    tensors = tuple(replace(t, size_bytes=0) if t.id in states else t for t in graph.tensors)
    calls = tuple(
        OpCalls((Statement(None, calls.outputs),)) if states.intersection(op.outputs) else replace(calls, random_state=None)
        for op, calls in zip(graph.ops, program.calls, strict=True)
    )
    return replace(captured, graph=Graph(ops, tensors, graph.kept, graph.provenance), program=replace(program, calls=calls))

"""Application of options that are found in a captured step."""

from collections.abc import Sequence
from dataclasses import replace

from planner.capture.lowering.lower import Capture
from planner.capture.options import check_options, step_options
from planner.capture.replay import RealStep
from planner.graphs.errors import UsageError
from planner.graphs.ir import Graph
from planner.graphs.options.selection import get_option_name, remove_ops
from planner.graphs.provenance import Provenance


def needs_measuring(capture: Capture) -> bool:
    """Return True if an optional op of `capture` uses a limited resource whose use is to be measured."""
    measuring = {option.name for option in step_options(capture.graph.provenance.options) if option.measure is not None}
    return any(op.optional and get_option_name(op) in measuring for op in capture.graph.ops)


def measure_uses(capture: Capture, real: RealStep | None) -> Graph:
    """Return the graph of `capture` with its optional ops' uses of limited resources, measured on `real`, else modelled."""
    for option in step_options(capture.graph.provenance.options):
        if option.measure is not None:
            capture = replace(capture, graph=option.measure(capture, real))
    return capture.graph


def replace_graph(capture: Capture, graph: Graph) -> Capture:
    """Return `capture` with `graph`, which may lack some of its optional ops and have further ones without calls."""
    number = {t.name: t.id for t in graph.tensors}
    moved = {t.id: number[t.name] for t in capture.graph.tensors if t.name in number}
    place = {op.name: op.id for op in capture.graph.ops}
    held = [place[op.name] for op in graph.ops if op.name in place]
    program = capture.program
    # Ops of the program keep their tensors.
    calls = tuple(c if (c := program.calls[op]).composed is None else c.renumber(moved) for op in held)
    return replace(capture, graph=graph, program=replace(program, calls=calls), nodes=tuple(capture.nodes[op] for op in held))


def add_traced(capture: Capture, names: Sequence[str]) -> Capture:
    """Return `capture` with those of the options `names` that are found in a step; their times are not measured.

    Raises:
        UsageError: there is no such option, or it does not go with the captured kernels.
    """
    check_options(names)
    if not (wanted := step_options(names)):
        return capture
    for option in wanted:
        if reason := option.accepts(capture):
            raise UsageError(reason)
    for option in wanted:
        capture = option.apply(capture)
    provenance = capture.graph.provenance.record(options=[option.name for option in wanted])
    return replace(capture, graph=replace(capture.graph, provenance=provenance))


def remove_useless_ops(capture: Capture) -> Capture:
    """Return `capture`, whose times are known, without useless ops; their names become part of the provenance."""
    dropped = {op for option in step_options(capture.graph.provenance.options) for op in option.useless_ops(capture)}
    if not dropped:
        return capture
    names = sorted(capture.graph.ops[op].name for op in dropped)
    left = remove_ops(capture.graph, lambda op: op.id in dropped)
    return replace_graph(capture, replace(left, provenance=left.provenance.record(left_out=names)))


def restrict_to_recorded(capture: Capture, provenance: Provenance) -> Capture:
    """Return `capture` without the ops that were left out of the graph of `provenance`: the same step with known times."""
    return replace_graph(capture, remove_ops(capture.graph, lambda op: op.name in provenance.left_out))

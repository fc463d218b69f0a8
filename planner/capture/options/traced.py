"""Choices that are found in a step when it is traced, by name: rewrites of what was captured."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from graphs.ir import Graph, Op
from graphs.options import check_options, traced_options
from graphs.options.selection import IN_PLACE, LEFT_OUT, TRACED, option_of, traced_with, without
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.program import Call, Launches, variable
from planner.capture.options import chunks, kernels, packing
from planner.capture.options.compression import compressed
from planner.capture.options.in_place import in_place
from planner.capture.options.kernels.worth import needless
from planner.compatibility import Feature, check_compatible


@dataclass(frozen=True, slots=True)
class Traced:
    """A choice that is found in what was captured.

    Attributes:
        rewrite: adds its ops, which call what they are named by: ``NAME.more``.
        settle: an op of it, measured, with what differs of its outputs, by whether each was equal to the program's; None where
            it is known of each beforehand.
        needless: of what was captured, with times, the ids of its ops that are of no use.
    """

    rewrite: Callable[[Capture], Capture]
    settle: Callable[[Capture, Op, Sequence[bool]], Op] | None = None
    needless: Callable[[Capture], Collection[int]] = lambda _: ()


REWRITES: Mapping[str, Traced] = MappingProxyType(
    {
        "chunks": Traced(chunks.chunked, chunks.settle),
        "pack": Traced(packing.packed),
        "kernels": Traced(kernels.with_kernels, kernels.settle, needless),
        "compress": Traced(compressed),
        IN_PLACE: Traced(in_place),
    }
)


def settled(capture: Capture, op: Op, equal: Sequence[bool]) -> Op:
    """`op`, an optional one, with what differs of its outputs; `equal` says which came out as the program's, to the last bit."""
    settle = _of(op).settle
    return op if settle is None else settle(capture, op, equal)


def may_be_exact(op: Op) -> bool:
    """Whether what `op` makes is to be compared with what the program makes, since it may be equal."""
    return not op.exact and _of(op).settle is not None


def _of(op: Op) -> Traced:
    return REWRITES[option_of(op)]


def with_graph(capture: Capture, graph: Graph) -> Capture:
    """`capture` with `graph`: of its optional ops there may be some only, and others behind them that nothing is called for."""
    number = {t.name: t.id for t in graph.tensors}
    moved = {t.id: number[t.name] for t in capture.graph.tensors if t.name in number}
    place = {op.name: op.id for op in capture.graph.ops}
    held = [place[op.name] for op in graph.ops if op.name in place]
    program = capture.program
    calls = tuple(_moved(program.calls[op], moved) for op in held)
    return replace(capture, graph=graph, program=replace(program, calls=calls), nodes=tuple(capture.nodes[op] for op in held))


def _moved(call: Call | Launches, moved: Mapping[int, int]) -> Call | Launches:
    """`call` with other numbers of tensors; those of the program stay, and what is launched is of the program."""
    if not isinstance(call, Call) or call.composed is None:
        return call
    expression = re.sub(r"\bt(\d+)\b", lambda found: variable(moved[int(found[1])]), call.expression)
    return replace(call, expression=expression, outputs=tuple((moved[t], path) for t, path in call.outputs))


def with_traced(capture: Capture, names: Sequence[str]) -> Capture:
    """`capture` with those of the choices `names` that are found in what was captured; their times are not measured.

    Raises:
        UsageError: there is no such choice, or it does not go with the kernels that were captured.
    """
    check_options(names)
    if not (wanted := traced_options(names)):
        return capture
    if capture.whole is not None:
        check_compatible((*wanted, Feature.INDUCTOR))
    for name in wanted:
        capture = REWRITES[name].rewrite(capture)
    graph = capture.graph
    provenance = {**graph.provenance, TRACED: list(wanted)}
    return replace(capture, graph=Graph(graph.ops, graph.tensors, graph.kept, provenance, graph.pools))


def without_needless(capture: Capture) -> Capture:
    """`capture`, of which times are known, without the ops that are of no use; their names become part of the provenance."""
    dropped = {op for name in traced_with(capture.graph) for op in REWRITES[name].needless(capture)}
    if not dropped:
        return capture
    names = sorted(capture.graph.ops[op].name for op in dropped)
    left = without(capture.graph, lambda op: op.id in dropped)
    provenance = {**left.provenance, LEFT_OUT: names}
    return with_graph(capture, Graph(left.ops, left.tensors, left.kept, provenance, left.pools))


def offered_as(capture: Capture, provenance: Mapping[str, object]) -> Capture:
    """`capture` without the ops that were left out of the graph of `provenance`: the same step, of which times are known."""
    names = provenance.get(LEFT_OUT, ())
    assert isinstance(names, list | tuple)
    return with_graph(capture, without(capture.graph, lambda op: op.name in names))

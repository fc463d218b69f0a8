"""Bitwise comparison of optional ops with the ops of the program that they replace, on real tensors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from planner.capture.lowering.lower import Capture
from planner.capture.options.differences import describe_differing
from planner.capture.program.program import Call, Comparable, Ref
from planner.capture.replay import RealStep
from planner.graphs.ir import Op


def needs_comparison(capture: Capture) -> bool:
    """Return True if an optional op of `capture` may be bitwise equal to the program."""
    return any(_get_comparable(capture, op) is not None for op in capture.graph.ops)


def _get_comparable(capture: Capture, op: Op) -> Comparable | None:
    """Return the function of `op` if its outputs are to be compared with the program's, since they may be equal; else None."""
    composed = capture.program.calls[op.id].composed
    return composed if isinstance(composed, Comparable) and not op.exact else None


def mark_exact_ops(capture: Capture, real: RealStep | None) -> Capture:
    """Return `capture` with optional ops marked as exact if their outputs are bitwise equal to the program's.

    Args:
        real: the step on real tensors, which is executed once with everything kept; None if it does not fit: ops that may differ
            then count as inexact.
    """
    if not needs_comparison(capture):
        return capture
    equal = {} if real is None else _compare_outputs(real)
    ops = list(capture.graph.ops)
    for op in capture.graph.ops:
        if (composed := _get_comparable(capture, op)) is not None:
            rounded = composed.list_rounding(equal.get(op.id, (False,) * len(op.outputs)))
            ops[op.id] = replace(op, differs=describe_differing(capture, op.outputs, rounded))
    return replace(capture, graph=replace(capture.graph, ops=tuple(ops)))


def _compare_outputs(real: RealStep) -> dict[int, tuple[bool, ...]]:
    """Return for each optional op that may be exact whether each of its outputs equals the program's."""
    capture, found = real.capture, dict[int, tuple[bool, ...]]()
    compared = [op for op in capture.graph.ops if _get_comparable(capture, op) is not None]
    calls = {op.id: (op.id, capture.program.calls[op.id].call, list(map(Ref, op.outputs))) for op in compared}
    with real.preserve_state():
        real.run({op: Call(partial(_compare, found), arguments) for op, arguments in calls.items()})
    return found


def _compare(found: dict[int, tuple[bool, ...]], op: int, made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    found[op] = tuple(torch.equal(m, w) for m, w in zip(made, wanted, strict=True))

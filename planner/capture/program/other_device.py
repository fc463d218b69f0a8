"""Calls of an op on another device than the one that it was captured on."""

from dataclasses import replace

import torch

from planner.capture.program.program import OpCalls, Program, iterate_leaves, map_leaves, read_by
from planner.graphs.ir import Op


def move_calls(program: Program, op: Op, alternative: Op, here: torch.device, there: torch.device) -> OpCalls | None:
    """Return the calls of `op`, of the program, to run on `there` with the tensors of `stand_in`; None if it cannot be moved.

    Device arguments are replaced. An op cannot be moved if its calls name another device than `here`, the main one; if they read
    more than the op's inputs, as batch norms with running statistics; or if they read nothing, name no device, and `there` has
    another type.
    """
    calls = program.calls[op.id]
    if calls.launches or calls.composed is not None or calls.random_state is not None or calls.is_nothing:
        return None
    named = [leaf for leaf in iterate_leaves(calls.call) if isinstance(leaf, torch.device)]
    if any(device.type != here.type for device in named):
        return None
    given = set(read_by(calls.call))
    if not given.issubset(op.inputs) or (not given and not named and there.type != "cpu"):
        return None
    numbers = dict(zip((*op.inputs, *op.outputs), (*alternative.inputs, *alternative.outputs), strict=True))
    (statement,) = calls.renumber(numbers).statements
    placed = map_leaves(statement.value, lambda leaf: there if isinstance(leaf, torch.device) else leaf)
    return replace(calls, statements=(replace(statement, value=placed),), over=())

"""Assertions on activations: branches of which one side raises an error.

Dynamo writes ``assert condition`` as an op that checks a tensor, but neither ``assert a and b`` nor ``if condition: raise``. The
side that raises is not captured. The op raises a RuntimeError in the step that fails, as under ``torch.compile``.

A branch that all draws but 0 take (``torch.rand(1) > 0.0``) is checked in the same way, and so is one on values that are not
finite (``if not torch.isfinite(hidden).all(): hidden = hidden.clamp(...)``); where the check fails, the step is undone and runs
by eager PyTorch.
"""

from typing import Any

import torch
from torch import fx

from planner.capture.rewrites.outputs import call_before, get_fake
from planner.capture.source_lines import find_current_line, format_location, format_node
from planner.torch_private.capture import InstructionTranslatorBase, VariableTracker
from planner.torch_private.core import assert_async

aten = torch.ops.aten

UNPLANNED = "takes a branch that was not planned"
UNLIKELY_DRAW = f"drew exactly 0, as one in 2**24 draws is, and {UNPLANNED}"
NOT_FINITE = f"found values that are not finite, and {UNPLANNED}"

_ANSWERS = {"isfinite": True, "isnan": False, "isinf": False}  # for finite values

_ENDS = ("RETURN", "RERAISE", "YIELD")


def find_passing_side(translator: InstructionTranslatorBase) -> bool | None:
    """Return the condition of the next jump for which no error is raised; None unless exactly one side raises one."""
    position = translator.instruction_pointer
    assert position is not None
    jump = translator.instructions[position]
    if jump.opname.endswith("OR_POP") or jump.target is None or _is_tried(translator):
        return None
    jumps_if = "IF_TRUE" in jump.opname
    there, here = (_is_raising(translator, start) for start in (translator.indexof[jump.target], position + 1))
    return None if there is here else jumps_if is here


def find_answer_for_finite(node: fx.Node) -> bool | None:
    """Return the value of `node` if all values that it asks for are finite; None if it does not ask for that."""
    name, asked = _get_name(node), node
    if name in ("all", "any") and len(node.all_input_nodes) == 1:
        asked = node.all_input_nodes[0]
    answer = _ANSWERS.get(_get_name(asked))
    return None if answer is None or (asked is not node and answer is not (name == "all")) else answer


def _get_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def write_assertion(translator: InstructionTranslatorBase, condition: Any, *, passing: bool, otherwise: str) -> None:
    """Capture an op that checks that the tensor `condition` is `passing`; the error tells what its line does `otherwise`."""
    checked = condition if passing else condition.call_method(translator, "logical_not", [], {})
    message = f"{format_location(find_current_line())} {otherwise}".replace('"', "'")  # Inductor quotes nothing
    arguments = [checked, VariableTracker.build(translator, message)]
    VariableTracker.build(translator, assert_async).call_function(translator, arguments, {})


def is_as_long_as_told(bincount: fx.Node) -> bool:
    """Return True if the result of a ``bincount`` is captured with its least length."""
    return len(bincount.args) > 2 and get_fake(bincount).shape[0] == bincount.args[2]


def assert_length(bincount: fx.Node) -> None:
    """Check before a ``bincount`` that its result has its least length."""
    values, _, length = bincount.args
    where = format_node(bincount)
    message = f"{where} counts a number that is not below minlength={length}: give a minlength that is above all numbers"
    below = call_before(bincount, aten.lt.Scalar, values, length)
    checks = [below, call_before(bincount, aten.all.default, below)]
    checks.append(call_before(bincount, aten._assert_async.msg, checks[1], message))
    for check in checks:
        check.meta = {**bincount.meta, **check.meta}


def _is_raising(translator: InstructionTranslatorBase, position: int) -> bool:
    """Return True if the code from `position` on raises an error on all its paths."""
    seen, rest = set[int](), [position]
    while rest:
        if (position := rest.pop()) in seen:
            continue
        seen.add(position)
        instruction = translator.instructions[position]
        if instruction.opname.startswith(_ENDS):
            return False
        if instruction.target is not None:
            rest.append(translator.indexof[instruction.target])
        if instruction.opname != "RAISE_VARARGS" and not instruction.opname.startswith("JUMP_"):
            rest.append(position + 1)
    return True


def _is_tried(translator: InstructionTranslatorBase | None) -> bool:
    """Return True if an error that the current instruction raises may be caught, in its function or in one that calls it."""
    while translator is not None:
        entry = translator.current_instruction.exn_tab_entry
        while entry is not None:
            handler = translator.indexof[entry.target]
            if translator.instructions[handler + 1].opname != "WITH_EXCEPT_START":
                return True
            cleanup = entry.target.exn_tab_entry  # of the with block
            entry = None if cleanup is None else cleanup.target.exn_tab_entry
        translator = getattr(translator, "parent", None)
    return False

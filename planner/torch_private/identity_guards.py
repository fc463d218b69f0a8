"""Guards on modules that captured code compares by identity (``layer is self.last``, ``layer in self.skipped``).

Dynamo has none: code that is given another module of the same structure ran with the outcome of the first, which was silently
wrong where it captures a helper function by itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import UnspecializedNNModuleVariable, VariableTracker

from planner.torch_private.patches import wrap_for_good

_COMPARING = {"COMPARE_OP", "CONTAINS_OP", "IS_OP"}


def guard_identities_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo guard modules that are compared in the frames that are `wanted`."""
    wrap_for_good(InstructionTranslatorBase, "step", partial(_guard_and_step, wanted))


def _guard_and_step(wanted: Callable[[Any], bool], step: Callable[[Any], Any], tx: Any) -> Any:
    position = tx.instruction_pointer
    if position is not None and tx.instructions[position].opname in _COMPARING and wanted(tx):
        found: list[Any] = []
        VariableTracker.visit(found.append, [variable.realize() for variable in tx.stack[-2:]])
        compared = [each for each in found if isinstance(each, UnspecializedNNModuleVariable)]
        if len(compared) > 1:
            for module in compared:
                if module.source is not None:
                    install_guard(module.source.make_guard(GuardBuilder.ID_MATCH))
    return step(tx)

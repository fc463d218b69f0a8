"""Hooks of modules that a step registers and removes again, as PEFT does to pass keyword arguments to its layers (aLoRA, Poly).

Dynamo follows the calls of hooks, but not ``RemovableHandle``, which counts handles in its class and refers weakly to the
module's dicts. During a capture the captured code registers by functions of this file instead: they replace the dicts, which
Dynamo follows as any attribute, and a planned step has none of it to do, because the dicts are at its end what they were.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from planner.capture.frontend.dynamo_patches import EndOfCapture
from planner.capture.source_lines import GRAPH_BREAK_ADVICE, find_current_line, format_location
from planner.graphs.errors import TraceError
from planner.torch_private import capture as private
from planner.torch_private.patches import wrap

# The methods that are replaced, and the dicts of a module that they fill.
_REGISTER: dict[Any, tuple[str, str]] = {
    nn.Module.register_forward_pre_hook: ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    nn.Module.register_forward_hook: ("_forward_hooks", "_forward_hooks_with_kwargs"),
}
_DICTS = {name for names in _REGISTER.values() for name in names}
HOOK_REFUSAL = (
    "{where} registers a hook in the step, which cannot be captured: register it once, before planning, and let it read what "
    "differs from step to step from an attribute; or {on}"
)


class _Handle(RemovableHandle):
    """The handle of a hook that captured code has registered under the key `id`."""

    def __init__(self, module: nn.Module, names: tuple[str, str], key: int) -> None:
        self.module = module
        self.names = names
        self.id = key

    def remove(self) -> None:
        """Remove the hook, which may have been removed."""
        for name in self.names:
            hooks = {**getattr(self.module, name)}
            hooks.pop(self.id, None)
            object.__setattr__(self.module, name, hooks)


def _register(
    names: tuple[str, str], key: int, module: nn.Module, hook: object, *, prepend: bool = False, with_kwargs: bool = False
) -> _Handle:
    """Register `hook` under `key` in the dicts of `module` that have these `names`."""
    hooks, flags = names
    own, others = {key: hook}, getattr(module, hooks)
    object.__setattr__(module, hooks, {**own, **others} if prepend else {**others, **own})
    if with_kwargs:
        object.__setattr__(module, flags, {**getattr(module, flags), key: True})
    return _Handle(module, names, key)


@contextmanager
def follow_removed_hooks() -> Iterator[EndOfCapture]:
    """Follow hooks that the captured step registers and removes.

    Yields what is to be called at the end. It raises a TraceError if the step has left a hook that it has registered, or keeps a
    handle as an attribute.
    """
    lines: dict[int, str] = {}
    with wrap(private.InstructionTranslatorBase, "inline_user_function_return", partial(_inline_or_register, lines)):
        yield partial(_drop_changes, lines)


def _inline_or_register(
    lines: dict[int, str], inline: Any, translator: Any, function: Any, args: Any, kwargs: Any, **options: Any
) -> Any:
    names = _REGISTER.get(function.get_function()) if isinstance(function, private.UserFunctionVariable) else None
    if names is not None and "always_call" not in kwargs:
        key = -1 - len(lines)  # PyTorch's own are not negative
        lines[key] = format_location(find_current_line())
        args = [private.VariableTracker.build(translator, names), private.VariableTracker.build(translator, key), *args]
        registers: Any = _register
        function = private.UserFunctionVariable(registers)
    return inline(translator, function, args, kwargs, **options)


def _drop_changes(lines: Mapping[int, str], _: Any, output: Any) -> None:
    changes = output.side_effects.store_attr_mutations
    for module, attributes in [(owner, held) for owner, held in changes.items() if owner.source is not None]:
        handles = [changes[value]["id"] for value in attributes.values() if getattr(value, "value_type", None) is _Handle]
        _refuse_left(lines, {handle.as_python_constant() for handle in handles})
        for name in _DICTS.intersection(attributes):
            left = {private.get_constant_key(key) for key in attributes[name].items}
            _refuse_left(lines, left)
            if left == set(getattr(module.value, name)):
                del attributes[name]
        if not attributes:
            del changes[module]


def _refuse_left(lines: Mapping[int, str], left: set[int]) -> None:
    for key in left.intersection(lines):
        raise TraceError(HOOK_REFUSAL.format(where=lines[key], on=GRAPH_BREAK_ADVICE))

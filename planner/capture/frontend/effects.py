"""Side effects: Python values that a step changes while it runs, such as counters and caches.

A planned step runs kernels and no Python, so it changes none of them. A value that the step reads and changes at every call
would be frozen in the plan: it is refused by name. A value that the step only sets is named in a warning. A value that the
first step sets and later ones read (a mask that is built when first needed) is set before the capture, by one run of the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

from graphs.errors import TraceError
from graphs.short_tracebacks import warn_caller
from planner.capture.frontend.python_state import restoring_items
from planner.capture.frontend.source_lines import is_our_code
from planner.capture.guards.names import Scope, accessor, readable
from planner.torch_private.capture import SideEffects, constant_key, source_name

_Change = Literal["never", "once", "always"]


@dataclass(frozen=True, slots=True)
class Effect:
    """A Python value that the captured code changes.

    Attributes:
        owner: name of the object, as Dynamo writes it.
        attribute: its name; None if the object itself is changed, such as a list.
        where: the line that changes it, in brackets, for messages; empty if unknown.
        replaced: True if a buffer or parameter is replaced by another tensor.
        constant: the value at the end of the step, in a tuple, if it is a number, a text or None.
    """

    owner: str
    attribute: str | None
    where: str
    replaced: bool = False
    constant: tuple[object] | None = None

    @property
    def name(self) -> str:
        """The name of the value, as Dynamo writes it."""
        return self.owner if self.attribute is None else f"{self.owner}.{self.attribute}"

    def is_read(self, guarded: frozenset[str]) -> bool:
        """Return True if guards look at this value or at a part of it."""
        if self.attribute is None:
            names = {self.owner}
        else:
            names = {
                f"{self.owner}.{self.attribute}",
                f"{self.owner}.__dict__['{self.attribute}']",
                f"{self.owner}['{self.attribute}']",
            }
        return any(guard == name or guard.startswith((f"{name}.", f"{name}[")) for name in names for guard in guarded)


class Scratch:
    """Base class of objects that a front end lets a step fill and reads after it: what the step sets there is no effect."""


class UnsettledError(Exception):
    """Raised if the step reads values that its first call sets: the step is then captured as of its second call.

    Attributes:
        effects: the values that are set.
    """

    def __init__(self, effects: list[Effect]) -> None:
        super().__init__(", ".join(effect.name for effect in effects))
        self.effects = effects


@contextmanager
def record_effects() -> Iterator[list[Effect]]:
    """Record the side effects of code that Dynamo captures: changes of Python values that existed before it ran."""
    found: list[Effect] = []
    original = SideEffects.codegen_update_mutated

    def recorded(effects: SideEffects, *args: Any, **kwargs: Any) -> None:
        found[:] = _effects(effects)  # a restarted capture begins with an empty list
        original(effects, *args, **kwargs)

    with mock.patch.object(SideEffects, "codegen_update_mutated", recorded):
        yield found


def check_effects(effects: list[Effect], guarded: frozenset[str], run: Callable[[], object], local: Scope, scope: Scope) -> None:
    """Refuse values that the step reads and changes at every call; warn about those that it only sets.

    Args:
        effects: those of the captured step.
        guarded: names that guards look at, as Dynamo writes them.
        run: a function that executes the step on fake tensors.
        local, scope: the variables by which names are resolved.

    Raises:
        TraceError: with the value and the line that changes it.
        UnsettledError: values change in the first call only.
    """
    for effect in effects:
        if effect.replaced:
            raise TraceError(
                f"{readable(effect.name, local, scope)} is replaced by another tensor in the step{effect.where}, which a planned "
                "step does not do: change it in place (copy_, add_, lerp_)"
            )
    effects = [
        effect
        for effect in effects
        if not isinstance(_owner(effect, local, scope), Scratch)
        # A flag that is set and reset is no effect.
        and not (effect.constant is not None and _same(effect.constant[0], _found(effect, local, scope)))
    ]
    changes = _changes(effects, run, local, scope) if effects else {}
    for effect, change in changes.items():
        if change != "always":
            continue
        name = readable(effect.name, local, scope)
        if effect.is_read(guarded):
            raise TraceError(
                f"{name} changes at every step{effect.where}, and the step reads it: in a plan it would stay as it is now. Make "
                "it a tensor that is changed in place (a buffer, with add_), pass it with the batch as a tensor, or change it "
                "outside of what is planned"
            )
        warn_caller(f"{name} is set by the step{effect.where}: a planned step does not set it, return it instead")
    if unsettled := [effect for effect, change in changes.items() if change == "once" and effect.is_read(guarded)]:
        raise UnsettledError(unsettled)


def warn_of_first_call(effects: list[Effect], local: Scope, scope: Scope) -> None:
    """Warn that the first call of the step has set the values that later ones read; arguments as for ``check_effects``."""
    for effect in effects:
        name = readable(effect.name, local, scope)
        warn_caller(
            f"{name} is set by the first step{effect.where}, and read by later ones: the model was run once to set it, and the "
            "plan uses the value that it has now",
        )


def _effects(effects: SideEffects) -> list[Effect]:
    found = []
    for variable in effects._get_modified_vars():
        try:
            owner = source_name(variable.source)
        except (AttributeError, NotImplementedError):
            continue  # made by the step itself
        frames = [frame for stack in effects.mutation_user_stacks.get(variable, ())[-1:] for frame in stack]
        own = [frame for frame in frames if not is_our_code(frame.filename)]  # attributes are set in nn.Module
        where = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(own or frames)), "")
        attributes = effects.store_attr_mutations.get(variable)
        if owner.endswith(("._buffers", "._parameters")):
            module = owner.rpartition(".")[0]
            found += [Effect(module, name, where, replaced=True) for name in _replaced(variable)]
        elif attributes:
            found += [
                Effect(owner, name, where, constant=_constant(value))
                for name, value in attributes.items()
                if not _is_itself(value, owner, name)
            ]
        else:
            found.append(Effect(owner, None, where))
    return [effect for effect in found if effect.owner.startswith(("L[", "G["))]


def _replaced(tensors: Any) -> Iterator[str]:
    """Yield the names in a module's table of tensors that refer to another tensor than before; in-place writes do not count."""
    before, now = (
        {constant_key(key): value for key, value in items.items()} for items in (tensors.original_items, tensors.items)
    )
    for name, value in now.items():
        if value is not before.get(name) and _storage(value) != _storage(before.get(name)):
            yield name


def _storage(variable: Any) -> int | None:
    value = variable.realize() if hasattr(variable, "realize") else variable
    proxy = value.as_proxy() if value is not None and value.is_tensor() else None
    return None if proxy is None else proxy.node.meta["example_value"].untyped_storage()._cdata


def _constant(value: Any) -> tuple[object] | None:
    if not (value.is_python_constant() and isinstance(value.as_python_constant(), int | float | str | None)):
        return None
    return (value.as_python_constant(),)


def _is_itself(value: Any, owner: str, name: str) -> bool:
    """Return True if an attribute is set to its own value, such as a buffer by ``self.calls += 1``."""
    source = getattr(value, "source", None)
    if source is None:
        return False
    return source_name(source) in {f"{owner}.{name}", f"{owner}._buffers['{name}']", f"{owner}._parameters['{name}']"}


def _changes(effects: list[Effect], run: Callable[[], object], local: Scope, scope: Scope) -> dict[Effect, _Change]:
    """Return in which of two steps on fake tensors each value changes; all values are restored afterwards."""
    before = _snapshots(effects, local, scope)
    try:
        seen = [[_found(effect, local, scope) for effect in effects]]
        for _ in range(2):
            run()
            seen.append([_found(effect, local, scope) for effect in effects])
        return {effect: _change(*values) for effect, values in zip(effects, zip(*seen, strict=True), strict=True)}
    except Exception:  # noqa: BLE001  # it cannot run on fake tensors: a number that the step sets is taken as changing
        return {e: "always" if isinstance(_found(e, local, scope), int | float) else "once" for e in effects}
    finally:
        for restore in before:
            restore()


def _change(first: object, second: object, third: object) -> _Change:
    if not _same(second, third):
        return "always"
    return "never" if _same(first, second) else "once"


_ABSENT = object()


def _found(effect: Effect, local: Scope, scope: Scope) -> object:
    """Return the present value; of a list, dict or set a copy."""
    owner = _owner(effect, local, scope)
    if effect.attribute is None:
        return owner.copy() if isinstance(owner, list | dict | set) else owner
    if isinstance(owner, Mapping) and "[" in effect.owner and not hasattr(owner, effect.attribute):
        return owner.get(effect.attribute, _ABSENT)
    return getattr(owner, effect.attribute, _ABSENT)


def _owner(effect: Effect, local: Scope, scope: Scope) -> Any:
    if effect.owner == f"G['{effect.attribute}']":  # a global is an attribute of no object
        return _GlobalVariables(scope)
    return accessor(effect.owner)(local, scope)


class _GlobalVariables:
    """Global variables as attributes."""

    def __init__(self, scope: Scope) -> None:
        self.__dict__ = scope  # type: ignore[assignment]


def _snapshots(effects: list[Effect], local: Scope, scope: Scope) -> list[Callable[[], None]]:
    """Return functions that restore the present values."""
    restore: list[Callable[[], None] | None] = []
    for effect in effects:
        owner = _owner(effect, local, scope)
        if effect.attribute is not None:
            restore.append(partial(_restore_attribute, owner, effect.attribute, _found(effect, local, scope)))
        else:
            restore.append(restoring_items(owner))
    return [each for each in restore if each is not None]


def _restore_attribute(owner: Any, name: str, value: object) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def _same(a: object, b: object) -> bool:
    """Return True if two values are one object, or equal and of plain types."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return isinstance(a, int | float | str | bytes | set | None) and a == b

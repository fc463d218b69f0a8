"""Side effects: Python values that a step changes while it runs, such as counters and caches.

A planned step runs kernels and no Python, so it changes none of them. A value that the step reads and changes at every call
would be frozen in the plan: it is refused by name. A value that the step only sets is named in a warning. A value that the
first step sets and later ones read (a mask that is built when first needed) is set before the capture, by one run of the model.

Which of the three it is cannot be read off the code, so the step runs twice on fake tensors, and the values after either are
compared. Tried and given up: to restore tensors after the first call, and not Python values. A parameter that is set from the
first batch (ActNorm) was then undone, and its flag kept. Known weaknesses: lists and other objects that change at every call are
refused, numbers are followed (``symbolic_numbers``).
"""

import operator
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import sympy
import torch
from torch import fx

from planner.capture.frontend.python_state import make_restore_items
from planner.capture.guards.later_calls import Scratch
from planner.capture.guards.names import Scope, build_accessor, is_of_torch, make_readable
from planner.capture.source_lines import is_our_code
from planner.graphs.errors import TraceError
from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private.capture import RemovableHandleVariable, SideEffects, get_constant_key, get_source_name, is_constant_key
from planner.torch_private.patches import wrap

_Change = Literal["never", "once", "made", "always"]  # "made": a tensor or an item, by each call, where there was none


@dataclass(frozen=True, slots=True)
class Effect:
    """A Python value that the captured code changes.

    Attributes:
        owner: name of the object, as Dynamo writes it.
        attribute: its name, or the key of an item; None if the object itself is changed, such as a list.
        where: the line that changes it, in brackets, for messages; empty if unknown.
        replaced: True if a buffer or parameter is replaced by another tensor.
        written: True if it is a tensor that is written in place.
        constant: the value at the end of the step, in a tuple, if it is a number, a text or None.
        number: likewise, as an expression of numbers that are inputs of the step.
        value: the variable that it is set to; of an object that is changed, its own.
        computes: True if the captured code computes with its earlier value.
        is_item: True if it is an item of a dict.
    """

    owner: str
    attribute: Any
    where: str
    replaced: bool = False
    written: bool = False
    constant: tuple[object] | None = None
    number: sympy.Basic | None = None
    value: Any = field(default=None, compare=False, repr=False)
    computes: bool = True
    is_item: bool = False

    @property
    def name(self) -> str:
        """The name of the value, as Dynamo writes it."""
        if self.is_item:
            return f"{self.owner}[{self.attribute!r}]"
        return self.owner if self.attribute is None else f"{self.owner}.{self.attribute}"

    @property
    def names(self) -> set[str]:
        """The names that guards on the value may have."""
        if self.attribute is None or self.is_item:
            return {self.name}
        places = f".{self.attribute}", f".__dict__['{self.attribute}']", f"['{self.attribute}']"
        return {f"{self.owner}{place}" for place in places}

    def is_read(self, guarded: frozenset[str]) -> bool:
        """Return True if guards look at this value or at a part of it."""
        return any(guard == name or guard.startswith((f"{name}.", f"{name}[")) for name in self.names for guard in guarded)

    @property
    def made(self) -> Collection[Any]:
        """The names of the attributes or items that the step may have made."""
        return _get_items(self.value)[1] if self.attribute is None else [self.attribute]

    @property
    def is_number(self) -> bool:
        """True if the value is an attribute that is set to a number."""
        constant = self.constant is not None and type(self.constant[0]) in (int, float)
        return self.attribute is not None and (constant or self.number is not None)

    def read(self, local: Scope, scope: Scope) -> object:
        """Return the present value; of a list, dict, set or deque a copy."""
        owner = _find_owner(self, local, scope)
        if self.attribute is None:
            return owner.copy() if isinstance(owner, list | dict | set | deque) else owner
        if self.is_item or (isinstance(owner, Mapping) and not hasattr(owner, self.attribute)):
            return owner.get(self.attribute, _ABSENT)
        return getattr(owner, self.attribute, _ABSENT)

    def write(self, value: object, local: Scope, scope: Scope) -> None:
        """Set the value, as the step does."""
        assert self.attribute is not None
        (operator.setitem if self.is_item else setattr)(_find_owner(self, local, scope), self.attribute, value)


class UnsettledError(Exception):
    """Raised if the step reads values that its first call sets: the step is then captured as of its second call."""

    def __init__(self, names: str, effects: list[Effect]) -> None:
        super().__init__(names)
        self.effects = effects


class CountingError(TraceError):
    """Raised if the step reads and changes numbers at every call; it may be captured with these as inputs.

    Attributes:
        names: the numbers, as Dynamo writes them.
    """

    def __init__(self, message: str, names: frozenset[str]) -> None:
        super().__init__(message)
        self.names = names


@contextmanager
def record_effects() -> Iterator[list[Effect]]:
    """Record the side effects of code that Dynamo captures: changes of Python values that existed before it ran."""
    found: list[Effect] = []
    with wrap(SideEffects, "codegen_update_mutated", partial(_record_effects, found)):
        yield found


def _record_effects(found: list[Effect], update: Callable[..., None], effects: SideEffects, *args: Any, **kwargs: Any) -> None:
    found[:] = chain.from_iterable(map(_split_items, list_effects(effects)))  # a restarted capture begins with an empty list
    if (output := effects.output_graph_weakref()) is not None:
        inputs = frozenset(get_source_name(each.meta["grapharg"].source) for each in _iterate_inputs(output.graph) if each.users)
        found[:] = (replace(effect, computes=not inputs.isdisjoint(effect.names)) for effect in found)
        found.extend(_iterate_written(output.graph))
    update(effects, *args, **kwargs)


def check_effects(
    effects: list[Effect], guarded: frozenset[str], run: Callable[[], object], local: Scope, scope: Scope
) -> tuple[Effect, ...]:
    """Refuse values that the step reads and changes at every call; warn about those that it only sets.

    Returns:
        The changes of numbers that are inputs of the step: each step makes them.

    Args:
        guarded: names that guards look at, as Dynamo writes them.
        run: a function that executes the step on fake tensors.
        local, scope: the variables by which names are resolved.

    Raises:
        TraceError: with the value and the line that changes it.
        UnsettledError: values change in the first call only.
        CountingError: the values are numbers, and may be inputs.
    """
    for effect in effects:
        if effect.replaced:
            raise TraceError(
                f"{make_readable(effect.name, local, scope)} is replaced by another tensor in the step{effect.where}, which a "
                "planned step does not do: change it in place (copy_, add_, lerp_)"
            )
    _check_written((effect for effect in effects if effect.written), local, scope)
    effects = [
        effect
        for effect in effects
        if not effect.written
        and not isinstance(_find_owner(effect, local, scope), Scratch)
        # A flag that is set and reset is no effect.
        and not (effect.constant is not None and _is_same(effect.constant[0], effect.read(local, scope)))
    ]
    asked = [effect for effect in effects if _is_only_asked_for(effect, local, scope)]
    effects = [effect for effect in effects if effect not in asked]
    changes = _find_changes(effects, run, local, scope) if effects else {}
    counted = [
        effect
        for effect, change in changes.items()
        if change == "always" and effect.is_read(guarded)
        if effect.is_number or type(effect.read(local, scope)) in (int, float)
    ]
    unsettled = [effect for effect, change in changes.items() if change in ("once", "made") and effect.is_read(guarded)]
    for effect, change in sorted(changes.items(), key=lambda found: not found[0].is_read(guarded)):  # refusals before warnings
        if change in ("never", "once") or (effect in counted and effect.number is not None) or effect in unsettled:
            continue
        if effect.is_read(guarded) and not isinstance(effect.value, RemovableHandleVariable):  # a hook is of its step alone
            message = _describe_change(effect, local, scope)
            if effect in counted:
                raise CountingError(message, frozenset().union(*(each.names & guarded for each in counted)))
            raise TraceError(message)
        _warn_of_set_value(effect, local, scope)
    if unsettled:
        raise UnsettledError(", ".join(f"{make_readable(e.name, local, scope)}{e.where}" for e in unsettled), unsettled)
    for effect in asked:
        _warn_of_set_value(effect, local, scope)
    return tuple(counted)


def _is_only_asked_for(effect: Effect, local: Scope, scope: Scope) -> bool:
    """Return True if a tensor takes the place of one like it, and the step only asks what that is, such as whether it is None."""
    before = None if effect.computes else effect.read(local, scope)
    value = effect.value.realize() if hasattr(effect.value, "realize") else effect.value
    if not isinstance(before, torch.Tensor) or value is None or not value.is_tensor():
        return False
    now = value.as_proxy().node.meta["example_value"]
    return (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)


def _describe_change(effect: Effect, local: Scope, scope: Scope) -> str:
    return (
        f"{make_readable(effect.name, local, scope)} changes at every step{effect.where}, and the step reads it: in a plan it "
        "would stay as it is now. Make it a tensor that is changed in place (a buffer, with add_), pass it with the batch as a "
        "tensor, or change it outside of what is planned"
    )


def _warn_of_set_value(effect: Effect, local: Scope, scope: Scope) -> None:
    name = make_readable(effect.name, local, scope)
    warn_caller(f"{name} is set by the step{effect.where}: a planned step does not set it, return it instead")


def _check_written(effects: Iterable[Effect], local: Scope, scope: Scope) -> None:
    """Raise TraceError if a tensor that the step writes is neither a parameter nor a buffer: AOTAutograd drops the write."""
    step: Any = local["self"]
    held = {id(tensor) for tensor in (*step.parameters(), *step.buffers())}
    for effect in effects:
        if id(_find_owner(effect, local, scope)) not in held:
            raise TraceError(
                f"{make_readable(effect.name, local, scope)}, which is no buffer, is written in place by the step, which a "
                "planned step does not do: make it a buffer (register_buffer)"
            )


def warn_of_first_call(effects: list[Effect], local: Scope, scope: Scope) -> None:
    """Warn that the first call of the step has set the values that later ones read; arguments as for ``check_effects``.

    PyTorch's own caches are nobody's surprise.
    """
    for effect in effects:
        if is_of_torch(effect.owner):
            continue
        name = make_readable(effect.name, local, scope)
        warn_caller(
            f"{name} is set by the first step{effect.where}, and read by later ones: the model was run once to set it, and the "
            "plan uses the value that it has now",
        )


@contextmanager
def warn_of_repeated(output: Any) -> Iterator[None]:
    """Warn once for each line that is captured inside and counts or appends: a checkpoint does so again when it recomputes.

    Values that do not depend on what they were before, as of a cache that is cleared, are the same after it.
    """
    known = {effect.where for effect in list_effects(output.side_effects)}
    yield
    local, scope = output.local_scope, output.global_scope
    guarded = frozenset(guard.name for guard in output.guards)
    for effect in list_effects(output.side_effects) if torch.is_grad_enabled() else ():
        before = effect.read(local, scope)
        repeats = effect.is_number and effect.is_read(guarded)
        if effect.attribute is None and isinstance(before, list | deque):
            repeats = len(before) != len(getattr(effect.value, "items", before))
        if repeats and effect.where not in known and not _is_same(effect.constant, (before,)):
            known.add(effect.where)
            name = make_readable(effect.name, local, scope)
            warn_caller(f"{name} changes in a checkpoint{effect.where}: when eager PyTorch recomputes it changes again")


def list_effects(effects: SideEffects) -> list[Effect]:
    """Return the changes of values that existed before the captured code ran."""
    found = []
    for variable in effects._get_modified_vars():
        if not (owner := get_source_name(variable.source)):
            continue  # made by the step itself
        frames = [frame for stack in effects.mutation_user_stacks.get(variable, ())[-1:] for frame in stack]
        own = [frame for frame in frames if not is_our_code(frame.filename)]  # attributes are set in nn.Module
        where = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(own or frames)), "")
        attributes = effects.store_attr_mutations.get(variable)
        if owner.endswith(("._buffers", "._parameters")):
            module = owner.rpartition(".")[0]
            found += [Effect(module, name, where, replaced=True) for name in _iterate_replaced(variable)]
        elif attributes:
            found += [
                Effect(owner, name, where, constant=_get_constant(value), number=_number(value), value=value)
                for name, value in attributes.items()
                if not _is_itself(value, owner, name)
            ]
        else:
            found.append(Effect(owner, None, where, value=variable))
    return [effect for effect in found if re.match(r"(\w+\()*[LG]\[", effect.owner)]


def _split_items(effect: Effect) -> list[Effect]:
    """Return the changes of the items of a dict that keeps its keys: the step may set each before it reads it."""
    before, now = _get_items(effect.value)
    if effect.attribute is not None or not now or list(before) != list(now):
        return [effect]
    return [
        replace(effect, attribute=key, is_item=True, value=value, constant=_get_constant(value), number=_number(value))
        for key, value in now.items()
        if value is not before[key]
    ]


def _get_items(variable: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the items of a dict before the captured code and after it; none if it is no dict with texts and numbers as keys."""
    if hasattr(variable, "original_items") and issubclass(variable.python_type(), dict):
        tables = variable.original_items, variable.items
        if all(is_constant_key(key) for table in tables for key in table):
            before, now = ({get_constant_key(key): value for key, value in table.items()} for table in tables)
            return before, now
    return {}, {}


def _iterate_written(graph: fx.Graph) -> Iterator[Effect]:
    """Yield the tensors that captured code writes in place, apart from the batch."""
    for node in _iterate_inputs(graph):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value._version:
            name = get_source_name(node.meta["grapharg"].source)
            if not name.startswith(("L['args']", "L['kwargs']")):
                yield Effect(name, None, "", written=True)


def _iterate_inputs(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.find_nodes(op="placeholder") if node.meta.get("grapharg") is not None)


def _iterate_replaced(tensors: Any) -> Iterator[str]:
    """Yield the names in a module's table of tensors that refer to another tensor than before; in-place writes do not count."""
    before, now = _get_items(tensors)
    for name, value in now.items():
        if value is not before.get(name) and _get_storage(value) != _get_storage(before.get(name)):
            yield name


def _get_storage(variable: Any) -> int | None:
    value = variable.realize() if hasattr(variable, "realize") else variable
    proxy = value.as_proxy() if value is not None and value.is_tensor() else None
    return None if proxy is None else proxy.node.meta["example_value"].untyped_storage()._cdata


def _get_constant(value: Any) -> tuple[object] | None:
    if not (value.is_python_constant() and isinstance(value.as_python_constant(), int | float | str | None)):
        return None
    return (value.as_python_constant(),)


def _number(value: Any) -> sympy.Basic | None:
    symbol = getattr(value.realize() if hasattr(value, "realize") else value, "sym_num", None)
    return symbol.node.expr if isinstance(symbol, torch.SymInt | torch.SymFloat) else None


def _is_itself(value: Any, owner: str, name: str) -> bool:
    """Return True if an attribute is set to its own value, such as a buffer by ``self.calls += 1``."""
    source = getattr(value, "source", None)
    if source is None:
        return False
    return get_source_name(source) in {f"{owner}.{name}", f"{owner}._buffers['{name}']", f"{owner}._parameters['{name}']"}


def _find_changes(effects: list[Effect], run: Callable[[], object], local: Scope, scope: Scope) -> dict[Effect, _Change]:
    """Return in which of two steps on fake tensors each value changes; all values are restored afterwards."""
    with preserve_values(effects, local, scope):
        try:
            seen = [[effect.read(local, scope) for effect in effects]]
            for _ in range(2):
                run()
                seen.append([effect.read(local, scope) for effect in effects])
            return {effect: _change(*values) for effect, values in zip(effects, zip(*seen, strict=True), strict=True)}
        except Exception:  # noqa: BLE001  # it cannot run on fake tensors: a number that the step sets is taken as changing
            return {e: "always" if isinstance(e.read(local, scope), int | float) else "once" for e in effects}


@contextmanager
def preserve_values(effects: list[Effect], local: Scope, scope: Scope) -> Iterator[None]:
    """Restore the values that a step changes to what they were, at the end; arguments as for ``check_effects``."""
    before = _take_snapshots(effects, local, scope)
    try:
        yield
    finally:
        for restore in before:
            restore()


def _change(first: object, second: object, third: object) -> _Change:
    # What only the first step changes is a cache or a flag; what the second one changes is changed by all. If the first one makes
    # a tensor or an item, later ones may only ask whether it is there.
    if not _is_same(second, third):
        if isinstance(first, dict) and isinstance(second, dict) and isinstance(third, dict):
            return "made" if first.keys() != second.keys() == third.keys() else "always"
        is_made = isinstance(second, torch.Tensor) and not isinstance(first, torch.Tensor)
        return "made" if is_made and isinstance(third, torch.Tensor) else "always"
    return "never" if _is_same(first, second) else "once"


_ABSENT = object()


def _find_owner(effect: Effect, local: Scope, scope: Scope) -> Any:
    if effect.owner == f"G['{effect.attribute}']":  # a global is an attribute of no object
        return _GlobalVariables(scope)
    return build_accessor(effect.owner)(local, scope)


class _GlobalVariables:
    """Global variables as attributes."""

    def __init__(self, scope: Scope) -> None:
        self.__dict__ = scope  # type: ignore[assignment]


def _take_snapshots(effects: list[Effect], local: Scope, scope: Scope) -> list[Callable[[], None]]:
    """Return functions that restore the present values."""
    restore: list[Callable[[], None] | None] = []
    for effect in effects:
        owner = _find_owner(effect, local, scope)
        if effect.attribute is None or effect.is_item:
            restore.append(make_restore_items(owner))
        else:
            restore.append(partial(_restore_attribute, owner, effect.attribute, effect.read(local, scope)))
    return [each for each in restore if each is not None]


def _restore_attribute(owner: Any, name: str, value: object) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def _is_same(a: object, b: object) -> bool:
    """Return True if two values are one object, or equal and of plain types."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    return isinstance(a, int | float | str | bytes | set | None) and a == b

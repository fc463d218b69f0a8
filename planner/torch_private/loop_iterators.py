"""Iterators that a graph break in a loop passes on to the next piece: as an iterator of a tuple of what is left.

Dynamo captures no code that is given an iterator of another kind, so that the rest of a loop over ``zip()`` had no plan. It also
passes on what a list or a generator would return if it were read at the break, though the loop may change that: it appends to the
list, or sets an attribute that the generator reads. Frames with such iterators are left out, and with those of map() and
filter(), whose calls would be made at the break.

Known weakness: lists that are attributes, and items and values of dicts, count as changed by whatever the loop calls.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy
from functools import partial
from itertools import count, islice
from typing import Any

import torch._dynamo.variables.iter as iterators
from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import (
    InstructionTranslatorBase,
    save_and_restart_speculation_log,
    temporarely_allow_writes_to_output_graph,
)
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TupleVariable, VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lists import BaseListVariable, ListIteratorVariable, RangeIteratorVariable

from planner.torch_private.patches import wrap_for_good

_MOST_ITEMS = 1_000  # that a piece is given, each of which it checks
_DICT_VIEWS = getattr(iterators, "DictViewIterator", ())  # torch 2.11 has none
_OF_KEYS = tuple(getattr(iterators, name) for name in ("DictIterator", "DictKeysIterator") if hasattr(iterators, name))
# Generator functions that call no function of the user's.
_OF_MODULES = "torch.nn.modules."
_OF_ITERATORS = "torch._dynamo.polyfills."
_NAMES = {"chain", "chain_from_iterable", "compress", "islice", "pairwise", "zip_longest"}


def pass_on_iterators_where(wanted: Callable[[InstructionTranslatorBase], bool]) -> None:
    """Make Dynamo pass on iterators from the frames that are `wanted` as tuple iterators, or leave out the whole frame."""
    pass_on = partial(_pass_on, wanted, ListIteratorVariable.reconstruct)
    of_lists = (ListIteratorVariable, RangeIteratorVariable, iterators.ZipVariable, LocalGeneratorObjectVariable)
    of_calls = (iterators.MapVariable, iterators.FilterVariable)  # what is left of these is not known
    for kind in (*of_lists, *of_calls, *((_DICT_VIEWS,) if _DICT_VIEWS else ())):
        wrap_for_good(kind, "reconstruct", pass_on)
    wrap_for_good(SideEffects, "_get_modified_vars", _advance_last)


def _advance_last(list_changed: Callable[..., list[Any]], effects: Any) -> list[Any]:
    """Return what captured code changes, with iterators last: the code that sets attributes of their items reads them."""
    return sorted(list_changed(effects), key=lambda variable: isinstance(variable, iterators.IteratorVariable))


def _pass_on(
    wanted: Callable[[Any], bool], write_list: Callable[..., None], write: Callable[..., None], iterator: Any, codegen: Any
) -> None:
    tx = codegen.tx
    if not wanted(tx):
        return write(iterator, codegen)
    if isinstance(iterator, RangeIteratorVariable):
        iterator.stop = iterator.start + iterator.len * iterator.step  # Dynamo's is wrong for reversed(range(n)): one is lost
        return write(iterator, codegen)
    rest = _list_rest(tx, iterator) if _is_settled(tx, iterator) else None
    if rest is None or len(rest) > _MOST_ITEMS:
        unimplemented(
            gb_type="a loop over what it may change",
            context=str(iterator),
            explanation="What is left of an iterator is passed on to the code behind a graph break only if it is known.",
            hints=["Loop over a tuple."],
        )
    return write_list(ListIteratorVariable(rest), codegen)


def _is_settled(tx: Any, iterator: Any) -> bool:
    """Return True if what is left of an iterator is finite, and the same whatever the frame does before it is read."""
    match iterator:
        case ListIteratorVariable():
            return not _may_change(tx, iterator.items)
        case RangeIteratorVariable():
            return True
        case iterators.ZipVariable():
            finite = [each for each in iterator.iterable.items if not isinstance(each, iterators.CountIteratorVariable)]
            if not finite or not all(_is_settled(tx, each) for each in finite):
                return False
            lengths = {len(_list_rest(tx, each)) for each in finite}
            return not iterator.strict or (len(finite) == len(iterator.iterable.items) and len(lengths) == 1)
        case LocalGeneratorObjectVariable():
            return _is_settled_generator(tx, iterator)
        case _:
            return isinstance(iterator, _OF_KEYS)


def _is_settled_generator(tx: Any, generator: Any) -> bool:
    code, module = generator.get_code(), generator.f_globals.get("__name__", "")
    if module.startswith(_OF_MODULES):
        return True
    is_simple = not (code.co_names or code.co_freevars)  # it reads its arguments only
    if not (is_simple or (module.startswith(_OF_ITERATORS) and code.co_name in _NAMES)):
        return False
    tracer, read = generator.inline_tracer, list[Any]()
    VariableTracker.visit(read.append, (tracer.symbolic_locals, tracer.stack))
    return all(_is_settled_value(tx, value) for value in read)


def _is_settled_value(tx: Any, value: Any) -> bool:
    """Return True if a generator that iterates over `value` has the same items whatever the frame does before."""
    if isinstance(value, iterators.IteratorVariable | LocalGeneratorObjectVariable):
        return _is_settled(tx, value)
    if isinstance(value, ConstDictVariable):
        return False
    if isinstance(value, BaseListVariable):
        return not _may_change(tx, value.items)
    return not (value.is_tensor() or hasattr(value.python_type(), "__next__"))


def _list_rest(tx: Any, iterator: Any) -> list[Any]:
    """Return what is left of a settled iterator, up to one item more than may be passed on."""
    return list(islice(_iterate_rest(tx, iterator), _MOST_ITEMS + 1))


def _iterate_rest(tx: Any, iterator: Any) -> Iterable[Any]:
    """Return what is left of a settled iterator, without advancing it."""
    match iterator:
        case ListIteratorVariable():
            return [] if iterator.is_exhausted else iterator.items[iterator.index :]
        case RangeIteratorVariable():
            return (ConstantVariable.create(iterator.start + i * iterator.step) for i in range(iterator.len))
        case iterators.CountIteratorVariable():
            numbers = count(iterator.item.as_python_constant(), iterator.step.as_python_constant())
            return map(ConstantVariable.create, numbers)
        case iterators.ZipVariable():
            rests = [_iterate_rest(tx, each) for each in iterator.iterable.items]
            return (TupleVariable(list(items)) for items in zip(*rests, strict=False))
        case LocalGeneratorObjectVariable():
            if not getattr(iterator, "remaining_items", None):  # an exhausted one has none, however often it is asked
                with save_and_restart_speculation_log(tx), temporarely_allow_writes_to_output_graph(tx):
                    rest: Any = BuiltinVariable(tuple).call_function(tx, [iterator], {})
                iterator.remaining_items = rest.items
            return list(iterator.remaining_items)
        case _:
            return [key.vt for key in copy(iterator._iter)]


def _may_change(tx: Any, items: Any) -> bool:
    """Return True if code in the rest of the frame, or that it calls or returns to, may change the list with these `items`."""
    if tx.instruction_pointer is None:  # the frame returns the iterator
        return True
    effects = tx.output.side_effects
    names = {name for name, value in tx.symbolic_locals.items() if _is_list_of(items, value.unwrap())}
    others = [value for name, value in tx.symbolic_locals.items() if name not in names]
    if _find_lists(items, (others, effects.store_attr_mutations)):
        return True
    known = _find_lists(items, list(effects.id_to_variable.values()))
    if any(found.source is not None and not isinstance(found.source, LocalSource) for found in known):
        return True
    return not names.isdisjoint(_iterate_names(tx))


def _is_list_of(items: Any, value: Any) -> bool:
    if not isinstance(value, BaseListVariable) or isinstance(value, TupleVariable) or len(value.items) != len(items):
        return False
    return all(a.unwrap() is b.unwrap() for a, b in zip(value.items, items, strict=True))  # Dynamo copies lists of lazy values


def _find_lists(items: Any, held: object) -> list[Any]:
    found: list[Any] = []
    VariableTracker.visit(found.append, held)
    return [value for value in found if _is_list_of(items, value)]


def _iterate_names(tx: Any) -> Iterator[str]:
    """Yield the local names that the loop, and what is behind it, reads for anything but to iterate."""
    places: dict[Any, int] = tx.indexof
    ahead = tx.instructions[tx.instruction_pointer - 1 :]
    first = min([tx.instruction_pointer, *(places[each.target] for each in ahead if each.target is not None)])
    code = tx.instructions[first:]
    for each, following in zip(code, [*code[1:], None], strict=True):
        if each.opname.startswith("LOAD_") and not (following is not None and following.opname == "GET_ITER"):
            yield from each.argval if isinstance(each.argval, Collection) and not isinstance(each.argval, str) else [each.argval]

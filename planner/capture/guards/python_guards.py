"""Guards on the Python values that a capture read, and that a plan keeps: they are checked before every step.

Dynamo records every value that it reads: a coefficient, ``Dropout.p``, the class of a submodule, its hooks, which weights are
one tensor. ``torch.compile`` checks these guards at each call, in microseconds; so does a planned step. Guards that need not
hold for a plan to be correct, and those that the step checks itself with better messages, are left out.

Guards are built without the capture's dispatcher: those on tensors compare dispatch keys, and it is not active when a step is
called. For the same reason a mode around a step, such as a counter of FLOPs, must be allowed for.

Nine of ten guards read what the step stores, and pass again where it stores the same objects (``stored_values.py``). PyTorch can
skip modules whose dicts are unchanged (``use_recursive_dict_tags_for_guards``). That is off since 2.12: below Python 3.12 it
reads dicts that may have been freed, and it has crashed above (pytorch#181873, pytorch#188101). It also misses defaults of
functions that are replaced.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import FrameSummary
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from planner.capture.guards.later_calls import LaterCall, make_calls
from planner.capture.guards.messages import explain, get_code, is_failing, is_followed_value, is_mode
from planner.capture.guards.names import Scope, build_accessor, is_of_torch, make_readable
from planner.capture.guards.replaced_names import Frames, Replaceable, find_replaceable, needs_layout
from planner.capture.guards.stored_values import StoredValues, divide_guards
from planner.capture.program.numbers import StepNumbers
from planner.capture.rewrites.sparse_products import get_part_addresses, is_sparse
from planner.capture.signature import Batch, split_arguments
from planner.capture.source_lines import GRAPH_BREAK_ADVICE, ITERATOR_REFUSAL
from planner.graphs.errors import MismatchError, NumberMismatchError, TraceError
from planner.torch_private import capture as private
from planner.torch_private.core import (
    is_in_torch_dispatch_mode,
    nn_module,
    no_dispatch,
    no_python_dispatcher,
    pytree,
)

T = TypeVar("T")

PLAN_AGAIN = "plan again (planner.compile), or plan with replan=True, which does so by itself"
WAYS_OUT = f"{PLAN_AGAIN}; a number that changes often may be a tensor that is changed in place, which a plan reads at every step"

OTHER_MODE = (
    "To evaluate, call model(...) itself, or the step under torch.no_grad(). To train, call model.{mode}() first, or plan in "
    "this mode too: planner.compile again, or with replan=True"
)

# Gradient mode, the number of threads and what runs around a step are no part of a plan.
_AMBIENT = {
    "GRAD_MODE",
    "DETERMINISTIC_ALGORITHMS",
    "GLOBAL_STATE",
    "TORCH_FUNCTION_STATE",
    "SHAPE_ENV",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
}
# Names of modules and builtins do not change while a program trains.
_FIXED = {"MODULE_MATCH", "BUILTIN_MATCH"}
# Arguments are checked by a step's signature. Guards only check shared tensors, and values inside of objects.
_OF_ARGUMENTS = {"DUPLICATE_INPUT", "CONSTANT_MATCH", "EQUALS_MATCH"}
_ARGUMENT = re.compile(r"L\['(?:args|kwargs)'\](?:\['[^']*'\]|\[\d+\]|\.\w+)*")
_REGISTRY = "._registered_model_output_types"  # of Transformers, which adds to it whenever another model is imported
_TAKE_KEYWORDS = "_with_kwargs"
_TRACKER = "torch.utils.module_tracker"  # whose hooks, of a counter of FLOPs, only follow which module runs
_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


@dataclass(frozen=True, slots=True)
class ExternalValue:
    """A tensor, array or generator that a step reads and that is neither a parameter nor a buffer nor an input.

    Attributes:
        name: its name, as Dynamo writes it.
        find: a function that returns its present value.
        value: the one that was captured; of a sparse matrix the addresses of its parts.
    """

    name: str
    find: Callable[[Scope, Scope], object]
    value: object


@dataclass(frozen=True, slots=True)
class PythonGuards:
    """The guards of one capture.

    Attributes:
        manager: Dynamo's guard manager.
        others: that of the guards that do not follow from `stored`.
        stored: the values that the step stores.
        scope: the globals that guards name.
        external: values that must still be the same objects.
        replaceable: functions that must still be the same objects, and environment variables.
        strides: those of the tensors of the batch, if the step asks for their layout; else empty.
        state: global settings of PyTorch.
        parts: Dynamo's guards as expressions.
        numbers: the numbers that the program reads in each step; None if there are none.
        later: the calls that are made after the forward pass.
    """

    manager: private.CheckFunctionManager
    others: private.CheckFunctionManager
    stored: StoredValues
    scope: Scope
    external: tuple[ExternalValue, ...]
    replaceable: Replaceable
    strides: tuple[tuple[int, ...], ...]
    state: Mapping[str, object]
    parts: tuple[str, ...]
    numbers: StepNumbers | None = None
    later: tuple[LaterCall, ...] = ()

    def check(
        self, step: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], *, is_unchanged: bool
    ) -> tuple[Any, ...]:
        """Return the numbers of the step if it is as it was captured: that one, or another of the same model and loss function.

        Args:
            is_unchanged: True if all that the step stores, and all replaceable names, are as they were when all guards passed.

        Raises:
            MismatchError: with what changed, from what to what, where it is read, and what to do.
        """
        if (changed := self.replaceable.describe_change(is_unchanged=is_unchanged)) is not None:
            raise MismatchError(changed, f": its value is part of the plan; {PLAN_AGAIN}")
        local = {"self": step, "args": args, "kwargs": kwargs}
        # A mode around the step, such as a counter of FLOPs, changes how tensors are dispatched, but not the step. To leave the
        # mode is not enough: guards on tensors of subclasses fail then.
        with no_dispatch() if is_in_torch_dispatch_mode() else nullcontext():
            manager = self.others if is_unchanged else self.manager
            if not manager.guard_manager.check(local):
                raise self._build_error(local)
        if self.strides and (strides := _list_strides(args, kwargs)) != self.strides:
            raise MismatchError(
                f"the tensors of the batch had strides {self.strides} when the step was planned, and have {strides} now; the "
                "step depends on them",
                f": make them contiguous() as they were, or {PLAN_AGAIN}",
            )
        for external in self.external:
            found = external.find(local, self.scope)
            if found is not external.value and not (isinstance(found, tuple) and found == external.value):
                name = make_readable(external.name, local, self.scope)
                match external.value:
                    case np.generic():
                        raise MismatchError(
                            f"{name} is another NumPy number than when the step was planned",
                            f": make it a number of Python ({name}.item()), which a plan follows, or {PLAN_AGAIN}",
                        )
                    case torch.Tensor():
                        kind, change = "tensor", f"{name}.copy_(...)"
                    case tuple():
                        kind, change = "sparse matrix", f"{name}.values().copy_(...)"
                    case torch.Generator():
                        kind, change = "generator", f"{name}.set_state(...)"
                    case _:
                        kind, change = "array", f"{name}[...] = ..."
                raise MismatchError(
                    f"{name} is another {kind} than when the step was planned",
                    f": change that one in place ({change}), or {WAYS_OUT}",
                )
        if self.state != (now := get_global_state()):
            name = next(name for name, value in self.state.items() if value != now[name])
            raise MismatchError(
                f"{name} was {self.state[name]!r} when the step was planned, and is {now[name]!r} now", f"; {WAYS_OUT}"
            )
        return () if self.numbers is None else self.numbers.read(local, self.scope)

    def count(self, step: nn.Module, numbers: Sequence[object]) -> None:
        """Change the numbers that the step itself changes; `numbers` are those of this step."""
        if self.numbers is not None:
            self.numbers.write(numbers, {"self": step}, self.scope)

    def call_later(self, step: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Make the calls that come after the forward pass, with the `tensors` that it has returned for them."""
        if self.later:
            make_calls(self.later, tensors, {"self": step}, self.scope)

    def wrap_uncounted(self, call: Callable[..., T], step: nn.Module) -> Callable[..., T]:
        """Return `call`, which runs `step`, so that the numbers that it changes are then as they were captured."""
        if self.numbers is None or not self.numbers.writes:
            return call
        return partial(_call_and_reset, call, partial(self.numbers.reset, {"self": step}, self.scope))

    def find_changed_numbers(self, step: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> set[str]:
        """Return the names of the numbers whose guards fail, as Dynamo writes them."""
        local = {"self": step, "args": args, "kwargs": kwargs}
        own = [part for part in self.parts if re.match(r"(\w+\()*[LG]\[", part)]  # others name settings of PyTorch
        numbers = [part for part in own if is_followed_value(part, local, self.scope)]
        return {part.partition(" == ")[0] for part in numbers if " == " in part and is_failing(part, local, self.scope)}

    def find_unread(self, batch: Batch) -> set[int]:
        """Return the positions of the numbers in `batch` that no guard looks at, but for their types."""
        flat, spec = pytree.tree_flatten(split_arguments(batch))
        args, kwargs = pytree.tree_unflatten(range(len(flat)), spec)
        values = [part for part in self.parts if not part.startswith("___check_type_id")]
        paths = {path for part in values for path in _ARGUMENT.findall(part)}
        read = [found for path in paths if type(found := _place({"args": args, "kwargs": kwargs}, path)) is int]
        return {i for i, leaf in enumerate(flat) if isinstance(leaf, int | float)}.difference(read)

    def _build_error(self, local: Scope) -> MismatchError:
        found = self.manager.guard_manager.check_verbose(local)
        parts = [part for part in found.verbose_code_parts if is_failing(part, local, self.scope)] or found.verbose_code_parts
        why = explain(parts[0] if parts else "something that the step depends on", local, self.scope)
        where = _format_line(found.user_stack)
        if parts and is_mode(parts[0]):
            mode = "train" if "== True" in get_code(parts[0]) else "eval"
            return MismatchError(f"{why}{where}", f". {OTHER_MODE.format(mode=mode)}")
        kind = NumberMismatchError if parts and is_followed_value(parts[0], local, self.scope) else MismatchError
        return kind(f"{why}{where}", f": the plan depends on it; {WAYS_OUT}")


def refuse_iterators(output: private.CaptureOutput, step: nn.Module) -> None:
    """Raise TraceError if the captured `step` advances an iterator that exists before it."""
    captured = output.graph_capture_output
    for guard in captured.output_graph.guards:
        if guard.create_fn_name() in ("COUNT_ITERATOR_MATCH", "RANGE_ITERATOR_MATCH"):
            name = make_readable(guard.name, {"self": step}, captured.f_globals)
            raise TraceError(ITERATOR_REFUSAL.format(where="the step", name=name, on=GRAPH_BREAK_ADVICE))


def build_guards(
    output: private.CaptureOutput,
    frames: Frames,
    step: nn.Module,
    batch: Batch,
    constants: Iterable[str] = (),
    later: Iterable[LaterCall] = (),
    aliased: Collection[str] = (),
) -> PythonGuards:
    """Return the guards of the code that Dynamo captured of `step` on `batch`.

    Args:
        output: the result of ``fullgraph_capture``.
        frames: all functions that were captured with it (``planner.capture.guards.replaced_names.record_frames``).
        constants: names of the generators and sparse matrices that ops take.
        later: the calls that are made after the forward pass.
        aliased: names of tensors that the step itself tells to require a gradient: they may do so before, or not.

    Raises:
        AssertionError: Dynamo finds that a guard fails right after it was made.
    """
    args, kwargs = split_arguments(batch)
    captured = output.graph_capture_output
    graph = captured.output_graph
    local, scope = {"self": step, "args": args, "kwargs": kwargs}, captured.f_globals
    names = {guard.name for guard in graph.guards}
    implied = {name for name in names if _is_of_no_hooks(name, names, local, scope)}
    relevant = [guard for guard in graph.guards if _is_relevant(guard) and guard.name not in implied.union(aliased)]
    stored, others = divide_guards(relevant, step)
    # The capture's dispatcher, which is active here, is not when a step is called: guards on tensors compare dispatch keys.
    with private.enter_dynamo_phase("build_guards"), no_python_dispatcher(), private.build_guards_for_plan():
        code = private.get_traced_fn(step)[0].__code__
        graph._guards = private.GuardsSet(type(graph.guards.inner)(others))
        of_others = captured.build_guards(code)
        graph._guards = private.GuardsSet(type(graph.guards.inner)(relevant))
        manager = captured.build_guards(code)
    sources = [
        private.get_source_name(source) for source in graph.export_metadata.graph_input_idx_to_local_source.values() if source
    ]
    external = tuple(_iterate_external_values([*sources, *constants], step, local, scope))
    strides = _list_strides(args, kwargs) if needs_layout(frames) else ()
    parts = tuple(get_code(part) for guard in graph.guards for part in guard.code_list or ())
    state = get_global_state()
    replaceable = find_replaceable(frames, step)
    made_later = tuple(later)
    return PythonGuards(manager, of_others, stored, scope, external, replaceable, strides, state, parts, later=made_later)


def list_guarded_names(output: private.CaptureOutput) -> frozenset[str]:
    """Return the names of all that guards look at, as Dynamo writes them; also of attributes that are missing."""
    guards = output.graph_capture_output.output_graph.guards
    return frozenset(name for guard in guards for name in (guard.name, private.get_attribute_name(guard)))


def get_global_state() -> dict[str, object]:
    """Return the global settings of PyTorch that a capture depends on; autocast is checked by the step itself."""
    hooks = [getattr(nn_module, name).values() for name in _HOOKS]
    counts = tuple(sum(getattr(hook, "__module__", "") != _TRACKER for hook in each) for each in hooks)
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "the kernels that scaled_dot_product_attention may choose from": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.is_available() and torch.backends.cudnn.benchmark,
        "the number of hooks on all modules": counts,
    }


def _is_relevant(guard: private.Guard) -> bool:
    kind, name = guard.create_fn_name(), guard.name
    if kind in _AMBIENT or kind in _FIXED or name.startswith(("G['__builtins_dict__", "__import__(")):
        return False
    if name.endswith("._validate_args"):  # of distributions: it decides about errors, not about results
        return False
    if _REGISTRY in name or _REGISTRY in (private.get_other_name(guard) or ""):
        return False
    if name.startswith(("L['args']", "L['kwargs']")):
        return kind in _OF_ARGUMENTS
    return not is_of_torch(name)


def _is_of_no_hooks(name: str, names: Collection[str], local: Scope, scope: Scope) -> bool:
    """Return True if `name` is of the dict that says which hooks of a module take keyword arguments, and it has no hooks.

    A hook is in the dict of its hooks too, which has a guard of its own. Two of six such dicts of each module are of this kind.
    """
    hooks = name.removesuffix(_TAKE_KEYWORDS)
    return hooks != name and hooks in names and not build_accessor(hooks)(local, scope)


def _iterate_external_values(sources: Iterable[str], step: nn.Module, local: Scope, scope: Scope) -> Iterable[ExternalValue]:
    """Yield the graph's inputs that a program holds as constants."""
    registered = {id(tensor) for tensor in (*step.parameters(), *step.buffers())}
    for source in sources:
        if source.startswith(("L['args']", "L['kwargs']")):
            continue
        name = source.removeprefix("___from_numpy(").removesuffix(")") if source.startswith("___from_numpy(") else source
        find = build_accessor(name)
        value = find(local, scope)
        if isinstance(value, torch.Tensor) and is_sparse(value):
            yield ExternalValue(name, partial(_get_part_addresses, find), get_part_addresses(value))
        elif isinstance(value, torch.Tensor | torch.Generator | np.ndarray | np.generic) and not (
            isinstance(value, float) or id(value) in registered  # an np.float64 is read as a float
        ):
            yield ExternalValue(name, find, value)


def _call_and_reset(call: Callable[..., T], reset: Callable[[], None], /, *args: object, **kwargs: object) -> T:
    returned = call(*args, **kwargs)
    reset()
    return returned


def _list_strides(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.stride() for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))


def _get_part_addresses(find: Callable[[Scope, Scope], object], local: Scope, scope: Scope) -> tuple[int, ...]:
    """Return the addresses of the parts of a sparse matrix; () if it is none any more."""
    matrix = find(local, scope)
    return get_part_addresses(matrix) if isinstance(matrix, torch.Tensor) and is_sparse(matrix) else ()


def _place(local: Scope, path: str) -> object:
    try:
        return build_accessor(path)(local, {})
    except (AttributeError, LookupError, TypeError):  # of a part of a leaf
        return None


def _format_line(stack: Iterable[FrameSummary] | None) -> str:
    frames = list(stack or ())
    return f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""

"""Concrete values during a capture: those of the batch, of parameters and buffers, and of what is computed from them alone.

A capture runs on fake tensors, which have shapes and no data. Python code that asks for a value (``if mask.all():``) can go on
where the value depends on no random number: its ops are executed on real tensors as well. Products of matrices, convolutions
and large results of parameters are not, since a condition must be cheap to compute before each step.

Values of parameters are not copied, which would take as much memory as the model. So an op that writes to one makes its value
unknown: executed on the value itself, it changed the model while it was captured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from planner.capture.source_lines import GRAPH_BREAK_ADVICE, find_current_line, format_location
from planner.graphs.errors import TraceError
from planner.torch_private.core import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    disable_python_dispatcher,
    excluded_dispatch_keys,
    force_dispatch_keys,
    included_dispatch_keys,
    no_dispatch,
    pytree,
)
from planner.torch_private.patches import wrap

aten = torch.ops.aten

_MOST_OF_PARAMETERS = 2**20  # elements of a result that is computed from parameters

# Comparisons with a number: their answers for every draw from [0, 1) if the number is at most 0, and if it is at least 1.
_COMPARISONS: dict[object, tuple[bool | None, bool]] = {
    aten.lt.Scalar: (False, True),
    aten.ge.Scalar: (True, False),
    aten.le.Scalar: (None, True),
    aten.gt.Scalar: (None, False),
}
# Those with 0 whose answers are the same for every draw but 0 itself, which is one in 2**24 of single precision.
_LIKELY = {aten.gt.Scalar: True, aten.le.Scalar: False}
_UNIFORM = (aten.rand.default, aten.rand_like.default, aten.uniform.default)


def compare_uniform(func: object, number: object) -> bool | None:
    """Return the answer of comparing numbers of [0, 1) with `number`; None unless it is the same for all of them."""
    if func not in _COMPARISONS or not isinstance(number, int | float):
        return None
    below, above = _COMPARISONS[func]
    if number < 0 and below is None:
        return not above
    return below if number <= 0 else above if number >= 1 else None


def is_uniform(func: object, args: Sequence[object]) -> bool:
    """Return True if an op draws from [0, 1)."""
    return func in _UNIFORM and (func is not aten.uniform.default or tuple(args[1:]) in ((), (0, 1)))


def find_size_inputs(
    func: OpOverload, args: Sequence[Any], dtype: Callable[[Any], torch.dtype]
) -> tuple[tuple[Any, ...], Callable[..., object] | None]:
    """Return the inputs that the sizes of an op's outputs depend on, if these are not all of them.

    Args:
        dtype: a function that returns the type of an argument.

    Returns:
        The arguments, and the function of their values that decides; (), None if it is all inputs.
    """
    if func is aten.masked_select.default:
        return (args[1],), count_true
    if func is aten._ctc_loss.Tensor:
        return (args[3],), _find_largest
    if func.name().startswith("aten::index"):
        masks = [index for index in args[1] if index is not None and dtype(index) in (torch.bool, torch.uint8)]
        return tuple(masks), count_true
    return (), None


def count_true(*masks: torch.Tensor) -> tuple[int, ...]:
    """Return the number of true elements of each mask."""
    return tuple(int(mask.count_nonzero()) for mask in masks)


def _is_fine(drawn: torch.Tensor) -> bool:
    """Return True if draws are seldom 0, and a wrong guess is noticed at once; on CUDA it would end the process."""
    return drawn.dtype in (torch.float32, torch.float64) and drawn.device.type == "cpu"


def _find_largest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


class ConcreteValues:
    """The concrete values of fake tensors, as far as they are known.

    Attributes:
        numbers: values of the symbols that stand for numbers which Python code took out of tensors.
        unknown: for symbols without a value, the reason.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, Any] = {}
        self.unknown: dict[Any, str] = {}
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._random: WeakIdKeyDictionary = WeakIdKeyDictionary()  # fake tensors that depend on random numbers
        self._uniform: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._likely: WeakIdKeyDictionary = WeakIdKeyDictionary()  # answers that no draw but 0 changes
        self._of_parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Sets of dispatch keys: included, excluded.
        self._outside = included_dispatch_keys(), excluded_dispatch_keys()
        self._stale: set[int] = set()  # storages that an unknown value was written to

    def get(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the value of `fake`; None if it is unknown. Constants of the step are no fake tensors."""
        if type(fake) is torch.Tensor and fake not in self._values:
            self._set(fake, fake)
        value: torch.Tensor | None = self._values.get(fake)
        return None if value is None or value.untyped_storage()._cdata in self._stale else value

    def get_likely(self, fake: torch.Tensor) -> bool | None:
        """Return the answer of a comparison that is the same for every random number but 0; None for others."""
        answer: bool | None = self._likely.get(fake)
        return answer

    def number(self, symbolic: Any) -> Any:
        """Return the value of a symbolic number; None if it is unknown."""
        expression = symbolic.node.expr.xreplace(symbolic.node.shape_env.real_tensor_prop_unbacked_vals)
        if expression.free_symbols:
            return None
        if isinstance(symbolic, torch.SymBool):
            return bool(expression)
        return int(expression) if isinstance(symbolic, torch.SymInt) else float(expression)

    def restart(self) -> None:
        """Restore the values of inputs and buffers, before the step is executed once more."""
        self._stale.clear()
        for fake, real in self._sources.values():
            self._set(fake, real)

    @contextmanager
    def propagate(self, lazily: Callable[[], bool]) -> Iterator[None]:
        """Compute the values of ops that are executed on fake tensors.

        Args:
            lazily: return True if a number that is taken out of a tensor now may stay a symbol until it is needed.
        """
        compute_or_dispatch = partial(self._compute_or_dispatch, lazily)
        with (
            wrap(FakeTensorMode, "from_tensor", self._make_from),
            wrap(FakeTensorMode, "dispatch", compute_or_dispatch),
        ):
            yield

    def _make_from(
        self, from_tensor: Callable[..., Any], mode: FakeTensorMode, tensor: torch.Tensor, **options: Any
    ) -> FakeTensor:
        fake: FakeTensor = from_tensor(mode, tensor, **options)
        if type(tensor) is nn.Parameter:
            self._of_parameters[fake] = True
        if type(tensor) in (torch.Tensor, nn.Buffer, nn.Parameter) and id(fake) not in self._sources:
            self._sources[id(fake)] = (fake, tensor)
            self._set(fake, tensor)
        return fake

    def _compute_or_dispatch(
        self,
        lazily: Callable[[], bool],
        dispatch: Callable[..., Any],
        mode: FakeTensorMode,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
            return dispatch(mode, func, types, args, kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags or any(t in self._random for t in given)
        value = self._compute_value(func, args, kwargs, given, random=torch.Tag.nondeterministic_seeded in func.tags)
        # Python gets the number itself, unless a symbol can stand for it until a branch needs it.
        if value is not None and torch.Tag.data_dependent_output in func.tags and not lazily():
            return value
        if (sized := self._make_sized(mode, func, args, value)) is not None:
            return sized
        result = dispatch(mode, func, types, args, kwargs)
        if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            self.name(result, value, given)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, FakeTensor)]
        values = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if any(t in self._of_parameters for t in given):
            self._of_parameters.update(dict.fromkeys(made, True))
            if not func.is_view and sum(real.numel() for real in values) > _MOST_OF_PARAMETERS:
                value = None
        if value is not None and len(made) == len(values):
            for fake, real in zip(made, values, strict=True):
                self._values[fake] = real
            return result
        for tensor in made:
            if random:
                self._random[tensor] = True
            if is_uniform(func, args):
                self._uniform[tensor] = True
            if func in _LIKELY and given[0] in self._uniform and args[1] == 0 and _is_fine(given[0]):
                self._likely[tensor] = _LIKELY[func]
        # Nothing is known any more of memory that an unknown value was written to, whichever view reads it.
        if func._schema.is_mutable:
            for written in given:
                self._uniform.pop(written, None)
                self._likely.pop(written, None)
                if written in self._values:
                    self._stale.add(self._values[written].untyped_storage()._cdata)
        return result

    def _compute_value(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        *,
        random: bool,
    ) -> Any:
        """Return the result of `func`; None if it is unknown."""
        if given and given[0] in self._uniform and len(args) > 1:
            answer = compare_uniform(func, args[1])
            return None if answer is None else torch.full(given[0].shape, answer, device=given[0].device)
        if func._schema.is_mutable and any(t in self._of_parameters for t in given):
            return None  # these values are no copies: it would write to the model
        if random or not func._schema.returns or func._overloadpacket in flop_registry or any(self.get(t) is None for t in given):
            return None
        concrete = [self.get(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves((args, kwargs))]
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in concrete):
            return None
        real_args, real_kwargs = pytree.tree_unflatten(concrete, pytree.tree_structure((args, kwargs)))
        with self._execute_on_real_tensors():
            return func(*real_args, **real_kwargs)

    @contextmanager
    def _execute_on_real_tensors(self) -> Iterator[None]:
        """Execute ops on real tensors, as outside of the capture."""
        with force_dispatch_keys(*self._outside), no_dispatch(), disable_python_dispatcher():
            yield

    def _set(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Set the value of `fake` to a copy of `real`, which is not written to when `fake` is; of parameters there is no copy."""
        with self._execute_on_real_tensors():
            self._values[fake] = real.detach() if fake in self._of_parameters else real.detach().clone()

    def _make_sized(self, mode: FakeTensorMode, func: OpOverload, args: Sequence[Any], value: Any) -> Any:
        """Return a fake result of the concrete size, for an op whose size depends on data; None for other ops."""
        if torch.Tag.dynamic_output_shape not in func.tags or func.name().startswith("aten::index"):
            return None  # an index counts the masks among its indices by other ops
        if value is not None:
            return pytree.tree_map_only(torch.Tensor, lambda real: self._make_like(mode, real), value)
        if func is aten.masked_select.default and (mask := self.get(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            with self._execute_on_real_tensors():
                (count,) = count_true(mask.broadcast_to(shape))
            with mode:
                return args[0].new_empty((count,))
        if func is aten._ctc_loss.Tensor and (lengths := self.get(args[3])) is not None:
            steps, batch, _ = args[0].shape
            with self._execute_on_real_tensors():
                longest = _find_largest(lengths)
            with mode:
                return args[0].new_empty((batch,)), args[0].new_empty((batch, steps, 2 * longest + 1))
        if func is aten.bincount.default:
            _, weights, length = (*args, None, 0)[:3]
            if not length:
                raise TraceError(
                    f"{format_location(find_current_line())} counts numbers that depend on parameters or activations, and as "
                    f"many as the largest of them: give minlength= above all numbers, or {GRAPH_BREAK_ADVICE}"
                )
            # As long as told, which an op checks (guards.assertions).
            dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
            with mode:
                return args[0].new_empty((length,), dtype=dtype)
        return None

    def _make_like(self, mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor whose value is `real`."""
        with mode:
            made = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        self._values[made] = real
        return made

    def name(self, symbolic: Any, value: Any, given: Sequence[torch.Tensor] = ()) -> None:
        """Set the value of a symbol for a number that was taken out of the tensors `given`; None if it is unknown."""
        for symbol in symbolic.node.expr.free_symbols:
            if value is None or value != value:
                self.unknown[symbol] = "random numbers" if any(t in self._random for t in given) else "parameters or activations"
            else:
                self.numbers[symbol] = int(value) if isinstance(value, bool) else value
                symbolic.node.shape_env.set_real_tensor_prop_unbacked_vals(symbol, self.numbers[symbol])

"""The memory of an optimizer, measured from the optimizer itself.

Its step runs twice on fake tensors with the shapes, types and device of its parameters: the first step makes its state, the
second one shows its temporaries. Nothing is allocated, and neither the optimizer nor its parameters change. Where a step reads a
number, it gets the same one each time, and each condition on tensors is false. State that is there already, of a run that goes
on, is read.

Tiny tensors in place of the real shapes were rejected: 8-bit optimizers keep the state of small tensors in 32 bits, Adafactor
keeps rows and columns of matrices, Muon takes matrices only.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.capture.step import TrainingStep
from planner.graphs.errors import PlannerError, UsageError, quote
from planner.graphs.optimizers import OPTIMIZERS, MeasuredOptimizer
from planner.torch_private.core import FakeTensorMode, StorageWeakRef, TorchDispatchMode, list_parts, pytree

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def find_memory(
    optimizer: str | MeasuredOptimizer | torch.optim.Optimizer | Sequence[torch.optim.Optimizer], step: TrainingStep
) -> str | MeasuredOptimizer:
    """Return the memory of the optimizer of a training step, or of several: measured, unless it was before, or known by a name.

    Several step one after the other, so that of their temporaries those count that take most.

    Raises:
        PlannerError: it cannot be measured.
        UsageError: it is no optimizer.
    """
    if isinstance(optimizer, str | MeasuredOptimizer):
        return optimizer
    several = optimizer if isinstance(optimizer, list | tuple) and optimizer else (optimizer,)
    if any(isinstance(one, type) or not (hasattr(one, "param_groups") and hasattr(one, "state")) for one in several):
        raise UsageError(
            f"optimizer is {quote(optimizer)}: must be the optimizer itself, made from the model's parameters, or one of "
            f"{', '.join(OPTIMIZERS)}, or a list of optimizers"
        )
    found = [measure_optimizer(one, list(step.parameters())) for one in several]
    return MeasuredOptimizer(
        " and ".join(one.name for one in found),
        tuple(size for one in found for size in one.state),
        max((one.temporaries for one in found), key=sum),
    )


def measure_optimizer(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> MeasuredOptimizer:
    """Return the memory that `optimizer` needs for those of its parameters that are among `parameters`.

    Args:
        optimizer: any optimizer, or a wrapper with one as ``optimizer``, such as Accelerate's.

    Raises:
        PlannerError: none of its parameters is among `parameters`, or its step does not run on fake tensors.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return measure_optimizer(inner, parameters)
    name, own = type(optimizer).__name__, {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
    if not held:
        raise PlannerError(
            f"the optimizer ({name}) has no parameter of this model, so that it does not train it: make it from the parameters "
            "of the model that is planned"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        return MeasuredOptimizer(name, _list_history_sizes(optimizer), ())
    devices = {p.device.type for p in held}
    known = {p: found for p in held if (found := _list_state(optimizer, p))}
    trained = [p for p in held if p.requires_grad]
    try:
        state, temporaries = _run_fake_steps(optimizer, trained, devices)
    except PlannerError:
        if not known.keys() >= set(trained):
            raise
        state, temporaries = {}, ()  # what it holds for a moment stays unknown
    return MeasuredOptimizer(name, _list_sizes(list((state | known).values()), devices), temporaries)


def _list_history_sizes(optimizer: torch.optim.LBFGS) -> tuple[int, ...]:
    """Return the sizes of L-BFGS's state when its history is full: steps and differences of gradients, and two numbers of each.

    It grows from step to step, so that two steps do not show it.
    """
    (group,) = optimizer.param_groups
    numbers, item_bytes = sum(p.numel() for p in group["params"]), group["params"][0].element_size()
    entries = group["history_size"]
    direction_and_gradient, scale = (numbers * item_bytes,) * 2, item_bytes
    return (*(numbers * item_bytes,) * (2 * entries), *(item_bytes,) * (2 * entries), *direction_and_gradient, scale)


def _run_fake_steps(
    optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter], devices: set[str]
) -> tuple[dict[nn.Parameter, object], tuple[int, ...]]:
    """Return the fake state of `optimizer` for each of `trained`, and the sizes of its temporaries on `devices`.

    Raises:
        PlannerError: its step does not run on fake tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _Numbers(), torch.no_grad():
        nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        fakes = {id(p): nothing for group in optimizer.param_groups for p in group["params"]}
        for p in trained:
            local = p.to_local() if hasattr(p, "to_local") else p  # the shard of this process
            like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
            fakes[id(p)] = nn.Parameter(like)
            fakes[id(p)].grad = torch.zeros_like(fakes[id(p)])
        fake = _build_fake_optimizer(optimizer, fakes)
        step = partial(_step_of(type(fake)), fake)
        try:
            with torch.compiler.set_stance("force_eager"):
                with _Values():  # type: ignore[no-untyped-call]
                    step()
                before = [_list_state(fake, p) for p in fakes.values()]
                with _Temporaries([*fakes.values()], before, devices) as temporaries:
                    step()
        except Exception as error:
            raise PlannerError(
                f"the memory of {type(optimizer).__name__} cannot be measured, because its step does not run on tensors without "
                f"memory ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): call its step() before "
                "planning, so that its state is there, or name an optimizer that keeps as many copies of the parameters, "
                f"optimizer= one of {', '.join(f'{name!r} ({known.copies})' for name, known in OPTIMIZERS.items())}"
            ) from error
        return {p: _list_state(fake, fakes[id(p)]) for p in trained}, temporaries.most


def _step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the method ``step`` of a class without the hooks of all optimizers, called with a closure if it needs one."""
    step = inspect.getattr_static(kind, "step")
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or closure.default is not closure.empty:
        return step  # type: ignore[no-any-return]
    return lambda optimizer: step(optimizer, lambda: torch.zeros(()))


def _list_state(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[object]:
    """Return what `optimizer`, and each optimizer that it wraps, keeps for a parameter."""
    found = [state] if (state := optimizer.state.get(p)) else []
    wrapped = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    return [*found, *(state for inner in wrapped for state in _list_state(inner, p))]


def _build_fake_optimizer(optimizer: torch.optim.Optimizer, fakes: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer like `optimizer` without state or hooks, with `fakes` in place of its parameters.

    It is not made by its class, whose arguments are unknown. Containers are copied, since a step writes to them.
    """
    fake = object.__new__(type(optimizer))
    methods = {name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))}  # step, as schedulers wrap it
    attributes = {name: value for name, value in vars(optimizer).items() if name not in {*methods, *_HOOKS, "state"}}
    vars(fake).update(_copy_value(attributes, fakes), state=defaultdict(dict), **{hooks: OrderedDict() for hooks in _HOOKS})
    for group, own in zip(fake.param_groups, optimizer.param_groups, strict=True):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = all(p.is_cuda for p in own["params"])  # as torch.optim chooses for real tensors
    train = getattr(fake, "train", None)
    if callable(train):  # those without a schedule have modes, as modules do
        train()
    return fake


def _copy_value(value: Any, fakes: Mapping[int, nn.Parameter]) -> Any:
    """Return `value` with copies of the containers and optimizers in it, and with `fakes` in place of parameters."""
    if isinstance(value, torch.optim.Optimizer):
        return _build_fake_optimizer(value, fakes)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.clear()
        copied.update({_copy_value(key, fakes): _copy_value(item, fakes) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(_copy_value(item, fakes) for item in value)
    return fakes.get(id(value), value)


class _Numbers(TorchFunctionMode):
    """Gives operators that take a number one where a step passes a tensor, which is read: a fake one is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        del types
        schema = getattr(getattr(func, "default", func), "_schema", None)
        if schema is not None:
            numbers = [str(argument.type) in ("float", "Optional[float]") for argument in schema.arguments]
            args = [
                0.5 if number and isinstance(value, torch.Tensor) else value for value, number in zip(args, numbers, strict=False)
            ]
        return func(*args, **(kwargs or {}))


class _Values(TorchDispatchMode):
    """Gives fake tensors a value where a step reads one: 1/2, for which no bias correction divides by zero, 1, or False."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        del types
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return dtype != torch.bool and (0.5 if dtype.is_floating_point else 1)
        return func(*args, **(kwargs or {}))


class _Temporaries(_Values):
    """Finds what is in memory at most, besides what was there before.

    Attributes:
        most: sizes of the tensors at the peak.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], state: object, devices: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        before = [*parameters, *(p.grad for p in parameters), state]
        storages = [tensor.untyped_storage() for tensor in _iterate_tensors(before)]
        self._devices, self._before = devices, {storage._cdata: storage for storage in storages}  # none is replaced by another
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and look at its results."""
        results = super().__torch_dispatch__(func, types, args, kwargs)
        self._alive = {key: (held, size) for key, (held, size) in self._alive.items() if not held.expired()}
        for tensor in _iterate_tensors(results):
            storage = tensor.untyped_storage()
            if tensor.device.type in self._devices and storage._cdata not in self._before:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        sizes = tuple(size for _, size in self._alive.values())
        self.most = max(self.most, sizes, key=sum)
        return results


def _list_sizes(state: object, devices: set[str]) -> tuple[int, ...]:
    """Return the sizes of the memory of the tensors in `state` on `devices`, each memory once."""
    storages = [tensor.untyped_storage() for tensor in _iterate_tensors(state) if tensor.device.type in devices]
    return tuple({storage._cdata: storage.nbytes() for storage in storages}.values())


def _iterate_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, and those that tensors of subclasses consist of."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from list_parts(leaf)

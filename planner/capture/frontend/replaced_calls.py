"""Functions in whose place captured code calls another one: Dynamo refuses them, or a plan has no use for what they do."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import count, groupby
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from planner.capture.frontend.effects import warn_of_repeated
from planner.capture.frontend.host_functions import assign_in_step, averages_all, normalize_by_average
from planner.capture.frontend.saved_tensors import enter_hooks, exit_hooks, init_hooks
from planner.torch_private import capture as private
from planner.torch_private.patches import wrap


def ignore_context(*_: object, **__: object) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return nullcontext()


def _iterate(modules: Any) -> Any:
    """Iterate over the modules that a module holds by an iterator that a graph break can pass on."""
    return iter(tuple(modules._modules.values()))


class OnDevice(TorchFunctionMode):
    """What ``with torch.device(...)`` does, written so that Dynamo follows it: tensors that name no device are made on this."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        del types
        given = kwargs or {}
        if any(func is each for each in private.DEVICE_CONSTRUCTORS) and given.get("device") is None:
            given = {**given, "device": self.device}
        return func(*args, **given)


def _make_mode(device: Any) -> OnDevice:
    return OnDevice(device)


# By the names of what is called, so that no library is imported for them.
_REPLACED: dict[str, Callable[..., Any]] = {
    "scipy.optimize._lsap.linear_sum_assignment": assign_in_step,
    "torch.nn.modules.batchnorm._BatchNorm.forward": normalize_by_average,
    "torch.autograd.graph.saved_tensors_hooks.__init__": init_hooks,
    "torch.autograd.graph.saved_tensors_hooks.__enter__": enter_hooks,
    "torch.autograd.graph.saved_tensors_hooks.__exit__": exit_hooks,
    "torch.nn.modules.container.ModuleList.__iter__": _iterate,
    "torch.nn.modules.container.Sequential.__iter__": _iterate,
    "torch.nn.modules.container.ModuleDict.items": lambda modules: tuple(modules._modules.items()),
    "torch.nn.modules.container.ModuleDict.values": lambda modules: tuple(modules._modules.values()),
    "torch.utils._device.DeviceContext.__torch_function__": OnDevice.__torch_function__,  # of torch.set_default_device
    "torch._dynamo.polyfills.builtins.enumerate": lambda iterable, start=0: zip(count(start), iterable, strict=False),
    # These say where eager PyTorch keeps what it saves for the backward pass, which a plan decides itself.
    "torch.autograd.graph.save_on_cpu": ignore_context,
    "torch.utils.checkpoint.set_checkpoint_early_stop": ignore_context,
}
# Functions of the first argument that tell whether it is replaced.
_CONDITIONS: dict[str, Callable[[Any], bool]] = {"torch.nn.modules.batchnorm._BatchNorm.forward": averages_all}


def replace_calls_where(wanted: Callable[[Any], bool], stack: ExitStack) -> None:
    """Call other functions in the frames that are `wanted`, until `stack` is closed."""
    for kind in (private.SkipFunctionVariable, private.UserDefinedClassVariable):
        stack.enter_context(wrap(kind, "call_function", partial(_call_other, wanted)))
    stack.enter_context(wrap(private.CheckpointHigherOrderVariable, "call_function", partial(_call_checkpointed, wanted)))
    stack.enter_context(wrap(private.ItertoolsVariable, "call_function", partial(_name_key, wanted)))
    stack.enter_context(wrap(private.InstructionTranslatorBase, "setup_or_before_with", partial(_enter_device, wanted)))
    inline = "inline_user_function_return"
    stack.enter_context(wrap(private.InstructionTranslatorBase, inline, partial(_inline_other, wanted)))


def _call_other(wanted: Callable[[Any], bool], call: Any, called: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    other = _find_other(called.value, args)
    if other is None or not wanted(tx):
        return call(called, tx, args, kwargs)
    return private.UserFunctionVariable(other).call_function(tx, args, kwargs)


def _call_checkpointed(wanted: Callable[[Any], bool], call: Any, called: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Call the function of a checkpoint as any other: a plan decides what is recomputed.

    Dynamo captures it into a graph of its own, and refuses functions that change Python objects.
    """
    if not wanted(tx):
        return call(called, tx, args, kwargs)
    function, *given = args
    _, kwargs = private.TagActivationCheckpoint.divide_kwargs(kwargs)
    with warn_of_repeated(tx.output):
        return function.call_function(tx, given, kwargs)


def _enter_device(wanted: Callable[[Any], bool], enter: Any, tx: Any, instruction: Any) -> None:
    """Enter a device, which is a context too, as a mode that Dynamo follows."""
    context = tx.stack[-1]
    if context.is_python_constant() and isinstance(context.as_python_constant(), torch.device) and wanted(tx):
        tx.stack[-1] = private.UserFunctionVariable(cast(Any, _make_mode)).call_function(tx, [context], {})
    enter(tx, instruction)


def _name_key(wanted: Callable[[Any], bool], call: Any, called: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Give ``itertools.groupby`` its key by name: Dynamo follows no other call of it with a key."""
    if called.value is groupby and len(args) == 2 and wanted(tx):
        args, kwargs = args[:1], {"key": args[1]}
    return call(called, tx, args, kwargs)


def _inline_other(
    wanted: Callable[[Any], bool], inline: Any, tx: Any, function: Any, args: Any, kwargs: Any, **options: Any
) -> Any:
    other = _find_other(getattr(function, "fn", None), args)
    if other is not None and wanted(tx):
        function = private.UserFunctionVariable(other)
    return inline(tx, function, args, kwargs, **options)


def _find_other(called: object, args: Any) -> Any:
    name = f"{getattr(called, '__module__', '')}.{getattr(called, '__qualname__', '')}"
    condition = _CONDITIONS.get(name)
    return _REPLACED.get(name) if condition is None or condition(args[0].realize().value) else None

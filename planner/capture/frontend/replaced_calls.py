"""Functions in whose place captured code calls another one: Dynamo refuses them, or a plan has no use for what they do."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from planner.capture.frontend.host_functions import assign_in_step, averages_all, normalize_by_average
from planner.torch_private import capture as private
from planner.torch_private.patches import wrap


def _ignore_context(*_: object, **__: object) -> AbstractContextManager[None]:
    return nullcontext()


# By the names of what is called, so that no library is imported for them.
_REPLACED: dict[str, Callable[..., Any]] = {
    "scipy.optimize._lsap.linear_sum_assignment": assign_in_step,
    "torch.nn.modules.batchnorm._BatchNorm.forward": normalize_by_average,
    # These say where eager PyTorch keeps what it saves for the backward pass, which a plan decides itself.
    "torch.autograd.graph.save_on_cpu": _ignore_context,
    "torch.utils.checkpoint.set_checkpoint_early_stop": _ignore_context,
}
# Functions of the first argument that tell whether it is replaced.
_CONDITIONS: dict[str, Callable[[Any], bool]] = {"torch.nn.modules.batchnorm._BatchNorm.forward": averages_all}


def replace_calls_where(wanted: Callable[[Any], bool], stack: ExitStack) -> None:
    """Call other functions in the frames that are `wanted`, until `stack` is closed."""
    for method in ("call_function", "inline_user_function_return"):  # of what frames call, and of what Dynamo itself calls
        stack.enter_context(wrap(private.InstructionTranslatorBase, method, partial(_call_other, wanted)))


def _call_other(wanted: Callable[[Any], bool], call: Any, tx: Any, function: Any, args: Any, kwargs: Any, **options: Any) -> Any:
    called = getattr(function, "value", getattr(function, "fn", None))
    name = f"{getattr(called, '__module__', '')}.{getattr(called, '__qualname__', '')}"
    replaced, condition = _REPLACED.get(name), _CONDITIONS.get(name)
    if replaced is not None and (condition is None or condition(args[0].realize().value)) and wanted(tx):
        function = private.UserFunctionVariable(replaced)
    return call(tx, function, args, kwargs, **options)

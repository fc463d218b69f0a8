"""``planner.checkpoint(model, budget="8GB")``: keeps a model's activations within a budget in any training loop."""

import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from planner.capture.frontend.failures import build_failure_on_fakes
from planner.capture.frontend.joint import find_logging_methods
from planner.capture.guards.messages import get_code
from planner.capture.step import check_module
from planner.graphs.errors import PlannerError
from planner.graphs.short_tracebacks import shorten_traceback
from planner.progress import OnProgress
from planner.settings.budget import read_budget
from planner.settings.plan import Wait, select_settings
from planner.torch_private import capture as private
from planner.torch_private.core import silence_fakes
from planner.train.backend import backend
from planner.train.backend.model_calls import call_model
from planner.train.backend.settings import parse_backend_options

M = TypeVar("M", bound=nn.Module)

_MARK = "_remat_planner_checkpoint"  # an attribute of wrapped calls
_MOST_SIZES = 64  # captures, mostly for input sizes, each of which is planned


@shorten_traceback
def checkpoint(
    model: M,
    *,
    budget: str | float | None,
    time_limit_s: float = 60.0,
    wait: Wait | str | float | None = None,
    tolerance: float | None = None,
    kernels: str = "eager",
    options: Sequence[str] = (),
    link: str | float | None = None,
    host_budget: str | int | None = None,
    roofline: str | None = None,
    check_writes: bool = False,
    memory: str | None = None,
    params: object = None,
    on_progress: OnProgress = None,
) -> M:
    """Make `model` keep its saved tensors within `budget`; changes and returns the same object.

    A drop-in replacement for ``gradient_checkpointing_enable()``: the loop stays ``loss = loss_fn(model(x), y);
    loss.backward()``, and outputs and gradients are bit-identical to eager PyTorch's. ``torch.compile`` captures the model. It is
    planned when it is first called with gradients enabled, and again for inputs of another size. Without gradients, or while
    another compiler captures it, the model runs without a plan. Parameters keep their names, and a copy of the model is an
    ordinary model without a plan.

    Args:
        model: the model that the loop calls, before it is wrapped in ``DistributedDataParallel``.
        budget: as in ``planner.compile``, for the model's parameters, buffers, inputs, gradients and activations. A share is of
            the largest peak without recomputation so far. The loss function, optimizer state, gradients of earlier batches, and
            what autograd holds for code before the model, if this is a part of another, are not counted. None removes the plan.
        time_limit_s, wait, tolerance, kernels, options, link, host_budget, check_writes, memory, params, on_progress: as in
            ``planner.compile``.
        roofline: device for modelled times; None to measure each op on the model's device.

    Raises:
        PlannerError: an option is wrong, or another compiler has compiled the model. When the model is called: options do not go
            together, or the model is captured for too many sizes or values.
        InfeasibleError, LimitError: as in ``planner.solve``, when the model is called.

    Examples:
        >>> planned = planner.checkpoint(model, budget="1GB")
        >>> planned is model
        True
        >>> loss_fn(planned(x), y).backward()
    """
    given = select_settings(locals())
    _check_can_be_planned(model)
    if budget is None:
        model._compiled_call_impl = None
        return model
    read_budget(budget).resolve(2**30)  # only the syntax of a share can be checked before the first call
    given |= {"budget": budget, "on_progress": on_progress}
    asked = {name: value for name, value in given.items() if value is not None and value != ()}
    parse_backend_options(asked)  # raise before the first call
    model._compiled_call_impl = _call(
        model, torch.compile(_build_own_call(model), backend=backend.planner, dynamic=False, options=asked)
    )
    return model


def _check_can_be_planned(model: nn.Module) -> None:
    """Raise a PlannerError if `model` is none, is wrapped, or is compiled by something else."""
    check_module(model)
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise PlannerError(
            f"planner.checkpoint was given a model wrapped in {type(model).__name__}: call it with the model itself, before you "
            "wrap it"
        )
    there = model._compiled_call_impl
    if isinstance(model, private.OptimizedModule) or (there is not None and not hasattr(there, _MARK)):
        raise PlannerError(
            "the model is already compiled: leave out model.compile() and torch.compile, or use torch.compile(backend='planner')"
        )


def _describe_changes(guards: Sequence[str]) -> str:
    """Return why a model was captured too often, by the guards that a call does not pass, of the last capture first."""
    others = [get_code(guard) for guard in guards if not re.search(r"^tensor .* (size|rank) mismatch", guard)]
    if not others:
        called = f"the model was called with inputs of more than {_MOST_SIZES} sizes"
        return f"{called}, and each needs its own plan: pad inputs to a few sizes"
    return (
        f"the model was captured {_MOST_SIZES} times, and each capture needs its own plan: values that its code reads differ "
        f"between calls (`{others[0]}` held when it was captured last, and does not now). Pass such a value as a tensor, or "
        "read it outside of forward()"
    )


def _build_own_call(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `model` with its hooks and has its own code object: Dynamo caches by code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    return cast(Callable[..., Any], own)


def _call(model: nn.Module, planned: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of the model's call, which calls `planned` if a backward pass may follow."""
    settings = private.dynamo_config.patch(
        recompile_limit=_MOST_SIZES,
        fail_on_recompile_limit_hit=True,  # instead of running without a plan
        optimize_ddp=False,  # it would split the graph by buckets
        ignore_logger_methods=find_logging_methods(),
    )

    @shorten_traceback
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return model._call_impl(*args, **kwargs)
        try:
            with settings, private.capture_later(), silence_fakes():
                return call_model(model, planned, args, kwargs)
        except private.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, PlannerError):
                raise error.inner_exception from None
            raise
        except private.TorchRuntimeError as error:
            raise build_failure_on_fakes(error) or error from None
        except private.FailOnRecompileLimitHit as error:
            raise PlannerError(_describe_changes(private.list_recompile_reasons(error))) from None

    setattr(call, _MARK, True)
    return call

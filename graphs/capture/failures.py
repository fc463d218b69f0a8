"""What stopped a capture, in one line."""

import copy
import re

import torch

from graphs.capture.branches import Branches
from graphs.capture.fakes import on_fakes
from graphs.capture.signature import Batch
from graphs.capture.step import TrainingStep
from graphs.errors import PlannerError, TraceError
from graphs.torch_private.capture import FOLLOWS_COPIES, TorchDynamoException


def why(error: Exception, step: TrainingStep, batch: Batch, branches: Branches | None) -> str:
    """Return what stopped the capture, in one line."""
    if known := own_message(error) or (branches and branches.refusal):
        return known
    try:
        with on_fakes(step, batch) as run:
            run()
    except TraceError as own:
        return str(own)
    except Exception:  # noqa: BLE001  # the error of the capture says more
        pass
    failed = re.search(r"with fake tensors: .*: got (\w+)\((['\"])(.*)\2\)$", str(error), re.MULTILINE)
    if failed is not None:
        return f"an op of the step fails on this batch: {failed[1]}: {failed[3]}"
    if "expected to have an entirely functional graph" in str(error):
        return (
            "the step writes in place to a tensor that is neither a parameter, a buffer nor an input, which cannot be planned: "
            "make it a buffer (register_buffer)"
        )
    if "Module-level backwards hooks" in str(error):
        return (
            "the model has hooks of modules on gradients (register_full_backward_hook), which cannot be captured: hook a tensor "
            "in the forward pass (tensor.register_hook), or remove them"
        )
    frames = [line.strip() for line in str(error).splitlines() if line.lstrip().startswith("File ")]
    where = f" ({frames[-1]})" if frames else ""
    in_deepcopy = copy.__file__ in where and where.endswith("in deepcopy)")
    if not FOLLOWS_COPIES and (in_deepcopy or first_line(error) == "copy.deepcopy()"):
        caller = next(frame for frame in reversed(frames) if copy.__file__ not in frame)
        return (
            f"the step cannot be captured as one graph: torch {torch.__version__} does not follow copy.deepcopy() ({caller}): "
            "use torch 2.13, or leave the copy out (models of Transformers copy their config where they make a cache: make it "
            "with use_cache=False)"
        )
    kind = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return f"the step cannot be captured as one graph: {kind}{first_line(error)}{where}"


def own_message(error: BaseException) -> str | None:
    """What the planner says of an error that it raised inside the capture; None of others."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PlannerError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else str(cause)


def first_line(error: BaseException) -> str:
    """What an error says first, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

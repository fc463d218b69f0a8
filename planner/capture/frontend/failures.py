"""Errors for failed captures: the user's own exception as it is, or one line with the code that stopped it and a way out."""

import re
from collections.abc import Callable
from functools import cache
from traceback import clear_frames

import torch

from planner.capture.frontend.fake_execution import run_on_fakes
from planner.capture.frontend.module_hooks import HOOK_REFUSAL
from planner.capture.frontend.preserved_state import may_advance_iterators, preserve_training_state
from planner.capture.guards.branches import DataBranches
from planner.capture.signature import Batch, call, list_leaves
from planner.capture.source_lines import (
    GRAPH_BREAK_ADVICE,
    ITERATOR_REFUSAL,
    find_raising_line,
    find_traced_line,
    format_location,
    is_our_code,
)
from planner.capture.step import TrainingStep
from planner.graphs.errors import PlannerError, TraceError, first_line, is_handled_by_a_caller, typed_line
from planner.torch_private.capture import FOLLOWS_COPIES, TorchDynamoException
from planner.torch_private.core import FakeTensor

_RAGGED_SIZE = "is not tracked with proxy"

# Patterns in the errors of Dynamo and AOTAutograd, and the messages that replace them: `{where}` is the line of the user's
# code, `{on}` the advice for steps that are not one graph, other names are groups of the pattern. The first match counts.
_ANSWERS: dict[str, str] = {
    _RAGGED_SIZE: (
        "an op on a nested tensor computes with its ragged size, and no graph of this release of PyTorch holds that "
        "(torch.compile fails too): compute with its values() and offsets(), or train in a block of "
        "planner.rematerialize(budget=...), which needs no graph"
    ),
    r"An opaque object was created in the middle": (
        "{where} makes an object in the step that no graph holds, such as a torch.Generator: make it once, before "
        "planning; or {on}"
    ),
    r"expected to have an entirely functional graph": (
        "the step writes in place to a tensor that is neither a parameter, a buffer nor an input, which cannot be planned: make "
        "it a buffer (register_buffer)"
    ),
    r"torch/utils/hooks\.py.*RemovableHandle\.next_id": HOOK_REFUSAL,
    r"(?P<name>copy\.deepcopy\(\))|copy\.py.*in deepcopy\b" if not FOLLOWS_COPIES else r"(?!)": (
        f"the step cannot be captured as one graph: torch {torch.__version__} does not follow copy.deepcopy() ({{where}}): use "
        "torch 2.13, or leave the copy out (models of Transformers copy their config where they make a cache: make it with "
        "use_cache=False)"
    ),
    r"torch\.\* op returned non-Tensor.*?example_value type: (?P<type>\w+);.*?target: (?:<[\w-]+ (?:method )?)?(?P<name>\w+)": (
        "{where} asks PyTorch for a value that is no tensor ({name}: {type}), and a plan would keep its present value: ask "
        "before the step, and pass the value with the batch; or {on}"
    ),
    r"no fake impl registered for (?:<CustomOpDef\()?(?P<name>[\w:.]+)": (
        "{where} calls the operator {name}, and there is no rule for the sizes of what it returns: register one "
        "(torch.library.register_fake)"
    ),
    r"Tensor\.retain_grad\(\)": (
        "{where} calls retain_grad(), and a planned step sets no grad of what it computes: take the gradient in a hook, as in "
        "hidden.register_hook(self.gradients.append), or {on}"
    ),
    r"torch/distributions/\w+\.py": (
        "{where} makes a distribution that checks its arguments, which a plan cannot do: leave out validate_args=True, or {on}"
    ),
    r"torch\.jit\.script/freeze modules|_CachedForward": (
        "{where} calls a module of torch.jit, which cannot be traced: use the nn.Module that it was made from, or {on}"
    ),
    r"marked as skipped.*?function `pack_padded_sequence`": (
        "{where} packs a sequence, whose size then depends on the lengths in the batch: give the padded batch to the layer, and "
        "take what it returns at lengths - 1 (of a layer in one direction), or {on}"
    ),
    r"marked as skipped.*?function `(?P<name>[\w.<>]+)`": (
        "{where} calls {name}, which cannot be traced: call it before the step and pass what it returns with the batch, "
        "make it an operator (torch.library.custom_op), or {on}"
    ),
    r"Attempted to wrap sparse Tensor|builtin operator `matmul`|UserDefinedObjectVariable\((?:Tensor|Parameter|Entries)\)|"
    r"'Entries' object|skipped.*?sparse_\w+_tensor|Sparse tensor creation": (
        "{where} uses a sparse tensor, which is supported only for a matrix that is not trained, in products with dense ones, "
        "as in torch.sparse.mm(matrix, x) or matrix @ x, and for torch.sparse_coo_tensor(indices, values, size) that is added to "
        "a dense tensor, as in weight + entries: hold it as a dense tensor (matrix.to_dense())"
    ),
    r"Missing tp_iternext.*?next\(\) on (?P<name>\w+)": ITERATOR_REFUSAL,
    r"Dynamic shape operator.*?context: (?P<name>\S+)": (
        "{where} calls {name}, whose result has a size that depends on the data, and a plan needs sizes before the step runs: "
        "{on}"
    ),
}


def build_failure(error: Exception, step: TrainingStep, batch: Batch, branches: DataBranches | None) -> Exception:
    """Return the exception to raise for the `error` that stopped a capture of `step`.

    Raise it where `error` is not being handled, so that it does not become the context of the user's own exception.
    """
    if message := get_own_message(error) or (branches and branches.refusal):
        return _build_trace_error(message, error)
    if may_advance_iterators(step, batch):
        return _build_trace_error(_answer(error), error)
    with run_on_fakes(step, batch) as run:
        found = _find_raised(run)
        _clear_locals(found)
    if isinstance(found, TraceError):
        return _build_trace_error(str(found), error)
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in (*step.parameters(), *list_leaves(batch)))
    find_raised = cache(lambda: found if is_fake else _find_raised_on_real(step, batch))
    if failed := _describe_failed_op(error, find_raised):
        return _build_trace_error(failed, error)
    observed = type(error).__name__.startswith("Observed") or "Observed exception" in str(error)
    if (found is not None or observed) and (own := _get_users_own(find_raised())) is not None:
        return own
    if isinstance(found, TypeError) and (wrong := step.describe_wrong_call(batch)):
        return _build_trace_error(wrong, error)
    failed_too = None if found is None else find_raised()
    return _build_trace_error(_answer(error) if failed_too is None else _describe_raised(failed_too), error)


def _build_trace_error(message: str, error: Exception) -> TraceError:
    answer = TraceError(message)
    answer.__cause__ = error
    return answer


def get_own_message(error: BaseException) -> str | None:
    """Return the message of an error that the planner raised inside the capture; None for other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PlannerError):
        cause = cause.__cause__ or cause.__context__
        if cause is not None and is_handled_by_a_caller(cause):
            return None
    return None if cause is None else str(cause)


def _get_users_own(raised: Exception | None) -> Exception | None:
    """Return the exception of the step itself, with its traceback, if the user's own code raises it; else None.

    A result that is no tensor is the user's too.
    """
    return raised if isinstance(raised, TraceError) or (raised is not None and _is_users(raised)) else None


def _find_raised_on_real(step: TrainingStep, batch: Batch) -> Exception | None:
    """Return what the step raises on real tensors, without its backward pass: it may depend on their values.

    Without gradients it takes less memory, but a step that computes some itself fails.
    """
    raised = None
    for records in (False, True):
        with preserve_training_state(step, batch), torch.set_grad_enabled(records):
            if (raised := _find_raised(lambda: call(step, batch))) is None:
                break
    return raised


def _find_raised(run: Callable[[], object]) -> Exception | None:
    try:
        run()
    except Exception as error:  # noqa: BLE001  # whatever it is
        return error
    return None


def _clear_locals(error: BaseException | None) -> None:
    """Clear the local variables of the frames that raised `error`.

    They hold fake tensors, as caches of functions may, for which all objects of the process would be searched.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_users(error: Exception) -> bool:
    """Return True if `error` was raised in code that is neither PyTorch's nor the planner's."""
    innermost, traceback = "", error.__traceback__
    while traceback is not None:
        innermost, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    return not is_our_code(innermost)


def build_failure_on_fakes(error: Exception) -> TraceError | None:
    """Return the error to raise where Dynamo says that an op of a model fails on fake tensors; None if it says no such thing."""
    found = re.search(r"with fake tensors: .*: got (?P<kind>\w+)\((?P<said>.*)\)$", str(error), re.MULTILINE)
    if found is None:
        return None
    said, where = found["said"].strip("'\"").rstrip("."), format_location(find_traced_line(str(error)))
    return _build_trace_error(f"an op of the model fails on this batch: {found['kind']}: {said}, at {where}", error)


def build_failure_in_backend(error: Exception) -> TraceError | None:
    """Return the error to raise where AOTAutograd cannot trace a graph of a model; None if its cause is not known."""
    return _build_trace_error(_ANSWERS[_RAGGED_SIZE], error) if _RAGGED_SIZE in str(error) else None


def _describe_failed_op(error: Exception, find_raised: Callable[[], Exception | None]) -> str | None:
    """Return the message for an op that fails on the batch, outside of the capture too; None if none does.

    Dynamo and fake tensors also fail at ops that eager PyTorch executes (they have no values, and custom operators may have no
    rule for them), so real tensors are asked where there are any: by `find_raised`.
    """
    if re.search(r"with fake tensors: .*: got (?!AttributeError)\w+\(", str(error)) is None or (raised := find_raised()) is None:
        return None
    return _describe_raised(raised)


def _describe_raised(raised: Exception) -> str:
    """Return the message for what the step raises outside of the capture too."""
    line = find_raising_line(raised)
    where = "" if line is None else f", at {format_location(line)}"
    said = typed_line(raised).rstrip(".")
    why = "loss_fn(model(*inputs), target) itself fails there too"
    if "not have been used in the graph" in said:
        why = "read tensors of the batch from the arguments of the step: those from outside are others in it"
    return f"an op of the step fails on this batch: {said}{where}; {why}"


def _answer(error: Exception) -> str:
    """Return the planner's message for an error of Dynamo or AOTAutograd."""
    said = str(error)
    where, on = format_location(find_traced_line(said)), GRAPH_BREAK_ADVICE
    for pattern, words in _ANSWERS.items():
        if (found := re.search(pattern, said, re.DOTALL | re.MULTILINE)) is not None:
            return words.format(where=where, on=on, **found.groupdict())
    explanation = re.search(r"Explanation: (.*)", said)
    why = first_line(error) if isinstance(error, TorchDynamoException) else typed_line(error)
    why += f" ({explanation[1].strip().rstrip('.')})" if explanation else ""
    return f"the step cannot be captured as one graph: {why}, at {where}; move that out of what is planned, or {on}"

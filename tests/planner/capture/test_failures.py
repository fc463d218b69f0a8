"""Errors that stop a capture: the user's own exceptions as they are, and one line with a way out for all others."""

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn
from torch.nn.modules.module import register_module_forward_hook

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.trace import capture
from planner.graphs.errors import TraceError
from tests.support.marks import slow

X, Y = torch.randn(6, 4), torch.randn(6, 4)


class LossError(Exception):
    """Of the user's own."""


def complain(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise LossError(f"no loss for {list(y.shape)}")


def chained(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    try:
        return {"loss": y.sum()}["l"]
    except KeyError as error:
        raise LossError("which loss?") from error


def of_values(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.min() < 5:
        raise LossError(f"the least target is {target.min().item():.1f}")
    return y.sum()


def no_name(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return y.sum() * undefined  # noqa: F821


def no_attribute(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return y.total()


@pytest.mark.parametrize(
    ("loss_fn", "kind", "said"),
    [
        (of_values, LossError, r"^the least target is -3.0$"),
        *slow(
            (complain, LossError, r"^no loss for \[6, 4\]$"),
            (chained, LossError, r"^which loss\?$"),
            (no_name, NameError, r"^name 'undefined' is not defined$"),
            (no_attribute, AttributeError, r"^'Tensor' object has no attribute 'total'$"),
        ),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_users_exception_is_raised_unchanged(
    loss_fn: Callable[..., Any], kind: type[Exception], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match=said) as raised:
        capture(nn.Linear(4, 4), loss_fn, (X, torch.full((6,), -3.0)))
    assert raised.traceback[-1].name == loss_fn.__name__
    assert isinstance(raised.value.__cause__, KeyError) is (loss_fn is chained)
    assert "torch._dynamo.exc" not in "".join(traceback.format_exception(raised.value))
    assert capfd.readouterr() == ("", "")


def three(y: torch.Tensor, target: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    return (weight * (y - target)).sum()


@pytest.mark.parametrize(
    ("loss_fn", "batch", "said"),
    [
        (
            three,
            (X, Y),
            r"the loss function takes \(y, target, \*, weight\), and is given the model's output and input 1 \(missing",
        ),
        (F.mse_loss, {"x": X, "target": Y}, r"the model takes \(input\), and is given x= \(missing"),
        *slow(
            (
                F.mse_loss,
                (X,),
                r"the model takes \(input\), and is given nothing, as all of the batch is the target \(missing a .*\): a batch",
            ),
            (F.mse_loss, (), r"the model takes \(input\), and is given nothing"),
            (
                F.mse_loss,
                (X, X, Y),
                r"the model takes \(input\), and is given input 0 and input 1 \(too many positional arguments\)",
            ),
            (
                None,
                (X, Y),
                r"the model takes \(input\), and is given input 0 and input 1 .*; without a loss_fn the model gets all",
            ),
            (lambda y: y.sum(), (X, Y), r"the loss function takes \(y\), and is given the model's output and input 1"),
        ),
    ],
)
def test_wrong_batch_error_names_expected_and_given_arguments(loss_fn: Any, batch: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        capture(nn.Linear(4, 4), loss_fn, batch)


def seeded(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner(x) * torch.initial_seed()


def listed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner(x) * m.inner(x).tolist()[0][0]


def checked(m: Any, x: torch.Tensor) -> torch.Tensor:
    return distributions.Normal(m.inner(x), 1.0, validate_args=True).rsample()


def solved(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ torch.linalg.lstsq(m.inner(x), x).solution


def packed(m: Any, x: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(m.inner(x).unsqueeze(0), torch.tensor([6]), batch_first=True)
    return packed.data


SCRIPTED = torch.jit.script(nn.Linear(4, 4))


def scripted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner(SCRIPTED(x))


def hooked(m: Any, x: torch.Tensor) -> torch.Tensor:
    handle = register_module_forward_hook(lambda _, __, output: output * 2)
    output = m.inner(x)
    handle.remove()
    return output


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (hooked, r"\(handle = register_module_forward_hook.* registers a hook in the step.*: register it once, before planning"),
        (packed, r"\(packed = nn.utils.rnn.pack.* packs a sequence, .*: give the padded batch to the layer, and take"),
        *slow(
            (
                seeded,
                r"\(return m.inner\(x\) \* torch.initial_seed\(\)\) asks PyTorch for a value that is no tensor \(initial_seed",
            ),
            (
                listed,
                r"cannot be captured as one graph: Tensor.tolist\(\) with .*\(return m.inner\(x\) \* m.inner\(x\).tolist\(\)",
            ),
            (checked, r"\(return distributions.Normal.* checks its arguments, .*: leave out validate_args=True"),
            (
                scripted,
                r"\(return m.inner\(SCRIPTED\(x\)\)\) calls a module of torch.jit, .*: use the nn.Module that it was made from",
            ),
            (solved, r"\(return x @ torch.linalg.lstsq.* calls aten.linalg_lstsq.default, whose result has a size"),
        ),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_unsupported_code_is_named_with_line_and_advice(forward: Callable[..., Any], said: str) -> None:
    with pytest.raises(TraceError, match=said) as refused:
        capture(FunctionModule(forward, inner=nn.Linear(4, 4)), F.mse_loss, (X, Y))
    assert f"test_failures.py:{forward.__code__.co_firstlineno + 1}" in str(refused.value)
    assert "planner.checkpoint(model, budget=...)" in str(refused.value)


@pytest.mark.parametrize("wrong", [lambda m, x: m.inner(x) @ x, lambda m, x: m.inner(x) * x.sum().item() @ x])
def test_failing_op_is_named_with_its_line_without_logging(wrong: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = FunctionModule(wrong, inner=nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r"an op of the step fails on this batch: RuntimeError: .*, at .*test_failures.py:\d+"):
        capture(model, F.mse_loss, (X, Y))
    assert capfd.readouterr() == ("", "")


def test_a_loss_function_that_gets_what_it_does_not_take_says_what_eager_pytorch_says() -> None:
    model = FunctionModule(lambda m, x: SimpleNamespace(logits=m.inner(x)), inner=nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r"fails on this batch: TypeError: .*must be Tensor, not types.SimpleNamespace"):
        capture(model, nn.CrossEntropyLoss(), (X, torch.zeros(len(X), dtype=torch.long)))


@torch.library.custom_op("failures::unregistered", mutates_args=())
def unregistered(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_a_gradient_by_a_tensor_of_the_batch_that_is_read_from_outside_is_not_said_to_fail_in_eager_pytorch() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(TraceError, match=r"used in the graph.*; read tensors of the batch from the arguments of the step"):
        planner.compile(nn.Linear(4, 1), lambda u, _: torch.autograd.grad(u.sum(), x)[0].norm() + u.sum(), (x, x), budget="100%")


def test_operator_without_a_rule_for_sizes_is_not_said_to_fail() -> None:
    with pytest.raises(TraceError, match=r"calls the operator failures::unregistered, and there is no rule .*register_fake"):
        capture(FunctionModule(lambda m, x: unregistered(m.inner(x)), inner=nn.Linear(4, 4)), F.mse_loss, (X, Y))


def test_planning_in_an_except_block_ignores_the_handled_error() -> None:
    """As where a loop has run out of memory: the error is the context of whatever is raised in the capture."""

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x if x.sum() > 0 else -x

    model, batch = nn.Sequential(nn.Linear(4, 4), Branching()), (torch.ones(3, 4), torch.ones(3, 4))
    try:
        raise TraceError("an earlier error")
    except TraceError:
        with pytest.raises(TraceError, match=r"\(return 2 \* x if x.sum\(\) > 0 else -x\) does depends on the data"):
            capture(model, F.mse_loss, batch)
        first = nn.Sequential(Branching(), nn.Linear(4, 4))
        assert len(capture(first, F.mse_loss, batch).graph.ops) > 3

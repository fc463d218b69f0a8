"""How a step is called and what it returns: batches by name, losses in tuples, dicts and objects, and what is refused."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.signature import Batch, call
from planner.capture.trace import capture
from planner.graphs.errors import MismatchError, TraceError
from planner.measure.steps import get_loss
from planner.runtime.executor import Executor
from tests.support.marks import slow
from tests.support.models.outcomes import assert_exact
from tests.support.models.steps import random_schedule


class Masked(nn.Module):
    """Takes inputs by name, one of them optional, one a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        hidden = F.gelu(self.first(x)) * scale
        return self.second(hidden if mask is None else hidden * mask)


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Returns(nn.Module):
    """A model that makes its own loss and returns it by `kind`."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = Masked()
        self.kind = kind

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.inner(x)
        return self.kind(F.cross_entropy(logits, labels) if labels is not None else None, logits)


def named(**more: object) -> dict[str, object]:
    return {"x": torch.randn(5, 16), "target": torch.randint(3, (5,)), **more}


def executor(model: nn.Module, loss_fn: Any, batch: Batch, seed: int = 1) -> Executor:
    captured = capture(model, loss_fn, batch)
    return Executor(captured, random_schedule(captured.graph, seed), model, loss_fn)


def two_losses(logits: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    parts = F.cross_entropy(logits, target), 1e-2 * logits.square().mean()
    return {"accuracy": (logits.argmax(1) == target).float().mean(), "loss": sum(parts), "parts": parts}


@pytest.mark.parametrize(
    ("loss_fn", "more"),
    [
        (F.cross_entropy, {"mask": torch.ones(5, 16).tril(), "scale": 0.5}),
        (F.cross_entropy, {"weight": torch.tensor([1.0, 2.0, 0.5])}),
        (two_losses, {"mask": torch.ones(5, 1)}),
        *slow((F.cross_entropy, {}), (nn.CrossEntropyLoss(label_smoothing=0.1), {})),
    ],
    ids=["mask and number", "weighted", "two losses", "function", "module"],
)
def test_a_batch_by_name_trains_as_eager_does(loss_fn: Any, more: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, batch = Masked(), named(**more)
    step = executor(model, loss_fn, batch)
    targets = {name: batch[name] for name in ("target", "weight") if name in batch}
    inputs = {name: value for name, value in batch.items() if name not in targets}
    get_loss(call(step, batch)).backward()
    planned = [p.grad for p in model.parameters()]
    model.zero_grad()
    get_loss(loss_fn(model(**inputs), **targets)).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(planned, model.parameters(), strict=True))


def test_step_returns_all_values_of_the_loss_function() -> None:
    torch.manual_seed(0)
    model, batch = Masked(), named()
    returned = call(executor(model, two_losses, batch), batch)
    eager = two_losses(model(batch["x"]), batch["target"])
    assert list(returned) == ["loss", "accuracy", "parts"]
    assert torch.equal(returned["loss"], eager["loss"])
    assert torch.equal(returned["accuracy"], eager["accuracy"])
    assert isinstance(returned["parts"], tuple)
    assert all(torch.equal(a, b) for a, b in zip(returned["parts"], eager["parts"], strict=True))
    assert returned["loss"].requires_grad
    assert not any(part.requires_grad for part in returned["parts"])


@pytest.mark.filterwarnings("ignore:captured again")
def test_a_step_returns_constants_beside_tensors() -> None:
    torch.manual_seed(0)
    model = Returns(
        lambda loss, y: {"loss": loss, "rows": len(y), "shape": y.shape, "tag": None, "more": (y, model.name, y.dtype)}
    )
    model.name = "a"
    batch = {"x": torch.randn(5, 16), "labels": torch.randint(3, (5,))}
    step = planner.compile(model, None, batch, budget="100%")
    for rows, name in ((5, "a"), (5, "b"), (4, "b")):
        model.name = name
        returned = step(**{key: value[:rows] for key, value in batch.items()})
        shape, (_, *more) = returned["shape"], returned["more"]
        assert (returned["rows"], shape, returned["tag"], more) == (rows, (rows, 3), None, [name, torch.float32])
        assert type(shape) is torch.Size


@pytest.mark.parametrize(
    "value", [float("nan"), 1 + 2j, b"a", slice(0, 3), range(3), torch.strided, torch.channels_last], ids=str
)
def test_a_step_returns_constants_of_many_types(value: object) -> None:
    batch = torch.randn(5, 16), torch.randint(3, (5,))
    step = planner.compile(Returns(lambda loss, _: (loss, value)), None, batch, budget="100%")
    assert str(step(*batch)[1]) == str(value)


@pytest.mark.filterwarnings("ignore:captured again")
def test_a_number_that_is_returned_is_no_input_of_the_step() -> None:
    model = Returns(lambda loss, y: (loss, model.number))
    batch = {"x": torch.randn(5, 16), "labels": torch.randint(3, (5,))}
    model.number = 0
    step = planner.compile(model, None, batch, budget="100%")
    for number in range(4):
        model.number = number
        assert step(**batch)[1] == number


@pytest.mark.parametrize(
    "kind", [Pair, Output, lambda loss, y: {"y": y, "loss": loss}, *slow(lambda loss, _: loss, lambda *pair: list(pair))]
)
def test_a_model_may_make_its_own_loss(kind: Any) -> None:
    torch.manual_seed(0)
    model, batch = Returns(kind), {"x": torch.randn(5, 16), "labels": torch.randint(3, (5,))}
    step = executor(model, None, batch)
    assert_exact(step, model, batch)


def test_of_an_object_only_the_loss_is_kept() -> None:
    model, batch = Returns(Output), {"x": torch.randn(5, 16), "labels": torch.randint(3, (5,))}
    assert isinstance(call(executor(model, None, batch), batch), torch.Tensor)


def test_the_loss_may_be_picked_from_a_models_outputs() -> None:
    torch.manual_seed(0)
    model, batch = Returns(lambda loss, logits: (logits, loss)), {"x": torch.randn(5, 16), "labels": torch.randint(3, (5,))}
    loss = call(executor(model, lambda out: out[1], batch), batch)
    assert torch.equal(loss, model(**batch)[1])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (lambda _, y: {"loss": y.sum(), "count": y.argmax().item()}, "a dict of tensors with a 'loss'"),
        *slow(
            (Output, "the step returns a NoneType where the loss"),
            (lambda _, y: {"logits": y}, "the step returns a NoneType where the loss"),
            (lambda _, y: (y.sum(), {"text"}), "the step returns a set where the loss or another tensor"),
            (lambda _, y: (), "the step returns a tuple where the loss"),
        ),
    ],
    ids=["number", "object", "dict", "set", "empty"],
)
def test_model_without_a_loss_raises(kind: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        capture(Returns(kind), None, {"x": torch.randn(5, 16)})


def test_the_order_of_names_does_not_matter() -> None:
    torch.manual_seed(0)
    model, batch = Masked(), {"x": torch.randn(5, 16), "mask": torch.randn(5, 16), "target": torch.randint(3, (5,))}
    step = executor(model, F.cross_entropy, batch)
    nested = executor(
        FunctionModule(lambda m, d: m.inner(**d), inner=model),
        F.cross_entropy,
        ({"x": batch["x"], "mask": batch["mask"]}, batch["target"]),
    )
    expected = F.cross_entropy(model(batch["x"], mask=batch["mask"]), batch["target"])
    assert torch.equal(step(**dict(reversed(batch.items()))), expected)
    assert torch.equal(nested({"mask": batch["mask"], "x": batch["x"]}, batch["target"]), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 2.0}, r"input 'scale' is 2.0, but the step was planned for 0.5, which is part of its graph"),
        ({"scale": torch.tensor(0.5)}, r"input 'scale' is tensor\(0.5000\), but the step was planned for 0.5"),
        ({"mask": None}, r"input 'mask' of the batch is NoneType, but the step was planned for a tensor float32\[5, 16\]"),
        ({"mask": torch.ones(5, 1)}, r"input 'mask' of the batch is float32\[5, 1\], but .*dynamic=True"),
        ({"x": torch.randn(5, 16).double()}, r"float64\[5, 16\], but the step was planned for float32"),
        (
            {"more": 1},
            r"the batch has .*input 'more', but the step was planned for input 'x', input 'target', input 'mask', input",
        ),
    ],
    ids=["number", "tensor", "none", "shape", "dtype", "more"],
)
def test_another_batch_is_refused(change: dict[str, object], message: str) -> None:
    batch = named(mask=torch.ones(5, 16), scale=0.5)
    step = executor(Masked(), F.cross_entropy, batch)
    with pytest.raises(MismatchError, match=message):
        call(step, batch | change)


def test_compile_takes_a_batch_by_name() -> None:
    torch.manual_seed(0)
    model, batch = Masked(), named()
    step = planner.compile(model, F.cross_entropy, batch, budget="100%", passes=1)
    assert torch.equal(step(**batch), F.cross_entropy(model(batch["x"]), batch["target"]))
    assert planner.run(step.plan, model, F.cross_entropy, batch, repeats=1).eager_differences == ()

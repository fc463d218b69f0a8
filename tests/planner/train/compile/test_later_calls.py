"""Lists and metrics that a step fills and does not read: they are filled after its forward pass, as in eager PyTorch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from graphs.errors import TraceError

torchmetrics = pytest.importorskip("torchmetrics")
SEEN: list[torch.Tensor] = []
Forward = Callable[["Noting", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Noting(nn.Module):
    """A model with lists and metrics."""

    def __init__(self, note: Forward) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.note = note
        self.losses: list[Any] = []
        self.tables: dict[str, list[Any]] = {"rows": []}
        self.mean, self.error = torchmetrics.MeanMetric(), torchmetrics.MeanSquaredError()
        self.several = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return self.note(self, hidden, y, F.mse_loss(hidden, y))


def append(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.losses.append(loss.detach())
    return loss


def append_to_global(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    SEEN.append(2 * loss.detach())
    return loss


def append_nested(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.tables["rows"].append({"loss": loss.detach(), "rows": len(y), "pair": (hidden.detach(), y)})
    model.losses.extend([hidden.detach().mean(), "end"])
    return loss


def append_number(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.losses.append((loss.item(), float(hidden.detach().abs().max()), round(100 * loss.item(), 2), math.sqrt(loss.item())))
    return loss


def update_metrics(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.mean.update(loss)
    model.losses.append(model.error(hidden, y))
    model.several(hidden, target=y)
    return loss


def state(model: Noting) -> list[Any]:
    metrics = [model.mean, model.error, *model.several.values()]
    values = [metric.compute() for metric in metrics] if model.note is update_metrics else []
    return [*model.losses, *model.tables["rows"], *SEEN, *values]


def leaves(values: list[Any]) -> list[Any]:
    return torch.utils._pytree.tree_leaves(values)


@pytest.mark.parametrize(
    "note", [pytest.param(append, marks=pytest.mark.slow), append_to_global, append_nested, append_number, update_metrics]
)
def test_lists_and_metrics_are_filled_as_in_eager_mode(note: Forward) -> None:
    torch.manual_seed(0)
    model, x, y = Noting(note), torch.randn(8, 16), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    step = planner.compile(model, None, (x, y), budget="100%", wait=0.1)
    assert leaves([*model.losses, *model.tables["rows"], *SEEN]) == []
    found = []
    for one, run in ((plain, plain), (model, step)):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for rows in (8, 8, 8, 5):
            run(x[:rows], y[:rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rows == 8 and len(one.losses) == 2:
                one.losses = []  # another list, as at the end of an epoch
        found.append(leaves([*state(one), *one.parameters()]))
        SEEN.clear()
    assert len(found[0]) == len(found[1]) > len([*model.parameters()])
    for wanted, value in zip(*found, strict=True):
        assert torch.equal(wanted, value) if isinstance(wanted, torch.Tensor) else wanted == value
        assert isinstance(value, nn.Parameter) or not getattr(value, "requires_grad", False)


def test_an_evaluation_fills_them_too() -> None:
    model, batch = Noting(append), (torch.randn(8, 16), torch.randn(8, 16))
    step = planner.compile(model, None, batch, budget="100%", wait=0.1)
    with torch.no_grad():
        step(*batch)
    assert len(model.losses) == 1


def read_length(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.losses.append(loss.detach())
    return loss / len(model.losses)


def read_last(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.losses.append(loss.detach())
    return loss / model.losses[-1]


def read_number(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    number = loss.item()
    model.losses.append(number)
    return loss * number


def compute(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.mean.update(loss)
    return loss * model.mean.compute()


def use(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return loss + model.error(hidden, y)


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (read_length, r"model.losses changes at every step .*, and the step reads it"),
        (read_last, r"model.losses changes at every step .*, and the step reads it"),
        (read_number, r"\(return loss \* number\) does depends on the data"),
        (compute, r"\(return loss \* model.mean.compute\(\)\) calls compute of a metric, which is updated after a planned step"),
        (use, r"\(return loss \+ model.error\(hidden, y\)\) computes with what a metric returns"),
    ],
)
def test_a_step_that_reads_them_raises(note: Forward, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        planner.compile(Noting(note), None, (torch.randn(8, 16), torch.randn(8, 16)), budget="1MB")

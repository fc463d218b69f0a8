"""Models that check their activations in Python. Asserts in modules of tests would be rewritten by pytest."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

SIZE = 6
Forward = Callable[["Checked", Tensor], Tensor]


class Checked(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("codes", torch.linspace(-1.0, 1.0, SIZE))
        self.register_buffer("usage", torch.zeros(SIZE))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()


def assertion(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    assert torch.isfinite(hidden).all(), "not finite"
    return model.outer(hidden)


def assertion_of_two(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    with torch.no_grad():
        assert hidden.min() > -1e3 and not hidden.isnan().any()
    return model.outer(hidden)


def assertion_of_either(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    assert (hidden.max() < 1e3) | (hidden.min() > 0), f"{hidden.shape} is too large"
    return model.outer(hidden)


def raised(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    if hidden.isnan().any():
        where = f"in {SIZE} columns"
        raise ValueError(where)
    return model.outer(hidden)


def raised_otherwise(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    if hidden.isfinite().all():
        hidden = hidden.tanh()
    else:
        raise FloatingPointError
    return model.outer(hidden)


def counted(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    classes = (hidden[:, 0].detach().nan_to_num(nan=100.0)).round().long().clamp_min(0)
    with torch.no_grad():
        model.usage.lerp_(torch.bincount(classes, minlength=SIZE).float(), 0.1)
    return model.outer(hidden * torch.bincount(classes, hidden.detach()[:, 1], SIZE).float())


def caught(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    try:
        if hidden.min() < -1e3:
            raise ValueError
    except ValueError:
        hidden = x
    return model.outer(hidden)


def checked(model: Checked, hidden: Tensor) -> Tensor:
    if hidden.min() < -1e3:
        raise ValueError
    return model.outer(hidden)


def caught_by_a_caller(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    try:
        return checked(model, hidden)
    except ValueError:
        return model.outer(x)


def either_way(model: Checked, x: Tensor) -> Tensor:
    hidden = model.inner(x)
    if hidden.min() < -1e3:
        hidden = x
    return model.outer(hidden)


def counted_without_a_length(model: Checked, x: Tensor) -> Tensor:
    classes = model.inner(x)[:, 0].long().clamp_min(0)
    return model.outer(x) * torch.bincount(classes).sum()

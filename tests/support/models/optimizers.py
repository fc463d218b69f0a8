"""Optimizers of users."""

from collections.abc import Callable

from torch.optim import Optimizer


class Wrapping(Optimizer):
    """Has another optimizer step."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.step()

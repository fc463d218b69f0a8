"""Chains of layers that are trained in ways of many kinds, and allocators that fail meanwhile."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.train.eager.session import Rematerialization


def chain(layers: int = 10, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    half = len(model) // 2
    return checkpoint(model[half:], model[:half](x), use_reentrant=False).square().mean()


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.square = x * x
        return x * ctx.square

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (2 * x * x + ctx.square)


def custom_functions(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model:
        x = x + Cube.apply(layer(x)) * 0.5
    return x.mean()


def in_slices(model: nn.Module, x: Tensor) -> Tensor:
    """Writes to views, reads what was there before, and writes again."""
    out = torch.zeros_like(x)
    for layer in model:
        x = layer(x + out)
        out = out.clone()
        out[:, :32] = x[:, 32:]
        out[:, 32:].mul_(0.5).add_(x[:, :32].sin())
    return (out * x).square().mean()


def of_complex_numbers(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model:
        spectrum = torch.fft.fft(layer(x))
        x = (spectrum * spectrum.conj()).real.sqrt() + torch.view_as_real(spectrum).sum(-1)
    return x.square().mean()


def with_buffers_that_change(model: nn.Module, x: Tensor) -> Tensor:
    """What is computed from a constant must not be recomputed from what is written to it later."""
    scale = torch.linspace(1, 2, 64)
    for layer in model:
        x = layer(x) * (scale * 1.0)
        scale.mul_(0.9)
    return x.square().mean()


class Failing:
    """While entered, an allocator that fails at one call of a kernel, or several from it on."""

    def __init__(self, operator: torch._ops.OpOverload, call: int, times: int = 1) -> None:
        self.operator, self.call, self.times = operator, call, times
        self.calls = 0
        self._library = torch.library.Library("aten", "IMPL")

    def __enter__(self) -> Self:
        kernel = torch.library.get_kernel(self.operator, "CPU")

        def execute(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if 0 <= self.calls - self.call < self.times:
                self.fail(args)
            return kernel.call_boxed(keys, *args, **kwargs)

        self._library.impl(self.operator, execute, "CPU", with_keyset=True, allow_override=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def fail(self, args: tuple[Any, ...]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB")


class FailingWrites(Failing):
    """An allocator that fails at one call of a kernel, when it has changed a part of what it writes."""

    def fail(self, args: tuple[Any, ...]) -> None:
        args[0].flatten()[::2].mul_(7.0)
        super().fail(args)


def written_in_steps(model: nn.Module, x: Tensor) -> Tensor:
    """Writes to activations by an operator that may have begun to write when the allocator fails."""
    zeros = torch.zeros(len(x) + 64, 64)
    for layer in model:
        x = layer(x).contiguous()
        y = x * 2.0
        y.addmm_(zeros[64:], zeros[:64], beta=0.5)
        y.mul_(3.0)
        x = y.sin() + x
    return x.square().mean()


Run = Callable[[nn.Module, Tensor], Tensor]


def with_dropout(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model:
        x = nn.functional.dropout(layer(x), 0.3) + torch.rand(64)
    return x.square().mean()


def with_statistics(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model:
        layer.counts = getattr(layer, "counts", None) or nn.BatchNorm1d(64)
        x = layer.counts(layer(x)).relu_()
        x = torch.cat([x[:, :32].cos().add_(1.0), x[:, 32:]], 1)
    return x.square().mean()


def with_choices(model: nn.Module, x: Tensor) -> Tensor:
    """Sizes that depend on data, and numbers that Python reads."""
    for i, layer in enumerate(model):
        chosen = (x.mean(1) > 0.1 * x.detach().mean().item()).nonzero().flatten()
        x = x.index_put((chosen,), layer(x[chosen]))
        x = x[x.abs().sum(1) >= 0].roll(i, 0)
    return x.square().mean()


RUNS = (
    checkpointed,
    custom_functions,
    in_slices,
    of_complex_numbers,
    penalized,
    with_buffers_that_change,
    with_choices,
    with_dropout,
    with_statistics,
    written_in_steps,
)


def train_on(run: Run, batches: Sequence[int], session: Rematerialization | None = None) -> list[np.ndarray]:
    """Train with some numbers of rows, and return all results; the library must record in `session`, which evicts last."""
    model, results = chain(), []
    torch.manual_seed(1)
    for i, rows in enumerate(batches):
        x = torch.randn(rows, 64)
        if i == len(batches) - 1 and session is not None:
            assert session.evictions == 0
        loss = run(model, x)
        loss.backward()
        results += [t.detach().numpy().copy() for t in (loss, *(p.grad for p in model.parameters()), torch.get_rng_state())]
        model.zero_grad()
    return results

"""The ops that eager PyTorch runs, beside those of what is captured."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models.parts import FunctionModule
from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.graphs.schedule import keep_everything
from planner.measure.steps import measure_outcome
from planner.runtime.executor import Executor
from tests.support.models.steps import random_schedule

# Views, and moves that functional graphs have or have not: neither says how something is computed.
NEITHER = {
    *(
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "expand",
        "permute",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
    ),
    *("unbind", "split", "unsafe_split", "split_with_sizes", "clone", "copy", "_to_copy", "empty", "empty_like", "empty_strided"),
    *("new_empty_strided", "zeros", "zeros_like", "fill", "full", "stack"),
}


class Run(TorchDispatchMode):
    """Counts the ops that run inside; one in place counts as the one that returns its result."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].removesuffix("_")
        if name not in NEITHER:
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))


def on_parameter(function: Callable[..., Tensor], *shape: int) -> nn.Module:
    """A function of one parameter."""
    return FunctionModule(lambda m, *inputs: function(m.value, *inputs), value=nn.Parameter(torch.randn(shape)))


class Last(nn.Module):
    """The outputs of a recurrent network, or of one that is given its first hidden state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        out, hidden = self.inner(*inputs)
        return out.square().mean() + sum(h.sin().sum() for h in (hidden if isinstance(hidden, tuple) else (hidden,)))


def weighted(out: Tensor) -> Tensor:
    """A loss whose gradient is another for each element."""
    return (out.float() * torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)).sum()


def captured_as_eager(model: nn.Module, loss_fn: Any, batch: Batch) -> tuple[Capture, Counter[str], Counter[str]]:
    """What is captured, and the ops of eager PyTorch and of the capture; loss and gradients are compared."""
    captured = capture(model, loss_fn, batch)
    eager, step = TrainingStep(model, loss_fn), Executor(captured, keep_everything(captured.graph), model, loss_fn)
    wanted = measure_outcome(eager, model, batch, seed=3)
    assert wanted.list_differences(measure_outcome(step, model, batch, seed=3)) == ()
    recomputing = Executor(captured, random_schedule(captured.graph, 1), model, loss_fn)
    assert wanted.list_differences(measure_outcome(recomputing, model, batch, seed=3)) == ()
    with Run() as first:
        measure_outcome(eager, model, batch, seed=3)
    with Run() as second:
        measure_outcome(step, model, batch, seed=3)
    return captured, first.ops, second.ops

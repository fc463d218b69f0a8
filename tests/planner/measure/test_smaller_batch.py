"""Sizes of a step on a smaller batch are found without capturing it, and are never too small."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.schedule import keep_everything
from graphs.simulate import simulate
from planner.capture.signature import list_leaves
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.capture.workload.models.gpt2 import GPT2
from planner.measure.smaller_batch import bound_graph
from planner.measure.tracing import capture_step
from planner.settings.plan import PlanSettings
from tests.support.marks import slow


class Correlation(nn.Module):
    """A matrix whose size is a multiple of the rows, but has nothing to do with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        return (z.T @ z / len(x) - torch.eye(32)).pow(2).mean() + (z @ z.T).softmax(-1).pow(2).mean()


class Turned(nn.Module):
    """Rows are the second dimension of a recurrent net, and part of a product of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.inner(x.transpose(0, 1))
        flat = self.head(out.reshape(-1, 16))
        mask = torch.ones(len(x), 16, dtype=torch.bool).tril()
        return (flat.view(16, len(x), 16).transpose(0, 1) * mask[:, None]).square().mean()


class Indexed(nn.Module):
    """A mask is read by indices of rows, as Transformers reads those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        seen = mask[torch.arange(len(x))[:, None], torch.arange(11)]
        scores = self.head(torch.tanh(self.inner(x))).squeeze(-1)
        return scores.masked_fill(~seen, -1e9).softmax(-1).square().mean()


def gpt() -> tuple[nn.Module, Any, Any]:
    options: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "vocab": 48, "seq": 16, "dropout": 0.1, "tie": True}
    tokens = lambda n: (torch.randint(48, (n, 16)), torch.randint(48, (n, 16)))  # noqa: E731
    return GPT2(attention="sdpa", **options), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), tokens


def convolution() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4))
    return model, F.cross_entropy, lambda n: (torch.randn(n, 3, 8, 8), torch.randint(4, (n,)))


class Pairs(nn.Module):
    """Two views of each image go through one encoder, with groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Upsample(scale_factor=2), nn.AvgPool2d(12))
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.attention(self.encoder(torch.cat([x, -x])).flatten(2).permute(2, 0, 1)).chunk(2, dim=1)
        return (one - other.detach()).square().mean()


STEPS = {
    "pairs": (lambda: (Pairs(), None, lambda n: (torch.randn(n, 3, 14, 14),)), 0.0),
    "gpt": (gpt, 0.0),
    "convolution": (convolution, 0.0),
    "indexed": (lambda: (Indexed(), None, lambda n: (torch.randn(n, 11, 8), torch.rand(n, 11) > 0.5)), 0.0),
    "correlation": (lambda: (Correlation(), None, lambda n: (torch.randn(n, 8),)), None),
    "turned": (lambda: (Turned(), None, lambda n: (torch.randn(n, 16, 8),)), None),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("rows", "fewer"), [(16, 5), *slow((8, 6))])
def test_sizes_suffice_for_a_smaller_batch(name: str, rows: int, fewer: int) -> None:
    build, excess = STEPS[name]
    model, loss_fn, batch = build()
    captured, wanted = (capture_step(Workload(model, loss_fn, batch(n)), PlanSettings()) for n in (rows, fewer))
    static = captured.program.gather(TrainingStep(model, loss_fn), list_leaves(batch(fewer)))
    bound = bound_graph(captured.graph, captured.program, static)
    assert [op.target for op in bound.ops] == [op.target for op in wanted.graph.program]
    assert all(known.size_bytes >= real.size_bytes for known, real in zip(bound.tensors, wanted.graph.tensors, strict=False))
    peaks = [
        simulate(g, keep_everything(g)).peak_bytes for g in (bound, wanted.graph.out_of_place(), captured.graph.out_of_place())
    ]
    assert peaks[1] <= peaks[0] < peaks[2]
    if excess is not None:
        assert peaks[0] <= (1 + excess) * peaks[1]

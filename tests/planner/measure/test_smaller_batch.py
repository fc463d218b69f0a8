"""Sizes of a step that was not captured at them: found on a smaller batch, never too small, and predicted at others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.capture.signature import list_leaves
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.capture.workload.models.gpt2 import GPT2
from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.small import make_training_chain
from planner.measure.scaling import GraphFit, list_sample_sizes
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


def test_fit_reproduces_polynomials() -> None:
    graph = make_training_chain(4)

    def at(batch: int, length: int) -> object:
        size = 7 * batch * length**2 + 10**9 * batch + 5
        ops = tuple(replace(op, time_s=1e-6 * size, workspace_bytes=size) for op in graph.ops)
        return replace(graph, ops=ops, tensors=tuple(replace(t, size_bytes=size * (t.id + 1)) for t in graph.tensors))

    fit = GraphFit({(b, n): at(b, n) for b in list_sample_sizes(16) for n in list_sample_sizes(100)})
    for sizes in ((16, 100), (3, 7), (40, 333)):
        found, wanted = fit.build_graph(sizes), at(*sizes)
        assert [t.size_bytes for t in found.tensors] == [t.size_bytes for t in wanted.tensors]
        assert found.time_s == pytest.approx(wanted.time_s, rel=1e-6)
        assert [op.workspace_bytes for op in found.ops] == pytest.approx([op.workspace_bytes for op in wanted.ops], rel=1e-6)


def test_graphs_without_a_fit_raise() -> None:
    with pytest.raises(GraphError, match="a size that varies is 3"):
        list_sample_sizes(3)
    with pytest.raises(GraphError, match="make no grid"):
        GraphFit({(4,): make_training_chain(4)})
    with pytest.raises(GraphError, match=r"different ops at sizes \(2,\)"):
        GraphFit({(4,): make_training_chain(4), (3,): make_training_chain(4), (2,): make_training_chain(5)})


def test_op_overwrites_an_input_only_if_allowed_at_all_sizes() -> None:
    def at(*pairs: tuple[int, int]) -> Graph:
        draft = Draft()
        (x,) = draft.add_op("a", [], [10])
        (y,) = draft.add_op("b", [x], [10], overwrites=pairs)
        return draft.build_graph([y])

    pair = (1, 0)
    for graphs, wanted in (({(2,): at(pair), (4,): at(pair)}, (pair,)), ({(2,): at(pair), (4,): at()}, ())):
        assert [op.overwrites for op in GraphFit(graphs).build_graph((3,)).ops] == [(), wanted]

"""Models for the backend of torch.compile, with and without offload, and what their steps take."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.graphs.errors import InfeasibleError
from planner.train.backend import backend
from planner.train.backend.shared_budget import SharedBudget
from tests.support.models.outcomes import assert_same, peak_bytes


class Masked(nn.Module):
    """A decoder that says nothing about its mask being causal, with a layer that its code does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(300, 300)
        self.inner = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(target, source, tgt_mask=self.mask)


def stack(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(layers)))


class Queued(nn.Module):
    """Compares its results with earlier ones, over which it writes them behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        hidden = (layer for _ in range(4) for layer in (nn.LazyLinear(64), nn.GELU()))
        self.layers = nn.Sequential(*hidden, nn.Linear(64, 16))
        self.layers(torch.zeros(1, 32))
        self.register_buffer("queue", torch.randn(16, 256))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layers(x)
        near = found @ self.queue.clone()
        with torch.no_grad():
            place = int(self.place)
            self.queue[:, place : place + len(x)] = found.T
            self.place.copy_((place + len(x)) % 256)
        return near.log_softmax(1)


class Broken(nn.Module):
    """Two parts, with something between them that Dynamo cannot capture."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden)


class BrokenTwice(Broken):
    """Three parts likewise."""

    def __init__(self, first: nn.Module, second: nn.Module, third: nn.Module) -> None:
        super().__init__(first, second)
        self.third = third

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        torch._dynamo.graph_break()
        late = self.second(early)
        torch._dynamo.graph_break()
        return self.third(late)


class Thirds(nn.Module):
    """Three stacks with a graph break between each, the first of which is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = stack(3), stack(2), stack(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        torch._dynamo.graph_break()
        late = self.second(early)
        torch._dynamo.graph_break()
        return self.third(late) + early


def through(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layers(x)


class Apart(Thirds):
    """The same stacks, called where nothing is captured: nothing says of one that others follow, even itself."""

    @torch.compiler.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = through(self.first, x)
        return through(self.third, through(self.second, through(self.second, early))) + early


def wav2vec2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    return transformers.Wav2Vec2Model(config).train()


def batch_of(model: nn.Module) -> tuple[torch.Tensor, ...]:
    if isinstance(model, Thirds | Queued):
        return (torch.randn(128, 32),)
    return (torch.randn(4, 24, 32), torch.randn(4, 24, 32)) if isinstance(model, Masked) else (torch.randn(2, 800),)


def step_of(run: Callable[..., Any], batch: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    def step() -> None:
        output = run(*batch)
        (output if isinstance(output, torch.Tensor) else output.last_hidden_state).sum().backward()

    return step


def measured_bytes(model: nn.Module, batch: tuple[torch.Tensor, ...], step: Callable[[], None]) -> int:
    """Parameters, buffers and batch, each storage once, and the most that the allocator hands out on top during a step."""
    model.zero_grad()
    torch.manual_seed(1)
    peak = peak_bytes(step)
    static = {t.untyped_storage()._cdata: t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *batch)}
    return peak + sum(storage.nbytes() for storage in static.values())


def compiled(model: nn.Module, budget: int | str, **options: object) -> Any:
    given = {"budget": budget, "time_limit_s": 10, "tolerance": 0.1, **options}
    return torch.compile(model, backend="planner", dynamic=False, options=given)


def only_budget() -> SharedBudget:
    (budget,) = backend.BUDGETS.values()
    return budget


def in_steps(model: nn.Module, batch: tuple[torch.Tensor, ...], budget: int | str) -> list[int]:
    """What each of some steps takes; the first one compiles and is not measured."""
    step = step_of(compiled(model, budget), batch)
    step()
    return [measured_bytes(model, batch, step) for _ in range(2)]


def tight(model: nn.Module, batch: tuple[torch.Tensor, ...], whole: int = 0) -> tuple[nn.Module, int, list[int]]:
    """A copy trained within the least of some budgets that does, that budget, and what its steps took.

    The budgets halve the way from the peak, `whole` where it is known, to nothing and back to the peak: the kernels of this
    machine may need much of it.
    """
    whole = whole or max(in_steps(copy.deepcopy(model), batch, "100%"))
    for halvings in range(1, 8):
        torch._dynamo.reset()
        twin, budget = copy.deepcopy(model), whole - whole // 2**halvings
        try:
            return twin, budget, in_steps(twin, batch, budget)
        except (InfeasibleError, torch._dynamo.exc.BackendCompilerFailed):
            continue
    pytest.fail("nothing fits but keeping everything")


def layers(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """Layers with dropout."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), norm(64), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))


def compiled_with_offload(model: nn.Module, budget: str | int, **options: object) -> Callable[..., Any]:
    given = {"budget": budget, "time_limit_s": 2, "tolerance": 0.05, "options": ["offload"], "link": 1e12, **options}
    # Not by name: the backends of packages that are not installed have none.
    return torch.compile(model, backend=backend.planner, dynamic=False, options=given)


def trained_once(step: Callable[..., Any], x: torch.Tensor) -> None:
    step(x).sum().backward()


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    """Check gradients, or that there are none, and buffers."""
    states = ({name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (model, twin))
    assert_same(*({**state, **dict(each.named_buffers())} for state, each in zip(states, (model, twin), strict=True)))

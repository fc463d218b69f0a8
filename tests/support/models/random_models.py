"""Random models: recipes that hypothesis draws and shrinks, and the modules that they stand for.

A recipe is nested tuples of names, so that a failing one can be pasted: ``build(Recipe("image", (("conv",), ("relu_",))))``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.dense import Squash
from benchmarks.models.parts import FunctionModule
from planner.capture.workload.models import Workload

WIDTH = 8

# What is done to a tensor, of whatever shape; each keeps it.
Change = Callable[[torch.Tensor], torch.Tensor]


def overwritten_slice(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 0] = 0
    x[:, 1:3] *= 2
    return x


def gated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * torch.sigmoid(second), second), dim=-1)


def scaled_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    y += x.mean()
    return y.mul_(1.5)


def transposed_back(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.transpose(0, 1)).transpose(0, 1).contiguous()


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.detach() > 1, 0.5)


class RunningMean(nn.Module):
    """Divides by a mean in a buffer that it updates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x / (self.mean + 0.1)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.abs().mean() + 0.1)
        return y


class Cells(nn.Module):
    """A cell that is called several times."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = (x, torch.zeros_like(x)) if isinstance(self.cell, nn.LSTMCell) else x
        for i in range(3):
            state = self.cell(x * i, state)
        return state[0] if isinstance(state, tuple) else state


class Attention(nn.Module):
    """Two heads; with a causal mask, or by PyTorch's module with dropout."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.module = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.causal:
            return self.module(x, x, x, need_weights=False)[0]
        q, k, v = (t.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def recurrent(kind: type[nn.RNNBase], directions: int = 1) -> nn.Module:
    """A layer over time, both ways if `directions` is 2."""
    layer = kind(WIDTH, WIDTH // directions, batch_first=True, bidirectional=directions == 2)
    return FunctionModule(lambda m, x: m.layer(x)[0], layer=layer)


def causal_convolution() -> nn.Module:
    return FunctionModule(lambda m, x: m.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), conv=nn.Conv1d(WIDTH, WIDTH, 3))


def resized(mode: str, factor: float, x: torch.Tensor) -> torch.Tensor:
    corners = {"align_corners": factor > 1} if mode in ("bilinear", "bicubic") else {}
    changed = F.interpolate(x, scale_factor=factor, mode=mode, **corners)
    return F.interpolate(changed, size=x.shape[-2:], mode=mode, **corners)


def pooled(pool: Change, x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(pool(x), size=x.shape[-2:])


def function(change: Change) -> Callable[[], nn.Module]:
    return partial(FunctionModule, lambda _, x: change(x))


ANYWHERE: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
    "relu_": partial(nn.ReLU, inplace=True),
    "silu_": partial(nn.SiLU, inplace=True),
    "elu_": partial(nn.ELU, inplace=True),
    "leaky_relu_": partial(nn.LeakyReLU, 0.2, inplace=True),
    "dropout": partial(nn.Dropout, 0.3),
    "dropout_": partial(nn.Dropout, 0.2, inplace=True),
    "alpha_dropout": partial(nn.AlphaDropout, 0.2),
    "overwritten_slice": function(overwritten_slice),
    "gated": function(gated),
    "scaled_in_place": function(scaled_in_place),
    "transposed": function(transposed_back),
    "noisy": function(noisy),
    "masked": function(masked),
    "squash": function(Squash.apply),
    "running_mean": RunningMean,
    "softmax": partial(nn.Softmax, dim=-1),
    "cumsum": function(partial(torch.cumsum, dim=1)),
    "roll": function(partial(torch.roll, shifts=1, dims=1)),
}
_ANYWHERE_BUT_IMAGES = {"linear": partial(nn.Linear, WIDTH, WIDTH), "layer_norm": partial(nn.LayerNorm, WIDTH)}

BLOCKS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "rows": {
        **_ANYWHERE_BUT_IMAGES,
        "batch_norm": partial(nn.BatchNorm1d, WIDTH),
        "gru_cell": partial(Cells, nn.GRUCell),
        "lstm_cell": partial(Cells, nn.LSTMCell),
        "rnn_cell": partial(Cells, nn.RNNCell),
        "bilinear": function(lambda x: torch.einsum("ni,nj->nj", x, x)),
    },
    "sequence": {
        **_ANYWHERE_BUT_IMAGES,
        "attention": partial(Attention, causal=True),
        "multi_head": partial(Attention, causal=False),
        "lstm": partial(recurrent, nn.LSTM, directions=2),
        "gru": partial(recurrent, nn.GRU),
        "rnn": partial(recurrent, nn.RNN),
        "conv1d": causal_convolution,
        "flip": function(partial(torch.flip, dims=(1,))),
        "mean_of_time": function(lambda x: x - x.mean(1, keepdim=True)),
    },
    "image": {
        "conv": partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1),
        "depthwise": partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False),
        "batch_norm": partial(nn.BatchNorm2d, WIDTH),
        "group_norm": partial(nn.GroupNorm, 2, WIDTH),
        "instance_norm": partial(nn.InstanceNorm2d, WIDTH, affine=True),
        "dropout2d": partial(nn.Dropout2d, 0.2),
        "max_pool": function(partial(pooled, partial(F.max_pool2d, kernel_size=2))),
        "avg_pool": function(partial(pooled, partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1))),
        "adaptive_pool": function(partial(pooled, partial(F.adaptive_avg_pool2d, output_size=4))),
        "reflected": function(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")[..., 1:-1, 1:-1] * 1.1),
        "shuffled": function(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2) * 0.9, 2)),
        "transposed_conv": partial(nn.ConvTranspose2d, WIDTH, WIDTH, 3, padding=1),
        **{
            f"{mode}_{name}": function(partial(resized, mode, factor))
            for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
            for name, factor in (("up", 2.0), ("down", 0.5))
        },
    },
}


class Wrapped(nn.Module):
    """A block, and how it is called."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block


class Residual(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x * 1.0)  # a block may overwrite what it is given


class Twice(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x))


class Checkpointed(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Autocast(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.block(x).float()


class Hooked(Wrapped):
    """Hooks change what the block is given, what it returns, and the gradient."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        block.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0.8,))
        block.register_forward_hook(lambda _, __, output: output * 1.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x) * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


class InEval(Wrapped):
    """Its norms take their buffers, its dropout does nothing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        block.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class Without(Wrapped):
    """No gradient flows through the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.block(x * 1.0)
        return x + shift


WRAPPERS: dict[str, type[Wrapped]] = {
    "residual": Residual,
    "twice": Twice,
    "checkpointed": Checkpointed,
    "autocast": Autocast,
    "hooked": Hooked,
    "in_eval": InEval,
    "without_gradient": Without,
}


_SHAPES = {"rows": (6, WIDTH), "sequence": (3, 4, WIDTH), "tokens": (3, 4), "image": (2, WIDTH, 6, 6)}
_VOCABULARY = 11

Block = tuple[Any, ...]


@dataclass(frozen=True)
class Recipe:
    """A model: what it starts from, its blocks, what of it is trained, and what it returns.

    `start` is a key of _SHAPES, `end` one of _ENDS; the parameters of every `frozen`-th block are not trained (0: all are).
    """

    start: str
    blocks: tuple[Block, ...]
    end: str = "scalar"
    frozen: int = 0
    autocast: bool = False


def losses(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.mse_loss(x, target), 0.1 * x.abs().mean()


_ENDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "scalar": F.mse_loss,
    "sum": lambda x, target: sum(losses(x, target)),
    "tuple": lambda x, target: (sum(losses(x, target)), x, x.argmax(-1)),
    "dict": lambda x, target: {"loss": sum(losses(x, target)), "parts": losses(x, target)},
}


class Model(nn.Module):
    """The blocks of a recipe, one after the other; tokens are embedded first."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        kind = "sequence" if recipe.start == "tokens" else recipe.start
        self.autocast = recipe.autocast
        self.embedding = nn.Embedding(_VOCABULARY, WIDTH) if recipe.start == "tokens" else None
        self.blocks = nn.ModuleList(make_block(kind, block) for block in recipe.blocks)
        for i, block in enumerate(self.blocks):
            if recipe.frozen and i % recipe.frozen == 0:
                block.requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, *([1, 1] if kind == "image" else [])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            x = (x if self.embedding is None else self.embedding(x)) * self.scale
            for block in self.blocks:
                x = block(x)
        return x.float()


def make_block(kind: str, block: Block) -> nn.Module:
    """The module that one item of a recipe stands for."""
    name, *inner = block
    if name == "both":  # of two blocks, the one beside the other
        first, second = (make_block(kind, one) for one in inner)
        return FunctionModule(
            lambda m, x: torch.stack((m.first(x * 1.0), m.second(x * 1.0))).mul_(0.5).sum(0), first=first, second=second
        )
    if name in WRAPPERS:
        return WRAPPERS[name](make_block(kind, inner[0]))
    return (ANYWHERE | BLOCKS[kind])[name]()


def build(recipe: Recipe) -> Workload:
    """The model of a recipe with its loss and a batch; the same every time."""
    torch.manual_seed(3)
    shape = _SHAPES[recipe.start]
    x = torch.randint(_VOCABULARY, shape) if recipe.start == "tokens" else torch.randn(shape)
    target = torch.randn(*shape, WIDTH) if recipe.start == "tokens" else torch.randn(shape)
    return Workload(Model(recipe), _ENDS[recipe.end], (x, target))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe."""
    start = draw(st.sampled_from(sorted(_SHAPES)))
    kind = "sequence" if start == "tokens" else start
    leaf = st.tuples(st.sampled_from([*ANYWHERE, *BLOCKS[kind]]))
    # Wrapped as often as not, and own blocks of the kind as often as those that are anywhere.
    own = st.tuples(st.sampled_from(sorted(BLOCKS[kind])))
    once = st.tuples(st.sampled_from(sorted(WRAPPERS)), leaf | own)
    twice = st.tuples(st.sampled_from(sorted(WRAPPERS)), once)
    both = st.tuples(st.just("both"), leaf | once, own | once)
    recipe = Recipe(
        start,
        tuple(draw(st.lists(leaf | own | once | twice | both, min_size=1, max_size=5))),
        end=draw(st.sampled_from(sorted(_ENDS))),
        frozen=draw(st.sampled_from((0, 0, 2, 3))),
        autocast=draw(st.sampled_from((False, False, False, True))),
    )
    assume(not differs_from_eager(recipe))
    return recipe


def differs_from_eager(recipe: Recipe) -> bool:
    """Whether docs/limits.md names a reason: buffers that eager PyTorch changes again when it recomputes."""
    names = (set(_names(block)) for block in recipe.blocks)
    return any("checkpointed" in found and found & {"batch_norm", "running_mean"} for found in names)


def _names(block: Block) -> Iterator[str]:
    for part in block:
        if isinstance(part, str):
            yield part
        else:
            yield from _names(part)

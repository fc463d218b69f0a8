"""Random models: recipes that hypothesis draws and shrinks, and the modules that they stand for.

A recipe is nested tuples of names, so that a failing one can be pasted: ``build(Recipe("image", (("conv",), ("relu_",))))``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from planner.models import Workload
from tests.support.random_blocks import ANYWHERE, BLOCKS, WIDTH, WRAPPERS

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
        return Beside(*(make_block(kind, one) for one in inner))
    if name in WRAPPERS:
        return WRAPPERS[name](make_block(kind, inner[0]))
    return (ANYWHERE | BLOCKS[kind])[name]()


class Beside(nn.Module):
    """Two blocks on one input; a difference of what they make."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((self.first(x * 1.0), self.second(x * 1.0))).mul_(0.5).sum(0)


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
    """Whether docs/limits.md names a reason: buffers that eager PyTorch changes again, weights used twice under autocast."""
    for block in recipe.blocks:
        names = set(_names(block))
        again = names & {"twice", "gru_cell", "lstm_cell", "rnn_cell", "gru", "rnn"}
        if ("checkpointed" in names and names & {"batch_norm", "running_mean"}) or (
            again and (recipe.autocast or "autocast" in names)
        ):
            return True
    return False


def _names(block: Block) -> Iterator[str]:
    for part in block:
        if isinstance(part, str):
            yield part
        else:
            yield from _names(part)

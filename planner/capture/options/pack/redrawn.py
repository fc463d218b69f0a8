"""Dropout masks drawn again from the saved state of the generator, without dropout's input."""

from functools import partial

import torch

from graphs.ir import Phase
from planner.capture.options.added import value_of
from planner.capture.options.pack.finder import PackFinder, room_for
from planner.capture.rewrites.outputs import is_dense
from planner.capture.rewrites.reproducible_random import with_generator_argument
from planner.torch_private.core import FakeTensor

aten = torch.ops.aten


def mask_drawn_again(state: torch.Tensor, *, like: torch.Tensor, probability: float) -> tuple[torch.Tensor]:
    """Return a mask from the state of a generator, as drawn by ``reproducible_random.dropout_with_generator``.

    Args:
        like: the fake mask.
        probability: probability that an element is dropped.
    """
    generator = torch.Generator()
    if not isinstance(state, FakeTensor):
        generator.set_state(state)
    return (room_for(like, state).bernoulli_(1 - probability, generator=generator),)


def offer(finder: PackFinder) -> None:
    """Add an op for each dropout mask on a CPU. CUDA's kernel draws it fused with the product, as no other kernel does."""
    for op, node in finder.calls([aten.native_dropout.default], Phase.FORWARD):
        calls = finder.capture.program.calls[op.id]
        if finder.device != "cpu" or calls.random_state is None or with_generator_argument(node) is None:
            continue
        mask, t, probability = value_of(node, (1,)), op.outputs[-1], node.args[1]
        assert isinstance(probability, float)
        if finder.is_worth(t) and is_dense(mask):
            size_bytes = finder.graph.tensors[calls.random_state].size_bytes
            finder.additions.fakes[calls.random_state] = mask.new_empty(size_bytes, dtype=torch.uint8)
            called = partial(mask_drawn_again, like=mask, probability=probability)
            finder.add(called, [calls.random_state], like=op, of=op.name, does="mask_drawn_again", makes=t)

"""Dropout masks drawn again from the saved state of the generator, without dropout's input."""

from functools import partial

import torch

from graphs.ir import Phase
from planner.capture.options.additions import get_value
from planner.capture.options.pack.finder import PackFinder, allocate_like
from planner.capture.rewrites.outputs import is_dense
from planner.capture.rewrites.reproducible_random import find_function_with_generator
from planner.torch_private.core import FakeTensor

aten = torch.ops.aten


def redraw_mask(state: torch.Tensor, *, like: torch.Tensor, probability: float) -> tuple[torch.Tensor]:
    """Return a mask from the state of a generator, as drawn by ``reproducible_random.draw_dropout``.

    Args:
        like: the fake mask.
        probability: probability that an element is dropped.
    """
    generator = torch.Generator()
    if not isinstance(state, FakeTensor):
        generator.set_state(state)
    return (allocate_like(like, state).bernoulli_(1 - probability, generator=generator),)


def offer(finder: PackFinder) -> None:
    """Add an op for each dropout mask on a CPU. CUDA's kernel draws it fused with the product, as no other kernel does."""
    for op, node in finder.iterate_calls([aten.native_dropout.default], Phase.FORWARD):
        calls = finder.capture.program.calls[op.id]
        if finder.device != "cpu" or calls.random_state is None or find_function_with_generator(node) is None:
            continue
        mask, t, probability = get_value(node, (1,)), op.outputs[-1], node.args[1]
        assert isinstance(probability, float)
        if finder.is_worth(t) and is_dense(mask):
            size_bytes = finder.graph.tensors[calls.random_state].size_bytes
            finder.additions.fakes[calls.random_state] = mask.new_empty(size_bytes, dtype=torch.uint8)
            called = partial(redraw_mask, like=mask, probability=probability)
            finder.add(called, [calls.random_state], like=op, of=op.name, does="mask_drawn_again", makes=t)

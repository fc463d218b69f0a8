"""Boolean results of ops, such as dropout masks, in one bit per element."""

from functools import partial

import torch

from planner.capture.options.pack import bits
from planner.capture.options.pack.finder import PackFinder, allocate_like
from planner.capture.rewrites.outputs import is_dense


def pack_bits(mask: torch.Tensor, *, like: torch.Tensor, size: int) -> tuple[torch.Tensor]:
    """Return the bits of a mask in the memory order of the fake `like`, `size` elements at a time."""
    flat = bits.flatten_in_order(mask, bits.order_of(like))
    return (bits.pack(lambda room, begin, end: room.copy_(flat[begin:end]), flat.numel(), size, flat),)


def unpack_bits(packed: torch.Tensor, *, like: torch.Tensor, size: int) -> tuple[torch.Tensor]:
    """Return the mask, laid out like the fake `like`, from the result of ``pack_bits``."""
    mask = allocate_like(like, packed)
    bits.unpack_to(packed, bits.flatten_in_order(mask.view(torch.uint8), bits.order_of(like)), size)
    return (mask,)


def offer(finder: PackFinder) -> None:
    """Add two ops for each mask worth packing: to bits, and back."""
    for op in finder.graph.program:
        for t in op.outputs:
            value = finder.additions.fakes.get(t)
            if value is not None and finder.is_worth(t) and value.dtype is torch.bool and is_dense(value):
                size = bits.choose_part_size(value.numel(), finder.device)
                packed = value.new_empty(bits.count_bytes(value.numel()), dtype=torch.uint8)
                name = finder.graph.tensors[t].name
                made = finder.additions.add_tensor(f"{name}@bits", packed)
                finder.add(partial(pack_bits, like=value, size=size), [t], like=op, of=name, does="to_bits", makes=made)
                finder.add(partial(unpack_bits, like=value, size=size), [made], like=op, of=name, does="from_bits", makes=t)

"""Boolean results of ops, such as dropout masks, in one bit per element."""

from dataclasses import dataclass

import torch

from planner.capture.options.added import value_of
from planner.capture.options.pack import bits
from planner.capture.options.pack.finder import PackFinder, is_dense, room_for
from planner.capture.rewrites.outputs import tensors_in


@dataclass(frozen=True, slots=True)
class PackBits:
    """The packing of a mask to bits, in memory order.

    Attributes:
        mask: fake.
        size: number of elements processed at a time.
    """

    mask: torch.Tensor
    size: int

    @property
    def fakes(self) -> tuple[torch.Tensor, ...]:
        """The mask."""
        return (self.mask,)

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the bits."""
        flat = bits.in_order(given[0], bits.order_of(self.mask))
        return (bits.pack(lambda room, begin, end: room.copy_(flat[begin:end]), flat.numel(), self.size, flat),)


@dataclass(frozen=True, slots=True)
class UnpackBits:
    """The unpacking of bits to a mask with the program's layout.

    Attributes:
        mask, packed: fake.
        size: as in ``PackBits``.
    """

    mask: torch.Tensor
    packed: torch.Tensor
    size: int

    @property
    def fakes(self) -> tuple[torch.Tensor, ...]:
        """The bits."""
        return (self.packed,)

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the mask."""
        mask = room_for(self.mask, given[0])
        bits.unpack_to(given[0], bits.in_order(mask.view(torch.uint8), bits.order_of(self.mask)), self.size)
        return (mask,)


def offer(finder: PackFinder) -> None:
    """Add two ops for each mask worth packing: to bits, and back."""
    for op in finder.graph.program:
        node = finder.capture.nodes[op.id]
        for t, path in finder.capture.program.calls[op.id].outputs:
            if node is None or not finder.is_worth(t) or not tensors_in(value := value_of(node, path)):
                continue
            if value.dtype is torch.bool and is_dense(value):
                size = bits.part_size(value.numel(), finder.device)
                packed = value.new_empty(bits.bytes_of(value.numel()), dtype=torch.uint8)
                name = finder.graph.tensors[t].name
                made = finder.new_tensor(f"{name}@bits", packed)
                finder.add(PackBits(value, size), [t], like=op, of=name, does="to_bits", makes=made)
                finder.add(UnpackBits(value, packed, size), [made], like=op, of=name, does="from_bits", makes=t)

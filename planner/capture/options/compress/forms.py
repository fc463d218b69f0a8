"""Compression of numbers in groups of 256 between their minimum and maximum, as in GACT.

Liu et al., *GACT: Activation Compressed Training for Generic Network Architectures*, ICML 2022, with the rounding of ActNN (Chen
et al., ICML 2021): a number between two steps is rounded up with the probability of its distance from the lower one, so that the
result is unbiased. The random direction is a function of the tensor's bits, the op, and the number's position: the same in each
execution within a step, another in the next step, without a generator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

GROUP = 256
_UNIFORM = 2.0**-24
# The steps of a hash of 32 bits (Wellons, *Prospecting for hash functions*, 2018: lowbias32), as signed numbers.
_SPREAD, _FIRST, _SECOND = (number - 2**32 if number >= 2**31 else number for number in (0x9E3779B9, 0x7FEB352D, 0x846CA68B))


@dataclass(frozen=True, slots=True)
class Noise:
    """Random numbers for the groups from `first` on, by their positions in the tensor."""

    seed: torch.Tensor
    first: int

    def draw_like(self, rows: torch.Tensor) -> torch.Tensor:
        """Return uniform numbers in [0, 1), in float32; the integer arithmetic wraps around at 2^32."""
        hashed = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).mul_(_SPREAD)
        hashed += self.seed + self.first * GROUP * _SPREAD
        shifted = torch.empty_like(hashed)
        for shift, factor in ((16, _FIRST), (15, _SECOND), (16, None)):
            hashed ^= torch.bitwise_right_shift(hashed, shift, out=shifted)
            if factor is not None:
                hashed *= factor
        del shifted
        return hashed.bitwise_and_(2**24 - 1).to(torch.float32).mul_(_UNIFORM).view(rows.shape)


def compute_seed(values: torch.Tensor, number: int) -> torch.Tensor:
    """Return the seed of op `number` on `values`: an integer on the same device, from all of their bits."""
    # Sums of 64-bit words are many times as fast as sums of shorter words; the remainder is added separately.
    size = values.element_size()
    whole = values.numel() * size // 8 * 8 // size
    total = values[:whole].view(torch.int64).sum()
    if whole < values.numel():
        total = total + values[whole:].view(torch.int16).sum()
    return (total + (total >> 32) + number * _SECOND).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equal steps from the minimum to the maximum of a group: both are restored exactly, and so are constant groups.

    A group with NaN or infinity, or with a range beyond float32, is restored as NaN.

    Each group has `code_bytes` for its numbers, and `limits` numbers of the tensor's dtype, which its codes are relative to.
    """

    bits: int

    @property
    def code_bytes(self) -> int:
        """The bytes of the codes of a group."""
        return GROUP * self.bits // 8

    @property
    def limits(self) -> int:
        """The number of limits: the minimum and the maximum."""
        return 2

    def pack(self, rows: torch.Tensor, noise: Noise, codes: torch.Tensor, limits: torch.Tensor) -> None:
        """Write `rows`, one float32 group each, to `codes` (bytes) and `limits`, with a row for each group."""
        # On a CPU, aminmax takes ten times as long.
        least, largest = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        limits.copy_(torch.cat((least, largest), dim=1))
        steps = 2**self.bits - 1
        length = (largest - least).clamp_min_(torch.finfo(torch.float32).tiny)
        places = (rows - least).div_(length).mul_(steps).add_(noise.draw_like(rows)).floor_().clamp_(0, steps)
        whole = places.nan_to_num_(0.0).to(torch.uint8).view(len(rows), 8 // self.bits, self.code_bytes)
        for i in range(1, 8 // self.bits):
            whole[:, 0] |= whole[:, i] << (self.bits * i)
        codes.copy_(whole[:, 0])

    def unpack(self, codes: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the numbers that `pack` has written, in float32."""
        steps = 2**self.bits - 1
        parts = [(codes >> (self.bits * i)) & steps for i in range(8 // self.bits)]
        places = torch.cat(parts, dim=1).to(torch.float32).div_(steps)
        limits = limits.to(torch.float32)
        return torch.lerp(limits[:, :1], limits[:, 1:], places)


@dataclass(frozen=True, slots=True)
class Float8:
    """float8 (e4m3), scaled by the largest absolute number of a group, rounded to nearest.

    A group with NaN or infinity is restored as NaN.
    """

    code_bytes: int = GROUP
    limits: int = 1

    def pack(self, rows: torch.Tensor, noise: Noise, codes: torch.Tensor, limits: torch.Tensor) -> None:
        """Write codes and limits; see ``Uniform.pack``."""
        largest = rows.abs().amax(dim=1, keepdim=True)
        limits.copy_(largest)
        scale = torch.finfo(torch.float8_e4m3fn).max / largest.clamp_min(_LEAST)
        codes.copy_((rows * scale).to(torch.float8_e4m3fn).view(torch.uint8))

    def unpack(self, codes: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Return the restored numbers; see ``Uniform.unpack``."""
        largest = limits.to(torch.float32)
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        return codes.view(torch.float8_e4m3fn).to(torch.float32).mul_(scale)


_LEAST = 2.0**-100  # smaller numbers may be restored as zero

Form = Uniform | Float8
FORMS: Mapping[str, Form] = MappingProxyType({**{str(bits): Uniform(bits) for bits in (1, 2, 4, 8)}, "float8": Float8()})

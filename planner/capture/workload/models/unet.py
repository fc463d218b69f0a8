"""U-Net (Ronneberger et al. 2015) with padded convolutions: segmentation with long skip connections."""

import torch
from torch import Tensor, nn

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import (
    choose,
    compute_class_loss,
    create_tensors_in,
    draw_images,
    init_convolutions,
    refuse_if,
)


class DoubleConvolution(nn.Sequential):
    """Two times a 3x3 convolution, norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        parts: list[nn.Module] = []
        for channels in (inputs, outputs):
            normalise = nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(8, outputs)
            parts += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), normalise, nn.ReLU(inplace=True)]
        super().__init__(*parts)


class UNet(nn.Module):
    """A segmentation model from images ``(batch, 3, size, size)`` to logits ``(batch, classes, size, size)``."""

    def __init__(self, *, channels: int, depth: int, classes: int, norm: str) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.stem = DoubleConvolution(3, channels, norm)
        self.halve = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConvolution(w, 2 * w, norm) for w in widths[:-1])
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(DoubleConvolution(2 * w, w, norm) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, classes, 1)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel of `x`."""
        x = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(self.halve(x))
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            x = up(torch.cat((skips.pop(), enlarge(x)), dim=1))
        logits: Tensor = self.head(x)
        return logits


def unet(
    *,
    batch: int = 4,
    size: int = 512,
    channels: int = 64,
    depth: int = 4,
    classes: int = 2,
    norm: str = "batch",
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Build U-Net, with four levels by default; `channels` at full resolution, doubled at each of `depth` halvings.

    Raises:
        UsageError: `size` is no multiple of 2^depth; `norm` is neither ``batch`` nor ``group`` (which needs
            `channels` to be a multiple of its 8 groups).
    """
    choose("norm", norm, ("batch", "group"))
    refuse_if(size % 2**depth, f"option size of unet is {size}: it must be a multiple of 2^depth = {2**depth}")
    refuse_if(norm == "group" and channels % 8, f"option channels of unet is {channels}: norm=group needs a multiple of 8")
    with create_tensors_in(dtype, device):
        model = UNet(channels=channels, depth=depth, classes=classes, norm=norm)
        return Workload(model, compute_class_loss, (draw_images(batch, size), torch.randint(classes, (batch, size, size))))

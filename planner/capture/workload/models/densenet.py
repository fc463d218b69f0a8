"""DenseNet (Huang et al. 2017): every layer of a block reads the concatenation of all before it."""

import torch
from torch import Tensor, nn

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import create_tensors_in, refuse_if, train_on_images


def build_normed_convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Return BatchNorm, ReLU, and a convolution without bias."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    )


class DenseBlock(nn.Module):
    """A block of `layers` layers that add `growth` channels each, through a bottleneck of 4 * `growth`."""

    def __init__(self, inputs: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                build_normed_convolution(inputs + layer * growth, 4 * growth, 1), build_normed_convolution(4 * growth, growth, 3)
            )
            for layer in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and the outputs of all layers, along the channels."""
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, dim=1)))
        return torch.cat(parts, dim=1)


def densenet121(
    *,
    batch: int = 64,
    size: int = 224,
    blocks: tuple[int, ...] = (6, 12, 24, 16),
    growth: int = 32,
    classes: int = 1000,
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Build DenseNet-121; DenseNet-169 is ``blocks=(6, 12, 32, 32)``.

    Raises:
        UsageError: `size` is too small for the halvings.
    """
    least = 2 ** (len(blocks) + 1)
    refuse_if(size < least, f"option size of densenet121 is {size}: {len(blocks)} blocks need at least {least}")
    with create_tensors_in(dtype, device):
        channels = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for index, count in enumerate(blocks):
            layers.append(DenseBlock(channels, count, growth))
            channels += count * growth
            if index + 1 < len(blocks):
                layers += [build_normed_convolution(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return train_on_images(nn.Sequential(*layers, nn.Linear(channels, classes)), batch, size, classes)

"""MobileNetV2 (Sandler et al. 2018): inverted residuals around depthwise convolutions."""

from torch import Tensor, nn

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import create_tensors_in, train_on_images

# Table 2 of the paper: expansion, channels, repetitions, stride of the first repetition.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def round_to_multiple_of_8(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8, and at most a tenth below `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def build_convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """Return a convolution without bias, its BatchNorm, and ReLU6 if `relu`."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, nn.ReLU6(inplace=True)) if relu else nn.Sequential(*layers)


class InvertedResidual(nn.Module):
    """Expansion by 1x1, a filter per channel by 3x3, projection by 1x1; added to the input if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        self.branch = nn.Sequential(
            *([build_convolution(inputs, wide, 1)] if expansion > 1 else []),
            build_convolution(wide, wide, 3, stride=stride, groups=wide),
            build_convolution(wide, outputs, 1, relu=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch of `x`, added to it if the shapes agree."""
        branch: Tensor = self.branch(x)
        return x + branch if self.adds else branch


def mobilenet_v2(
    *,
    batch: int = 64,
    size: int = 224,
    multiplier: float = 1.0,
    classes: int = 1000,
    dropout: float = 0.2,
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Build MobileNetV2; all channels but those of narrow classifiers are scaled by `multiplier`."""
    with create_tensors_in(dtype, device):
        channels = round_to_multiple_of_8(32 * multiplier)
        layers: list[nn.Module] = [build_convolution(3, channels, 3, stride=2)]
        for expansion, width, repetitions, first_stride in STAGES:
            outputs = round_to_multiple_of_8(width * multiplier)
            for repetition in range(repetitions):
                layers.append(InvertedResidual(channels, outputs, first_stride if repetition == 0 else 1, expansion))
                channels = outputs
        last = round_to_multiple_of_8(1280 * max(1.0, multiplier))
        layers += [build_convolution(channels, last, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(last, classes))
        return train_on_images(model, batch, size, classes)

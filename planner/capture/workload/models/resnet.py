"""Residual networks (He et al. 2016), with the stride of a bottleneck on its 3x3 convolution."""

from collections.abc import Callable

from torch import Tensor, nn

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import create_tensors_in, train_on_images


def build_convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias, and its BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """The block relu(branch(x) + shortcut(x)); the shortcut is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [
                build_convolution(inputs, width, 1),
                build_convolution(width, width, 3, stride),
                build_convolution(width, outputs, 1),
            ]
        else:
            layers = [build_convolution(inputs, width, 3, stride), build_convolution(width, width, 3)]
        parts: list[nn.Module] = []
        for layer in layers:
            parts += [layer, nn.ReLU(inplace=True)]
        self.branch = nn.Sequential(*parts[:-1])
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else build_convolution(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for `x` ``(batch, channels, height, width)``."""
        joined: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return joined


def build_residual_network(blocks: tuple[int, ...], width: int, classes: int, *, bottleneck: bool) -> nn.Sequential:
    """Build stem, one stage for each of `blocks`, pooling and classifier; stages halve the image and double the width."""
    stem = nn.Sequential(build_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))
    stages: list[nn.Module] = []
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        layers = []
        for block in range(count):
            layers.append(Residual(inputs, inner, 2 if stage > 0 and block == 0 else 1, bottleneck=bottleneck))
            inputs = 4 * inner if bottleneck else inner
        stages.append(nn.Sequential(*layers))
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _make_resnet(default: tuple[int, ...], *, bottleneck: bool) -> Callable[..., Workload]:
    """Return a function that builds networks, by default with `default` blocks in the stages."""

    def build(
        *,
        batch: int = 64,
        size: int = 224,
        blocks: tuple[int, ...] = default,
        width: int = 64,
        classes: int = 1000,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> Workload:
        with create_tensors_in(dtype, device):
            model = build_residual_network(tuple(blocks), width, classes, bottleneck=bottleneck)
            return train_on_images(model, batch, size, classes)

    return build


resnet18 = _make_resnet((2, 2, 2, 2), bottleneck=False)  # ResNet-34 with blocks=(3, 4, 6, 3)
resnet50 = _make_resnet((3, 4, 6, 3), bottleneck=True)  # ResNet-101 with blocks=(3, 4, 23, 3)
resnet152 = _make_resnet((3, 8, 36, 3), bottleneck=True)

"""VGG (Simonyan and Zisserman 2015): plain 3x3 convolutions and a large classifier with dropout."""

from collections.abc import Callable

from torch import nn

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import create_tensors_in, refuse_if, train_on_images

STAGE_WIDTHS = (1, 2, 4, 8, 8)


def build_plain_network(
    convolutions: tuple[int, ...], *, width: int, hidden: int, classes: int, bn: bool, dropout: float
) -> nn.Sequential:
    """Build five stages of `convolutions` convolutions, each followed by a halving, and three linear layers."""
    features: list[nn.Module] = []
    channels = 3
    for count, factor in zip(convolutions, STAGE_WIDTHS, strict=True):
        for _ in range(count):
            features.append(nn.Conv2d(channels, factor * width, 3, padding=1))
            channels = factor * width
            if bn:
                features.append(nn.BatchNorm2d(channels))
            features.append(nn.ReLU(inplace=True))
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(channels * 49, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(nn.Sequential(*features), nn.AdaptiveAvgPool2d(7), nn.Flatten(), classifier)


def _make_vgg(*convolutions: int) -> Callable[..., Workload]:
    """Return a function that builds networks with `convolutions` in the stages; with BatchNorm if `bn`."""

    def build(
        *,
        batch: int = 64,
        size: int = 224,
        width: int = 64,
        hidden: int = 4096,
        classes: int = 1000,
        bn: bool = False,
        dropout: float = 0.5,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> Workload:
        refuse_if(size < 32, f"option size of vgg is {size}: five halvings need at least 32")
        with create_tensors_in(dtype, device):
            model = build_plain_network(convolutions, width=width, hidden=hidden, classes=classes, bn=bn, dropout=dropout)
            return train_on_images(model, batch, size, classes)

    return build


vgg16 = _make_vgg(2, 2, 3, 3, 3)  # configuration D
vgg19 = _make_vgg(2, 2, 4, 4, 4)  # configuration E

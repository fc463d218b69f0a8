"""Models of torchvision: small, with random weights, without downloads."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from planner.capture.workload.models import Workload

CLASSES = 10
_DECLARED = torch.library.Library("torchvision", "FRAGMENT")  # declarations last as long as this object


def declare_torchvision_ops() -> None:
    """Declare torchvision's ops, so that it can be imported with a CPU build of torch.

    Its wheel on PyPI is built for CUDA: its compiled ops do not load here, and its import fails if they are not declared. No
    model below calls them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    for path in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(path)
        except OSError:
            break
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            _DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def images(batch: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))


def torchvision_classifier(name: str, batch: int = 4, size: int = 64, **options: Any) -> Workload:
    from torchvision import models

    return Workload(getattr(models, name)(num_classes=CLASSES, **options), F.cross_entropy, images(batch, size))


def residual_network() -> Workload:
    from torchvision.models.resnet import BasicBlock, ResNet

    return Workload(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES), F.cross_entropy, images(4, 64))


def dense_network() -> Workload:
    from torchvision.models import DenseNet

    model = DenseNet(growth_rate=8, block_config=(3, 4, 3), num_init_features=16, num_classes=CLASSES)
    return Workload(model, F.cross_entropy, images(8, 64))


def vision_transformer() -> Workload:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 4, 4, 4, 64, 128, dropout=0.1, num_classes=CLASSES)
    return Workload(model, F.cross_entropy, images(8, 32))


def inception() -> Workload:
    """Build a model with two auxiliary outputs in train mode, each with its loss."""
    from torchvision.models import googlenet

    def loss(out: Any, target: torch.Tensor) -> torch.Tensor:
        first, second, third = (F.cross_entropy(one, target) for one in out)
        return first + 0.3 * (second + third)

    return Workload(googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False), loss, images(2, 64))


def segmentation(name: str) -> Workload:
    """Build a model that interpolates to the size of the image, with two heads in a dict."""
    from torchvision.models import segmentation

    model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=5, aux_loss=True)

    def loss(out: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out["out"], target) + 0.5 * F.cross_entropy(out["aux"], target)

    return Workload(model, loss, (torch.randn(2, 3, 64, 64), torch.randint(5, (2, 64, 64))))


MODELS: dict[str, Callable[[], Workload]] = {
    "resnet": residual_network,
    "densenet": dense_network,
    "mobilenet_v2": partial(torchvision_classifier, "mobilenet_v2", width_mult=0.35),
    "shufflenet": partial(torchvision_classifier, "shufflenet_v2_x0_5", 8),
    "squeezenet": partial(torchvision_classifier, "squeezenet1_1"),
    "mnasnet": partial(torchvision_classifier, "mnasnet0_5"),
    "vit": vision_transformer,
    "googlenet": inception,
    "deeplabv3": partial(segmentation, "deeplabv3_mobilenet_v3_large"),
}

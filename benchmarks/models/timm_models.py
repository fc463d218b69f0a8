"""Models of timm: small, with random weights, without downloads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F

from benchmarks.models.torchvision_models import CLASSES, images
from planner.capture.workload.models import Workload


def timm_classifier(name: str, batch: int = 4, size: int = 64, **options: Any) -> Workload:
    import timm

    return Workload(timm.create_model(name, num_classes=CLASSES, **options), F.cross_entropy, images(batch, size))


def mlp_mixer() -> Workload:
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(num_classes=CLASSES, img_size=32, patch_size=4, num_blocks=4, embed_dim=64)
    return Workload(model, F.cross_entropy, images(8, 32))


_VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
_STAGES = {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64)}

MODELS: dict[str, Callable[[], Workload]] = {
    "vit": partial(timm_classifier, "vit_tiny_patch16_224", 8, 32, **_VIT, drop_path_rate=0.1),
    "deit3": partial(timm_classifier, "deit3_small_patch16_224", 8, 32, **_VIT),
    "swin": partial(
        timm_classifier, "swin_tiny_patch4_window7_224", 4, 64, img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 2, 1)
    ),
    "convnext": partial(timm_classifier, "convnext_atto", **_STAGES),
    "convnextv2": partial(timm_classifier, "convnextv2_atto", **_STAGES),
    "mobilenetv4": partial(timm_classifier, "mobilenetv4_conv_small_050", drop_path_rate=0.1),
    "regnet": partial(timm_classifier, "regnety_002"),
    "mobilenetv3": partial(timm_classifier, "mobilenetv3_small_050"),
    "ghostnet": partial(timm_classifier, "ghostnet_050"),
    "visformer": partial(timm_classifier, "visformer_tiny", 4, 64, img_size=64, embed_dim=48, depth=(2, 1, 1)),
    "mlp_mixer": mlp_mixer,
}

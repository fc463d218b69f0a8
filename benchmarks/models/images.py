"""Handwritten models of images."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule, Layers, Residual, classification, conv
from planner.capture.workload.models import Workload


def residual_cnn() -> Workload:
    """Build a model with batch norm and ReLU in place, and residual sums."""
    blocks: Layers = [conv(3, 16)]
    for _ in range(6):
        blocks.append(Residual(conv(16, 16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return classification(nn.Sequential(*blocks, *head), torch.randn(16, 3, 32, 32))


def unet() -> Workload:
    """Build a model with bilinear interpolation to the size of the skip connection."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, layer in enumerate(m.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for layer, skip in zip(m.up, reversed(kept[:-1]), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = layer(torch.cat((x, skip), dim=1))
        return m.head(x)

    down, up = nn.ModuleList((conv(3, 16), conv(16, 32), conv(32, 64))), nn.ModuleList((conv(96, 32), conv(48, 16)))
    model = FunctionModule(forward, down=down, up=up, head=nn.Conv2d(16, 5, 1))
    return Workload(model, F.cross_entropy, (torch.randn(4, 3, 48, 48), torch.randint(5, (4, 48, 48))))


def feature_pyramid() -> Workload:
    """Build a model with maps of several sizes, interpolated and summed, with one loss each."""

    def forward(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        maps = []
        for stage in m.stages:
            x = stage(x)
            maps.append(x)
        top = None
        outputs = []
        for side, level in zip(reversed(m.sides), reversed(maps), strict=True):
            here = side(level)
            top = here if top is None else here + F.interpolate(top, scale_factor=2.0, mode="nearest")
            outputs.append(m.head(top))
        return outputs

    def loss(outputs: list[torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grown = [F.interpolate(o, size=target.shape[-2:], mode="bicubic", align_corners=False) for o in outputs]
        losses = [F.cross_entropy(one, target) for one in grown]
        return (sum(losses[1:], losses[0]), *losses)

    stages = nn.ModuleList((conv(3, 16, 2), conv(16, 32, 2), conv(32, 64, 2)))
    sides = nn.ModuleList(nn.Conv2d(c, 32, 1) for c in (16, 32, 64))
    model = FunctionModule(forward, stages=stages, sides=sides, head=nn.Conv2d(32, 5, 3, padding=1))
    return Workload(model, loss, (torch.randn(4, 3, 64, 64), torch.randint(5, (4, 64, 64))))


def generator() -> Workload:
    """Build a GAN's generator, trained through a frozen discriminator."""
    layers: Layers = [nn.Unflatten(1, (64, 4, 4))]
    for inputs, outputs in ((64, 48), (48, 32), (32, 16)):
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    made = nn.Sequential(nn.Linear(32, 1024), *layers, nn.Conv2d(16, 3, 3, padding=1), nn.Tanh())
    judging = (nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4, 2, 1), nn.Flatten())
    judge = nn.Sequential(*judging).requires_grad_(requires_grad=False)
    model = FunctionModule(lambda m, z: F.softplus(-m.judge(m.made(z))).mean(), made=made, judge=judge)
    return Workload(model, None, (torch.randn(16, 32),))


def variational() -> Workload:
    """Build a VAE, which draws noise inside the step and has two losses."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = m.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        error = F.binary_cross_entropy_with_logits(m.decoder(z), x)
        return error + 1e-3 * divergence, error.detach(), divergence.detach()

    encoder = nn.Sequential(nn.Linear(400, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 32))
    decoder = nn.Sequential(nn.Linear(16, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 400))
    return Workload(FunctionModule(forward, encoder=encoder, decoder=decoder), None, (torch.rand(256, 400),))


def convnext() -> Workload:
    """Build a model with depthwise convolutions, layer norm over channels, scaled and dropped residuals."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(32, 32, 7, padding=3, groups=32)
            self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
            self.scale = nn.Parameter(0.1 * torch.ones(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            hidden = (self.scale * self.second(F.gelu(self.first(hidden)))).permute(0, 3, 1, 2)
            kept = torch.rand(len(x), 1, 1, 1) < 0.9
            return x + hidden * kept / 0.9

    blocks = nn.Sequential(nn.Conv2d(3, 32, 4, 4), *(Block() for _ in range(6)))
    return classification(
        nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(8, 3, 64, 64)
    )


def mixer() -> Workload:
    """Build an MLP-Mixer: dense layers over patches, then over channels."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other_norm = nn.LayerNorm(64), nn.LayerNorm(64)
            self.patches = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            self.channels = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.patches(self.norm(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.other_norm(x))

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.blocks(m.stem(x).flatten(2).transpose(1, 2)).mean(1))

    blocks = nn.Sequential(*(Block() for _ in range(6)))
    return classification(
        FunctionModule(forward, stem=nn.Conv2d(3, 64, 4, 4), blocks=blocks, head=nn.Linear(64, 10)), torch.randn(8, 3, 32, 32)
    )


def multi_task() -> Workload:
    """Build two heads on one trunk; the weights of their losses are trained too."""

    def forward(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = m.trunk(x)
        return {"depth": m.depth(features), "labels": m.labels(features)}

    def loss(m: Any, out: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        errors = torch.stack((F.l1_loss(out["depth"], target["depth"]), F.cross_entropy(out["labels"], target["labels"])))
        return {"loss": (m.weights.neg().exp() * errors + m.weights).sum(), "errors": errors}

    trunk = nn.Sequential(conv(3, 24), *(Residual(conv(24, 24), conv(24, 24)) for _ in range(3)))
    model = FunctionModule(forward, trunk=trunk, depth=nn.Conv2d(24, 1, 3, padding=1), labels=nn.Conv2d(24, 6, 3, padding=1))
    target = {"depth": torch.rand(4, 1, 32, 32), "labels": torch.randint(6, (4, 32, 32))}
    weighted = FunctionModule(loss, weights=nn.Parameter(torch.zeros(2)))
    return Workload(model, weighted, (torch.randn(4, 3, 32, 32), target))

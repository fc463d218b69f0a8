"""Models of diffusers: small, with random weights, without downloads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.workload.models import Workload


def denoising(model: nn.Module, channels: int, size: int, *more: torch.Tensor) -> Workload:
    """Build a model that predicts noise, with the first item of what `model` returns."""
    x, noise = torch.randn(2, channels, size, size), torch.randn(2, channels, size, size)
    denoiser = FunctionModule(lambda m, *inputs: m.model(*inputs, return_dict=False)[0], model=model)
    return Workload(denoiser, F.mse_loss, (x, torch.randint(1000, (2,)), *more, noise))


_SIZES = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}


def unet_2d() -> Workload:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return denoising(UNet2DModel(**_SIZES, **blocks), 3, 16)


def unet_2d_condition() -> Workload:
    from diffusers import UNet2DConditionModel

    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    attention = {"cross_attention_dim": 32, "attention_head_dim": 8}
    model = UNet2DConditionModel(**_SIZES, **attention, down_block_types=down, up_block_types=up)
    return denoising(model, 4, 16, torch.randn(2, 7, 32))


def dit() -> Workload:
    from diffusers import DiTTransformer2DModel

    def forward(m: Any, x: torch.Tensor, step: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return m.model(x, timestep=step, class_labels=labels, return_dict=False)[0]

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=4, sample_size=16, in_channels=4, num_embeds_ada_norm=1000
    )
    x, noise = torch.randn(4, 4, 16, 16), torch.randn(4, 4, 16, 16)
    batch = (x, torch.randint(1000, (4,)), torch.randint(10, (4,)), noise)
    return Workload(FunctionModule(forward, model=model), F.mse_loss, batch)


def autoencoder_kl() -> Workload:
    """Build an autoencoder that draws a latent inside the step."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, **blocks)
    drawn = FunctionModule(lambda m, x: m.model(x, sample_posterior=True, return_dict=False)[0], model=model)
    x = torch.randn(2, 3, 32, 32)
    return Workload(drawn, F.mse_loss, (x, x.clone()))


MODELS: dict[str, Callable[[], Workload]] = {
    "unet_2d": unet_2d,
    "unet_2d_condition": unet_2d_condition,
    "dit": dit,
    "autoencoder_kl": autoencoder_kl,
}

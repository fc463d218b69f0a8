"""Models of diffusers: small, with random weights, without downloads."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from planner.models import Workload


class Denoiser(nn.Module):
    """A model that predicts noise; its output is the first item of the inner model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs, return_dict=False)[0]


def denoising(model: nn.Module, channels: int, size: int, *more: torch.Tensor) -> Workload:
    x, noise = torch.randn(2, channels, size, size), torch.randn(2, channels, size, size)
    return Workload(Denoiser(model), F.mse_loss, (x, torch.randint(1000, (2,)), *more, noise))


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

    class Labelled(Denoiser):
        def forward(self, x: torch.Tensor, step: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.model(x, timestep=step, class_labels=labels, return_dict=False)[0]

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=4, sample_size=16, in_channels=4, num_embeds_ada_norm=1000
    )
    x, noise = torch.randn(4, 4, 16, 16), torch.randn(4, 4, 16, 16)
    return Workload(Labelled(model), F.mse_loss, (x, torch.randint(1000, (4,)), torch.randint(10, (4,)), noise))


def autoencoder_kl() -> Workload:
    """Build an autoencoder that draws a latent inside the step."""
    from diffusers import AutoencoderKL

    class Drawn(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x, sample_posterior=True, return_dict=False)[0]

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, **blocks)
    x = torch.randn(2, 3, 32, 32)
    return Workload(Drawn(model), F.mse_loss, (x, x.clone()))


MODELS: dict[str, Callable[[], Workload]] = {
    "unet_2d": unet_2d,
    "unet_2d_condition": unet_2d_condition,
    "dit": dit,
    "autoencoder_kl": autoencoder_kl,
}

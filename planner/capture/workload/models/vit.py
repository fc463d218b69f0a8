"""Vision transformer (Dosovitskiy et al. 2021): patches and a class token through a pre-norm encoder."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import compute_class_loss, create_tensors_in, draw_images, refuse_if


class ViTAttention(nn.Module):
    """Self-attention over all patches."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of `x` ``(batch, seq, width)``."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return joined


class ViTBlock(nn.Module):
    """Attention and a feed-forward net, each on a residual branch after a LayerNorm."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = ViTAttention(width, heads, dropout)
        self.dropout = nn.Dropout(dropout)
        self.feed = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` ``(batch, seq, width)`` with both branches added."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


class ViT(nn.Module):
    """A classifier from images ``(batch, 3, size, size)`` to logits ``(batch, classes)``, read off the class token."""

    def __init__(
        self, *, size: int, patch: int, layers: int, width: int, heads: int, hidden: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads, hidden, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the images `x`."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        joined = torch.cat((self.class_token.expand(patches.size(0), -1, -1), patches), dim=1)
        encoded = self.blocks(self.dropout(joined + self.positions))
        logits: Tensor = self.head(self.norm(encoded)[:, 0])
        return logits


def vit(
    *,
    batch: int = 64,
    size: int = 224,
    patch: int = 16,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    hidden: int | None = None,
    classes: int = 1000,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Build ViT, B/16 by default; ViT-L/16 is ``layers=24, width=1024, heads=16``; `hidden` None means 4 * `width`.

    Raises:
        UsageError: `size` is no multiple of `patch`, or `width` no multiple of `heads`.
    """
    refuse_if(size % patch, f"option size of vit is {size}: it must be a multiple of patch={patch}")
    refuse_if(width % heads, f"option width of vit is {width}: it must be a multiple of heads={heads}")
    with create_tensors_in(dtype, device):
        model = ViT(
            size=size,
            patch=patch,
            layers=layers,
            width=width,
            heads=heads,
            hidden=4 * width if hidden is None else hidden,
            classes=classes,
            dropout=dropout,
        )
        return Workload(model, compute_class_loss, (draw_images(batch, size), torch.randint(classes, (batch,))))

"""A model in a file of your own, to plan for from the command line or in a training loop.

``planner trace examples/own_model.py:build,batch=64 -o model.json`` calls `build` with ``batch=64``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A feed-forward branch with dropout around which its input passes."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` and what the branch makes of it."""
        return x + self.branch(x)


def build(
    batch: int = 32, width: int = 128, depth: int = 6, dropout: float = 0.1
) -> tuple[nn.Module, object, tuple[Tensor, Tensor]]:
    """A classifier of vectors: the model, its loss, and a batch of inputs and targets."""
    model = nn.Sequential(*(Residual(width, dropout) for _ in range(depth)), nn.Linear(width, 10))
    inputs, targets = torch.randn(batch, width), torch.randint(10, (batch,))
    return model, F.cross_entropy, (inputs, targets)

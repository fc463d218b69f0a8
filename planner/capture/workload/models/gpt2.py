"""GPT-2 (Radford et al. 2019): pre-norm decoder with learned positions and dropout."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import choose, compute_token_loss, create_tensors_in, refuse_if


class GPT2Attention(nn.Module):
    """Causal self-attention, fused (``sdpa``) or written out with its quadratic tensors (``written``)."""

    def __init__(self, width: int, heads: int, dropout: float, kind: str) -> None:
        super().__init__()
        self.heads, self.dropout, self.kind = heads, dropout, kind
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, future: Tensor | None) -> Tensor:
        """Mix the positions of `x` ``(batch, seq, width)``; `future` is True where a position may not look."""
        batch, seq, width = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        if self.kind == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        else:
            assert future is not None
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
            mixed = F.dropout(weights, self.dropout, self.training) @ v
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return F.dropout(joined, self.dropout, self.training)


class GPT2Block(nn.Module):
    """Attention and a feed-forward net, each on a residual branch after a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float, kind: str) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = GPT2Attention(width, heads, dropout, kind)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, future: Tensor | None) -> Tensor:
        """Return `x` ``(batch, seq, width)`` with both branches added."""
        x = x + self.attention(self.norm_attention(x), future)
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


class GPT2(nn.Module):
    """A language model from tokens ``(batch, seq)`` to logits ``(batch, seq, vocab)``."""

    future: Tensor | None

    def __init__(
        self, *, layers: int, width: int, heads: int, vocab: int, seq: int, dropout: float, attention: str, tie: bool
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPT2Block(width, heads, dropout, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        future = torch.ones(seq, seq, dtype=torch.bool).triu(1) if attention == "written" else None
        self.register_buffer("future", future, persistent=False)
        self._initialise(layers)
        if tie:
            self.head.weight = self.tokens.weight

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # The projections that end a residual branch are smaller, so that the sum does not grow with depth.
                ends_branch = name.endswith(("attention.out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of `tokens`."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x, self.future)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt2(
    *,
    batch: int = 8,
    seq: int = 1024,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    dropout: float = 0.1,
    attention: str = "sdpa",
    tie: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
) -> Workload:
    """Build GPT-2, small by default; medium is ``layers=24, width=1024, heads=16``.

    Raises:
        UsageError: `width` is no multiple of `heads`; `attention` is neither ``sdpa`` nor ``written``.
    """
    choose("attention", attention, ("sdpa", "written"))
    refuse_if(width % heads, f"option width of gpt2 is {width}: it must be a multiple of heads={heads}")
    with create_tensors_in(dtype, device):
        model = GPT2(layers=layers, width=width, heads=heads, vocab=vocab, seq=seq, dropout=dropout, attention=attention, tie=tie)
        return Workload(model, compute_token_loss, (torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))))

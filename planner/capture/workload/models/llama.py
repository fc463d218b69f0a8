"""Llama (Touvron et al. 2023): pre-norm decoder with RMSNorm, rotary positions, SwiGLU, grouped queries."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.workload.models import Workload
from planner.capture.workload.models.common import compute_token_loss, create_tensors_in, refuse_if


class RMSNorm(nn.Module):
    """The norm x / rms(x) * weight, with the quotient in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` over its root mean square along the last dimension, times the weight."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * (wide * scale).to(x.dtype)


def compute_rotary_tables(seq: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``(seq, head_width)`` of position times frequency, equal in both halves."""
    frequencies = base ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(torch.get_default_dtype()), angles.sin().to(torch.get_default_dtype())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` ``(batch, heads, seq, head_width)`` with each pair (i, i + head_width / 2) rotated by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head_width = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the positions of `x` ``(batch, seq, width)``."""
        batch, seq, width = x.shape
        q = self.q(x).view(batch, seq, self.heads, -1).transpose(1, 2)
        k = self.k(x).view(batch, seq, self.kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(batch, seq, self.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return joined


class LlamaBlock(nn.Module):
    """Attention and a gated feed-forward net, each on a residual branch after an RMSNorm."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = RMSNorm(width), RMSNorm(width)
        self.attention = LlamaAttention(width, heads, kv_heads)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x` ``(batch, seq, width)`` with both branches added."""
        x = x + self.attention(self.norm_attention(x), cos, sin)
        normed = self.norm_feed(x)
        fed: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class Llama(nn.Module):
    """A language model from tokens ``(batch, seq)`` to logits ``(batch, seq, vocab)``."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int, seq: int, rope_base: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        cos, sin = compute_rotary_tables(seq, width // heads, rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of `tokens`."""
        x: Tensor = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(
    *,
    batch: int = 1,
    seq: int = 4096,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    hidden: int = 11008,
    vocab: int = 32000,
    rope_base: float = 10000.0,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> Workload:
    """Build Llama, 7B by default; `kv_heads` None means as many as `heads`.

    Raises:
        UsageError: `width` is no multiple of 2 * `heads`, or `heads` no multiple of `kv_heads`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    refuse_if(width % (2 * heads), f"option width of llama is {width}: it must be a multiple of 2 * heads = {2 * heads}")
    refuse_if(heads % kv_heads, f"option kv_heads of llama is {kv_heads}: it must divide heads={heads}")
    with create_tensors_in(dtype, device):
        model = Llama(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            vocab=vocab,
            seq=seq,
            rope_base=rope_base,
        )
        return Workload(model, compute_token_loss, (torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq))))

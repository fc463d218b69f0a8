"""Handwritten models of sequences."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.models.parts import FunctionModule, classification, next_tokens
from planner.capture.workload.models import Workload


def transformer_classifier() -> Workload:
    """Build a vision transformer of PyTorch's own layers, in bfloat16 by autocast."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            patches = m.stem(x).flatten(2).transpose(1, 2)
            return m.head(m.encoder(patches).mean(1)).float()

    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return classification(
        FunctionModule(forward, stem=nn.Conv2d(3, 64, 4, 4), encoder=encoder, head=nn.Linear(64, 10)), torch.randn(8, 3, 32, 32)
    )


def gpt() -> Workload:
    """Build a model with attention, a mask in a buffer, dropout, and tied embedding and head."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other_norm = nn.LayerNorm(64), nn.LayerNorm(64)
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
            self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1))
            self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(64, dim=-1))
            scores = (q @ k.transpose(-1, -2) / math.sqrt(16)).masked_fill(~self.mask, -math.inf)
            attention = F.dropout(scores.softmax(-1), 0.1, self.training)
            x = x + self.out((attention @ v).transpose(1, 2).flatten(2))
            return x + self.mlp(self.other_norm(x))

    def forward(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = m.tokens(tokens) + m.places(torch.arange(tokens.shape[1]))
        for block in m.blocks:
            x = block(x)
        return m.head(m.norm(x))

    embeddings = {"tokens": nn.Embedding(97, 64), "places": nn.Embedding(64, 64)}
    blocks, norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(64)
    model = FunctionModule(forward, **embeddings, blocks=blocks, norm=norm, head=nn.Linear(64, 97, bias=False))
    model.head.weight = model.tokens.weight
    return Workload(model, next_tokens, (torch.randint(97, (8, 64)), torch.randint(97, (8, 64))))


def translator() -> Workload:
    """Build ``nn.Transformer`` with encoder, decoder, a causal mask and a padding mask."""

    def forward(m: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape, dtype=torch.float32).masked_fill(source == 0, -1e9)
        hidden = m.transformer(m.embed(source), m.embed(target), tgt_mask=causal, src_key_padding_mask=padding)
        return m.head(hidden)

    transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    model = FunctionModule(forward, transformer=transformer, embed=nn.Embedding(50, 64), head=nn.Linear(64, 50))
    return Workload(model, next_tokens, tuple(torch.randint(50, (8, 32)) for _ in range(3)))


def lstm_tagger(rows: int = 16) -> Workload:
    """Build a model with PyTorch's bidirectional LSTM, followed by a GRU, for batches of `rows` sequences."""

    def forward(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = m.lstm(m.embed(tokens))
        hidden, _ = m.gru(hidden)
        return m.head(hidden)

    lstm = nn.LSTM(32, 48, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
    gru = nn.GRU(96, 48, batch_first=True)
    model = FunctionModule(forward, embed=nn.Embedding(50, 32), lstm=lstm, gru=gru, head=nn.Linear(48, 9))
    return Workload(model, next_tokens, (torch.randint(50, (rows, 24)), torch.randint(9, (rows, 24))))


def recurrent_cells() -> Workload:
    """Build a model with GRU, LSTM and plain cells, called step by step."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = g = r = x.new_zeros(len(x), 48)
        for t in range(x.shape[1]):
            g = m.gru(x[:, t], g)
            h, c = m.lstm(g, (h, c))
            r = m.plain(h, r)
        return m.head(r)

    cells = {"gru": nn.GRUCell(24, 48), "lstm": nn.LSTMCell(48, 48), "plain": nn.RNNCell(48, 48)}
    return classification(FunctionModule(forward, **cells, head=nn.Linear(48, 10)), torch.randn(64, 16, 24))


def temporal_convolutions() -> Workload:
    """Build a model with dilated causal convolutions with weight norm and dropout of whole channels."""

    class Block(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.conv = parametrizations.weight_norm(nn.Conv1d(32, 32, 3, dilation=dilation))
            self.dropout, self.dilation = nn.Dropout1d(0.1), dilation

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x + self.dropout(F.relu(self.conv(F.pad(x, (2 * self.dilation, 0))))))

    layers = nn.Sequential(nn.Conv1d(8, 32, 1), *(Block(1 << i) for i in range(6)), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    return classification(nn.Sequential(layers, nn.Linear(32, 10)), torch.randn(16, 8, 128))


def state_space() -> Workload:
    """Build a linear recurrence by fast Fourier transforms, as in long convolutions."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(0.02 * torch.randn(48, 128))
            self.norm, self.gate, self.out = nn.LayerNorm(48), nn.Linear(48, 48), nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(x)
            spectrum = torch.fft.rfft(hidden.transpose(1, 2), n=256) * torch.fft.rfft(self.filter, n=256)
            y = torch.fft.irfft(spectrum, n=256)[..., :128].transpose(1, 2)
            return x + self.out(y * F.silu(self.gate(hidden)))

    def forward(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        return m.head(m.blocks(m.embed(tokens)))

    model = FunctionModule(
        forward, embed=nn.Embedding(50, 48), blocks=nn.Sequential(*(Block() for _ in range(4))), head=nn.Linear(48, 50)
    )
    return Workload(model, next_tokens, (torch.randint(50, (8, 128)), torch.randint(50, (8, 128))))

"""Models written by hand, as people write them: what each is there for, its docstring says. All small, with random weights."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from graphs.zoo import Workload

Layers = list[nn.Module]


class Call(nn.Module):
    """A module whose forward pass is a function of itself and its inputs."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def classified(model: nn.Module, x: torch.Tensor, classes: int = 10) -> Workload:
    return Workload(model, F.cross_entropy, (x, torch.randint(classes, (len(x),))))


def next_tokens(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm, nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Adds what its layers make of the input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


# Dense layers.


def mlp() -> Workload:
    """Dropout between dense layers."""
    layers: Layers = [nn.Linear(64, 256)]
    for _ in range(8):
        layers += [nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256)]
    return classified(nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(256, 64))


def mlp_in_place() -> Workload:
    """Activations that overwrite their input, and residual sums in place."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.silu(self.first(self.norm(x)), inplace=True)
            hidden = self.second(F.dropout(hidden, 0.1, self.training, inplace=True))
            hidden += x
            return hidden

    return classified(nn.Sequential(*(Block() for _ in range(6)), nn.Linear(128, 10)), torch.randn(256, 128))


def autoencoder() -> Workload:
    """Tied weights: the decoder multiplies by the encoder's, transposed."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256 >> i, 256 >> (i + 1)) for i in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            for layer in reversed(self.layers):
                x = torch.tanh(F.linear(x, layer.weight.t()))
            return x

    x = torch.randn(512, 256)
    return Workload(Tied(), F.mse_loss, (x, x.clone()))


def moe() -> Workload:
    """A dense mixture of experts: every expert sees every row, a gate weights them; a second loss balances the gate."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights = self.gate(x).softmax(-1)
            top = torch.zeros_like(weights).scatter_(-1, weights.topk(2, dim=-1).indices, 1.0) * weights
            outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
            return x + (outputs * top.unsqueeze(-2)).sum(-1), weights.mean(0).square().sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(4))
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            balance = x.new_zeros(())
            for layer in self.layers:
                x, more = layer(x)
                balance = balance + more
            return self.head(x), balance

    def loss(out: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, balance = out
        return {"loss": F.cross_entropy(logits, target) + 0.01 * balance, "balance": balance}

    return Workload(Model(), loss, (torch.randn(128, 64), torch.randint(10, (128,))))


def hypernetwork() -> Workload:
    """One network makes the weights of another."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for code in m.codes.weight:
            weights = m.hyper(code).view(64, 64)
            x = F.gelu(F.linear(F.layer_norm(x, (64,)), weights / 8)) + x
        return m.head(x)

    hyper = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64 * 64))
    model = Call(forward, codes=nn.Embedding(6, 16), hyper=hyper, head=nn.Linear(64, 10))
    return classified(model, torch.randn(512, 64))


def parametrized() -> Workload:
    """Weight norm, spectral norm (power iterations in buffers) and orthogonal weights."""
    wrap = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    layers: Layers = []
    for i in range(6):
        layers += [wrap[i % 3](nn.Linear(96, 96)), nn.LeakyReLU(0.1, inplace=True)]
    return classified(nn.Sequential(*layers, nn.Linear(96, 10)), torch.randn(512, 96))


class Squash(torch.autograd.Function):
    """With a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """X / (1 + |x|)."""
        y = x / (1 + x.abs())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """From the output alone."""
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.abs()).square()


def custom_function() -> Workload:
    """An activation with a backward pass of its own."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = x + Squash.apply(layer(x))
        return m.head(x)

    model = Call(forward, layers=nn.ModuleList(nn.Linear(128, 128) for _ in range(6)), head=nn.Linear(128, 10))
    return classified(model, torch.randn(256, 128))


def lora() -> Workload:
    """Frozen dense layers with trained updates of low rank."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(128, 128).requires_grad_(requires_grad=False)
            self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.frozen(x) + self.up(self.down(F.dropout(x, 0.05, self.training)))) + x

    return classified(nn.Sequential(*(Adapted() for _ in range(8)), nn.Linear(128, 10)), torch.randn(256, 128))


def frozen_backbone() -> Workload:
    """Convolutions that are not trained, their batch norm in eval mode, below a trained head."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(conv(3, 16), conv(16, 32, 2), conv(32, 64, 2)).requires_grad_(requires_grad=False)
            self.head = nn.Sequential(conv(64, 64), conv(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
            self.backbone.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x))

    return classified(Tuned(), torch.randn(16, 3, 32, 32))


def physics_informed() -> Workload:
    """A loss on derivatives with respect to the inputs, by autograd inside of the step."""
    layers: Layers = [nn.Linear(2, 64)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(64, 64)]
    model = Call(lambda m, x: m.net(x), net=nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 1)))

    def loss(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    def residual(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        u = m.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du[:, 0] + u[:, 0] * du[:, 1]

    model.function = residual
    return Workload(model, loss, (torch.rand(256, 2), torch.zeros(())))


def siamese() -> Workload:
    """One encoder, called on two views; their similarities are contrasted."""
    layers = (conv(3, 16), conv(16, 32, 2), conv(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32))

    def forward(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one, other = F.normalize(m.encoder(a), dim=-1), F.normalize(m.encoder(b), dim=-1)
        logits = one @ other.t() / 0.1
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    images = (torch.randn(16, 3, 24, 24), torch.randn(16, 3, 24, 24))
    return Workload(Call(forward, encoder=nn.Sequential(*layers)), None, images)


def recommender() -> Workload:
    """DLRM: bags of embeddings, dense features, and the products of all pairs."""

    def forward(m: Any, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        rows = [m.bottom(dense), *(bag(sparse[:, i]) for i, bag in enumerate(m.bags))]
        stacked = torch.stack(rows, dim=1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.triu_indices(len(rows), len(rows), 1)
        return m.top(torch.cat((rows[0], pairs[:, i, j]), dim=1)).squeeze(1)

    bags = nn.ModuleList(nn.EmbeddingBag(100, 32, mode="sum") for _ in range(6))
    bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
    top = nn.Sequential(nn.Linear(32 + 21, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))
    batch = (torch.randn(512, 13), torch.randint(100, (512, 6, 4)), torch.rand(512).round())
    return Workload(Call(forward, bags=bags, bottom=bottom, top=top), F.binary_cross_entropy_with_logits, batch)


def graph_network() -> Workload:
    """Messages along edges, summed by index_add, and means by scatter."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(128, 64), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, target = edges
            messages = F.relu(self.message(torch.cat((x[source], x[target]), dim=1)))
            total = torch.zeros_like(x).index_add_(0, target, messages)
            degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target))).clamp_(min=1)
            return x + F.relu(self.update(torch.cat((x, total / degree[:, None]), dim=1)))

    def forward(m: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x, edges)
        return m.head(x)

    model = Call(forward, layers=nn.ModuleList(Layer() for _ in range(4)), head=nn.Linear(64, 10))
    batch = (torch.randn(256, 64), torch.randint(256, (2, 1024)), torch.randint(10, (256,)))
    return Workload(model, F.cross_entropy, batch)


# Images.


def residual_cnn() -> Workload:
    """Batch norm and ReLU in place, residual sums."""
    blocks: Layers = [conv(3, 16)]
    for _ in range(6):
        blocks.append(Residual(conv(16, 16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return classified(nn.Sequential(*blocks, *head), torch.randn(16, 3, 32, 32))


def unet() -> Workload:
    """Interpolation to the size of what is concatenated, bilinear."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList((conv(3, 16), conv(16, 32), conv(32, 64)))
            self.up = nn.ModuleList((conv(96, 32), conv(48, 16)))
            self.head = nn.Conv2d(16, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for i, layer in enumerate(self.down):
                x = layer(F.max_pool2d(x, 2) if i else x)
                kept.append(x)
            for layer, skip in zip(self.up, reversed(kept[:-1]), strict=True):
                x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
                x = layer(torch.cat((x, skip), dim=1))
            return self.head(x)

    return Workload(UNet(), F.cross_entropy, (torch.randn(4, 3, 48, 48), torch.randint(5, (4, 48, 48))))


def feature_pyramid() -> Workload:
    """Maps of several sizes, interpolated and summed; one loss for each."""

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
    model = Call(forward, stages=stages, sides=sides, head=nn.Conv2d(32, 5, 3, padding=1))
    return Workload(model, loss, (torch.randn(4, 3, 64, 64), torch.randint(5, (4, 64, 64))))


def generator() -> Workload:
    """A GAN's generator, trained through a discriminator that stays as it is."""
    layers: Layers = [nn.Unflatten(1, (64, 4, 4))]
    for inputs, outputs in ((64, 48), (48, 32), (32, 16)):
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    made = nn.Sequential(nn.Linear(32, 1024), *layers, nn.Conv2d(16, 3, 3, padding=1), nn.Tanh())
    judging = (nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4, 2, 1), nn.Flatten())
    judge = nn.Sequential(*judging).requires_grad_(requires_grad=False)
    model = Call(lambda m, z: F.softplus(-m.judge(m.made(z))).mean(), made=made, judge=judge)
    return Workload(model, None, (torch.randn(16, 32),))


def variational() -> Workload:
    """A VAE: noise is drawn inside of the step; two losses."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = m.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        error = F.binary_cross_entropy_with_logits(m.decoder(z), x)
        return error + 1e-3 * divergence, error.detach(), divergence.detach()

    encoder = nn.Sequential(nn.Linear(400, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 32))
    decoder = nn.Sequential(nn.Linear(16, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 400))
    return Workload(Call(forward, encoder=encoder, decoder=decoder), None, (torch.rand(256, 400),))


def convnext() -> Workload:
    """Depthwise convolutions, layer norm over channels, scaled and dropped residuals."""

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
    return classified(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(8, 3, 64, 64))


def mixer() -> Workload:
    """MLP-Mixer: dense layers over patches, then over channels."""

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
    return classified(
        Call(forward, stem=nn.Conv2d(3, 64, 4, 4), blocks=blocks, head=nn.Linear(64, 10)), torch.randn(8, 3, 32, 32)
    )


def multi_task() -> Workload:
    """Two heads on one trunk; their losses are weighted by what is trained too."""

    def forward(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = m.trunk(x)
        return {"depth": m.depth(features), "labels": m.labels(features)}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2))

        def forward(self, out: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            errors = torch.stack((F.l1_loss(out["depth"], target["depth"]), F.cross_entropy(out["labels"], target["labels"])))
            return {"loss": (self.weights.neg().exp() * errors + self.weights).sum(), "errors": errors}

    trunk = nn.Sequential(conv(3, 24), *(Residual(conv(24, 24), conv(24, 24)) for _ in range(3)))
    model = Call(forward, trunk=trunk, depth=nn.Conv2d(24, 1, 3, padding=1), labels=nn.Conv2d(24, 6, 3, padding=1))
    target = {"depth": torch.rand(4, 1, 32, 32), "labels": torch.randint(6, (4, 32, 32))}
    return Workload(model, Loss(), (torch.randn(4, 3, 32, 32), target))


# Sequences.


def transformer_classifier() -> Workload:
    """A Vision Transformer of PyTorch's own layers, in bfloat16 by autocast."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            patches = m.stem(x).flatten(2).transpose(1, 2)
            return m.head(m.encoder(patches).mean(1)).float()

    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return classified(
        Call(forward, stem=nn.Conv2d(3, 64, 4, 4), encoder=encoder, head=nn.Linear(64, 10)), torch.randn(8, 3, 32, 32)
    )


def gpt() -> Workload:
    """Attention written out with a mask that is a buffer, dropout, tied embedding and head."""

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

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(97, 64), nn.Embedding(64, 64)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(64)
            self.head = nn.Linear(64, 97, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Workload(GPT(), next_tokens, (torch.randint(97, (8, 64)), torch.randint(97, (8, 64))))


def translator() -> Workload:
    """``nn.Transformer``: encoder, decoder, a causal mask and one for padding."""

    def forward(m: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape, dtype=torch.float32).masked_fill(source == 0, -1e9)
        hidden = m.transformer(m.embed(source), m.embed(target), tgt_mask=causal, src_key_padding_mask=padding)
        return m.head(hidden)

    transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    model = Call(forward, transformer=transformer, embed=nn.Embedding(50, 64), head=nn.Linear(64, 50))
    return Workload(model, next_tokens, tuple(torch.randint(50, (8, 32)) for _ in range(3)))


def lstm_tagger() -> Workload:
    """PyTorch's LSTM, in both directions, and a GRU on top."""

    def forward(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = m.lstm(m.embed(tokens))
        hidden, _ = m.gru(hidden)
        return m.head(hidden)

    lstm = nn.LSTM(32, 48, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
    gru = nn.GRU(96, 48, batch_first=True)
    model = Call(forward, embed=nn.Embedding(50, 32), lstm=lstm, gru=gru, head=nn.Linear(48, 9))
    return Workload(model, next_tokens, (torch.randint(50, (16, 24)), torch.randint(9, (16, 24))))


def recurrent_cells() -> Workload:
    """Cells called step by step: GRU, LSTM and a plain one."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = g = r = x.new_zeros(len(x), 48)
        for t in range(x.shape[1]):
            g = m.gru(x[:, t], g)
            h, c = m.lstm(g, (h, c))
            r = m.plain(h, r)
        return m.head(r)

    cells = {"gru": nn.GRUCell(24, 48), "lstm": nn.LSTMCell(48, 48), "plain": nn.RNNCell(48, 48)}
    return classified(Call(forward, **cells, head=nn.Linear(48, 10)), torch.randn(64, 16, 24))


def temporal_convolutions() -> Workload:
    """Dilated causal convolutions with weight norm and dropout of whole channels."""

    class Block(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.conv = parametrizations.weight_norm(nn.Conv1d(32, 32, 3, dilation=dilation))
            self.dropout, self.dilation = nn.Dropout1d(0.1), dilation

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x + self.dropout(F.relu(self.conv(F.pad(x, (2 * self.dilation, 0))))))

    layers = nn.Sequential(nn.Conv1d(8, 32, 1), *(Block(1 << i) for i in range(6)), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    return classified(nn.Sequential(layers, nn.Linear(32, 10)), torch.randn(16, 8, 128))


def state_space() -> Workload:
    """A linear recurrence by fast Fourier transforms, as long convolutions do."""

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

    model = Call(forward, embed=nn.Embedding(50, 48), blocks=nn.Sequential(*(Block() for _ in range(4))), head=nn.Linear(48, 50))
    return Workload(model, next_tokens, (torch.randint(50, (8, 128)), torch.randint(50, (8, 128))))


MODELS: dict[str, Callable[[], Workload]] = {
    make.__name__: make
    for make in (
        mlp,
        mlp_in_place,
        autoencoder,
        moe,
        hypernetwork,
        parametrized,
        custom_function,
        lora,
        frozen_backbone,
        physics_informed,
        siamese,
        recommender,
        graph_network,
        residual_cnn,
        unet,
        feature_pyramid,
        generator,
        variational,
        convnext,
        mixer,
        multi_task,
        transformer_classifier,
        gpt,
        translator,
        lstm_tagger,
        recurrent_cells,
        temporal_convolutions,
        state_space,
    )
}

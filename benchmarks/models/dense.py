"""Handwritten models of dense layers, and of several kinds of inputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from benchmarks.models.parts import FunctionModule, Layers, classification, conv
from planner.capture.workload.models import Workload


def mlp() -> Workload:
    """Build a model with dropout between dense layers."""
    layers: Layers = [nn.Linear(64, 256)]
    for _ in range(8):
        layers += [nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256)]
    return classification(nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(256, 64))


def mlp_in_place() -> Workload:
    """Build a model with activations that overwrite their input, and in-place residual sums."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.silu(self.first(self.norm(x)), inplace=True)
            hidden = self.second(F.dropout(hidden, 0.1, self.training, inplace=True))
            hidden += x
            return hidden

    return classification(nn.Sequential(*(Block() for _ in range(6)), nn.Linear(128, 10)), torch.randn(256, 128))


def autoencoder() -> Workload:
    """Build a model with tied weights: the decoder multiplies by the encoder's, transposed."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(m.layers):
            x = torch.tanh(F.linear(x, layer.weight.t()))
        return x

    x = torch.randn(512, 256)
    model = FunctionModule(forward, layers=nn.ModuleList(nn.Linear(256 >> i, 256 >> (i + 1)) for i in range(4)))
    return Workload(model, F.mse_loss, (x, x.clone()))


def moe() -> Workload:
    """Build a dense mixture of experts: every expert sees every row, a gate weights them; a second loss balances the gate."""

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

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        balance = x.new_zeros(())
        for layer in m.layers:
            x, more = layer(x)
            balance = balance + more
        return m.head(x), balance

    def loss(out: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, balance = out
        return {"loss": F.cross_entropy(logits, target) + 0.01 * balance, "balance": balance}

    model = FunctionModule(forward, layers=nn.ModuleList(Experts() for _ in range(4)), head=nn.Linear(64, 10))
    return Workload(model, loss, (torch.randn(128, 64), torch.randint(10, (128,))))


def hypernetwork() -> Workload:
    """Build a network whose output is the weights of another."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for code in m.codes.weight:
            weights = m.hyper(code).view(64, 64)
            x = F.gelu(F.linear(F.layer_norm(x, (64,)), weights / 8)) + x
        return m.head(x)

    hyper = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64 * 64))
    model = FunctionModule(forward, codes=nn.Embedding(6, 16), hyper=hyper, head=nn.Linear(64, 10))
    return classification(model, torch.randn(512, 64))


def parametrized() -> Workload:
    """Build a model with weight norm, spectral norm (power iterations in buffers) and orthogonal weights."""
    wrap = (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    layers: Layers = []
    for i in range(6):
        layers += [wrap[i % 3](nn.Linear(96, 96)), nn.LeakyReLU(0.1, inplace=True)]
    return classification(nn.Sequential(*layers, nn.Linear(96, 10)), torch.randn(512, 96))


class Squash(torch.autograd.Function):
    """An activation with a custom backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return x / (1 + |x|)."""
        y = x / (1 + x.abs())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, computed from the output alone."""
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.abs()).square()


def custom_function() -> Workload:
    """Build a model with an activation with a custom backward pass."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = x + Squash.apply(layer(x))
        return m.head(x)

    model = FunctionModule(forward, layers=nn.ModuleList(nn.Linear(128, 128) for _ in range(6)), head=nn.Linear(128, 10))
    return classification(model, torch.randn(256, 128))


def lora() -> Workload:
    """Build a model with frozen dense layers and trained updates of low rank."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(128, 128).requires_grad_(requires_grad=False)
            self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.frozen(x) + self.up(self.down(F.dropout(x, 0.05, self.training)))) + x

    return classification(nn.Sequential(*(Adapted() for _ in range(8)), nn.Linear(128, 10)), torch.randn(256, 128))


def frozen_backbone() -> Workload:
    """Build a model with convolutions that are not trained, with batch norm in eval mode, below a trained head."""
    backbone = nn.Sequential(conv(3, 16), conv(16, 32, 2), conv(32, 64, 2)).requires_grad_(requires_grad=False).eval()
    head = nn.Sequential(conv(64, 64), conv(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = FunctionModule(lambda m, x: m.head(m.backbone(x)), backbone=backbone, head=head)
    return classification(model, torch.randn(16, 3, 32, 32))


def physics_informed() -> Workload:
    """Build a model with a loss on derivatives with respect to the inputs, by autograd inside the step."""
    layers: Layers = [nn.Linear(2, 64)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(64, 64)]
    model = FunctionModule(lambda m, x: m.net(x), net=nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 1)))

    def loss(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    def residual(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()  # eager PyTorch would leave a gradient in the batch, and let it require one
        u = m.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du[:, 0] + u[:, 0] * du[:, 1]

    model.function = residual
    return Workload(model, loss, (torch.rand(256, 2), torch.zeros(())))


def siamese() -> Workload:
    """Build one encoder, called on two views, with a contrastive loss on their similarities."""
    layers = (conv(3, 16), conv(16, 32, 2), conv(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32))

    def forward(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one, other = F.normalize(m.encoder(a), dim=-1), F.normalize(m.encoder(b), dim=-1)
        logits = one @ other.t() / 0.1
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    images = (torch.randn(16, 3, 24, 24), torch.randn(16, 3, 24, 24))
    return Workload(FunctionModule(forward, encoder=nn.Sequential(*layers)), None, images)


def recommender(rows: int = 512) -> Workload:
    """Build DLRM for batches of `rows`: embedding bags, dense features, and the products of all pairs."""

    def forward(m: Any, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        features = [m.bottom(dense), *(bag(sparse[:, i]) for i, bag in enumerate(m.bags))]
        stacked = torch.stack(features, dim=1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.triu_indices(len(features), len(features), 1)
        return m.top(torch.cat((features[0], pairs[:, i, j]), dim=1)).squeeze(1)

    bags = nn.ModuleList(nn.EmbeddingBag(100, 32, mode="sum") for _ in range(6))
    bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
    top = nn.Sequential(nn.Linear(32 + 21, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))
    batch = (torch.randn(rows, 13), torch.randint(100, (rows, 6, 4)), torch.rand(rows).round())
    return Workload(FunctionModule(forward, bags=bags, bottom=bottom, top=top), F.binary_cross_entropy_with_logits, batch)


def graph_network() -> Workload:
    """Build a model with messages along edges, summed by index_add and averaged by scatter."""

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

    model = FunctionModule(forward, layers=nn.ModuleList(Layer() for _ in range(4)), head=nn.Linear(64, 10))
    batch = (torch.randn(256, 64), torch.randint(256, (2, 1024)), torch.randint(10, (256,)))
    return Workload(model, F.cross_entropy, batch)

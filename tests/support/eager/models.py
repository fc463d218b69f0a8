"""Models without a static graph, each trained for a few steps by an ordinary Python loop."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.capture.workload.models import build

Step = Callable[[int], Tensor]  # trains one step, and returns the loss


class Loop:
    """A training loop: modules, with what was there before, and a step.

    Attributes:
        modules: all that is trained.
        data: tensors that are there throughout.
    """

    def __init__(self, modules: list[nn.Module], data: list[Tensor], loss: Step, *, lr: float = 0.01) -> None:
        self.modules = modules
        self.data = data
        self.loss = loss
        self.optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=lr)

    def step(self, index: int) -> list[np.ndarray]:
        """Train one step, and return copies of the loss and the gradients, which no count of tensors sees."""
        loss = self.loss(index)
        loss.backward()
        found = [value.detach().numpy().copy() for value in (loss, *self.gradients())]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all modules."""
        for module in self.modules:
            yield from module.parameters()

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients that are there."""
        return (p.grad for p in self.parameters() if p.grad is not None)

    def state(self) -> list[np.ndarray]:
        """Return copies of parameters, buffers and the optimizer's state, and the state of the random generator."""
        tensors: list[Tensor] = list(self.parameters())
        tensors += [buffer for module in self.modules for buffer in module.buffers()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [value.detach().numpy().copy() for value in (*tensors, torch.get_rng_state())]


def mlp() -> Loop:
    """A deep network with dropout."""
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in range(8)]
    model = nn.Sequential(*blocks)
    data = torch.randn(3, 256, 32)
    return Loop([model], [data], lambda i: model(data[i]).square().mean())


def tree_lstm() -> Loop:
    """A child-sum TreeLSTM on random trees."""
    cell, leaf = TreeCell(24), nn.Embedding(50, 24)
    trees = [tree(random.Random(seed), 40) for seed in range(3)]
    return Loop([cell, leaf], [], lambda i: cell.states(trees[i], leaf)[0].square().sum())


def tree(draw: random.Random, size: int) -> list:
    """Return a random tree of `size` leaves, as nested lists with words at the leaves."""
    if size == 1:
        return [draw.randrange(50)]
    left = draw.randint(1, size - 1)
    return [tree(draw, left), tree(draw, size - left)]


class TreeCell(nn.Module):
    """Recurses over the tree."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)
        self.dropout = nn.Dropout(0.1)

    def states(self, node: list, leaf: nn.Embedding) -> tuple[Tensor, Tensor]:
        """Return the hidden state and the cell of a tree, each for 16 copies of it."""
        if len(node) == 1:
            hidden = leaf(torch.full((16,), node[0]))
            return hidden, hidden.tanh()
        (h1, c1), (h2, c2) = (self.states(child, leaf) for child in node)
        i, f1, f2, o, u = self.gates(torch.cat((h1, h2), 1)).chunk(5, 1)
        cell = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return self.dropout(o.sigmoid() * cell.tanh()), cell


def unrolled_gan() -> Loop:
    """A generator trained through eight steps of its discriminator."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    discriminator = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    real = torch.randn(3, 512, 16)

    def loss(index: int) -> Tensor:
        fake = generator(torch.randn(512, 8))
        weights = dict(discriminator.named_parameters())
        for _ in range(8):
            scores = [torch.func.functional_call(discriminator, weights, (x,)) for x in (real[index], fake)]
            wrong = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
            slopes = torch.autograd.grad(wrong, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
        return F.softplus(-torch.func.functional_call(discriminator, weights, (fake,))).mean()

    return Loop([generator, discriminator], [real], loss)


def python_lstm() -> Loop:
    """An LSTM written as a Python loop, on sequences of varying lengths."""
    cell, head = nn.LSTMCell(16, 32), nn.Linear(32, 4)
    data = [torch.randn(length, 32, 16) for length in (30, 12, 21)]

    def loss(index: int) -> Tensor:
        hidden = memory = torch.zeros(32, 32)
        total = torch.zeros(())
        for x in data[index]:
            hidden, memory = cell(x, (hidden, memory))
            total = total + head(hidden).square().mean()
        return total

    return Loop([cell, head], data, loss)


def mixture_of_experts() -> Loop:
    """Layers of experts; each row goes to the expert that its data chooses."""
    layers = nn.ModuleList(Experts(32, 3) for _ in range(6))
    data = torch.randn(3, 1024, 32)

    def loss(index: int) -> Tensor:
        x = data[index]
        for layer in layers:
            x = x + layer(x)
        return x.square().mean()

    return Loop([layers], [data], loss)


class Experts(nn.Module):
    """Routes each row to one expert; an expert without rows does not run."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel() > 0:
                out[rows] = expert(x[rows])
        return out * weights[:, None]


def batch_norms() -> Loop:
    """Convolutions with batch normalization and ReLU in place, and layers that are dropped at random."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            if torch.rand(()) < 0.2:
                return x
            return x + self.inner(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *(Block() for _ in range(8)))
    data = torch.randn(3, 8, 3, 16, 16)
    return Loop([model], [data], lambda i: model(data[i]).square().mean())


def dropouts() -> Loop:
    """Random ops of several kinds, of PyTorch's generator and of one of its own."""
    own = torch.Generator().manual_seed(5)
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
    data = torch.randn(3, 128, 32)

    def loss(index: int) -> Tensor:
        x = data[index]
        for layer in model:
            x = F.alpha_dropout(F.rrelu(layer(x), training=True), 0.1)
            x = (
                F.dropout(x, 0.2)
                + 0.1 * torch.rand(x.shape, generator=own) * x
                + F.feature_alpha_dropout(x[:, :, None], 0.1)[:, :, 0]
            )
            x = x * torch.bernoulli(torch.full_like(x, 0.9))
        return x.square().mean()

    return Loop([model], [data], loss)


def gpt2() -> Loop:
    """A small GPT-2 with dropout."""
    model, loss_fn, batch = build("gpt2", layers=4, width=32, heads=2, vocab=100, batch=8, seq=64, dropout=0.1)
    return Loop([model], [t for t in batch if isinstance(t, Tensor)], lambda _: loss_fn(model(*batch[:-1]), batch[-1]))


def exchanges() -> Loop:
    """Tensors that are written in place with each other's contents: what is known of them is a reference cycle."""
    layers = nn.ModuleList(nn.Linear(32, 64) for _ in range(10))
    data = torch.randn(3, 512, 32)

    def loss(index: int) -> Tensor:
        x = data[index]
        for layer in layers:
            left, right = layer(x).clone().chunk(2, 1)
            left, right = left.clone(), right.clone()
            left += right
            right -= left
            x = (left * right).tanh()
        return x.square().mean()

    return Loop([layers], [data], loss)


def longformer() -> Loop:
    """Attention in windows, with masks that depend on the batch."""
    from transformers import LongformerConfig, LongformerForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 64}
    config = LongformerConfig(vocab_size=100, attention_window=[16] * 12, max_position_embeddings=300, **sizes)
    model = LongformerForSequenceClassification(config)
    x, y = torch.randint(2, 100, (12, 64)), torch.randint(2, (12,))
    return Loop([model], [x, y], lambda _: model(x, labels=y).loss)


def reformer() -> Loop:
    """Reversible layers, whose backward pass runs them again; attention among hashes."""
    from transformers import ReformerConfig, ReformerForMaskedLM

    config = ReformerConfig(
        vocab_size=100,
        hidden_size=32,
        attention_head_size=16,
        num_attention_heads=2,
        attn_layers=["local", "lsh"] * 3,
        axial_pos_shape=(8, 16),
        axial_pos_embds_dim=(8, 24),
        feed_forward_size=64,
        is_decoder=False,
        local_attn_chunk_length=16,
        lsh_attn_chunk_length=16,
        num_buckets=4,
        num_hashes=1,
        max_position_embeddings=128,
    )
    model = ReformerForMaskedLM(config)
    x = torch.randint(2, 100, (16, 128))
    return Loop([model], [x], lambda _: model(x, labels=x).loss)


def detr() -> Loop:
    """Detection, with a matching of boxes on the host."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        backbone=None,
        d_model=32,
        encoder_layers=10,
        decoder_layers=10,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=20,
        num_labels=4,
    )
    model = DetrForObjectDetection(config)
    x = torch.randn(24, 3, 64, 64)
    targets = [{"class_labels": torch.randint(4, (n,)), "boxes": torch.rand(n, 4) * 0.3 + 0.3} for n in (1, 2, 3, 4) * 6]
    return Loop([model], [x], lambda _: model(pixel_values=x, labels=targets).loss)


TRANSFORMERS: dict[str, Callable[[], Loop]] = {function.__name__: function for function in (longformer, reformer, detr)}

LOOPS: dict[str, Callable[[], Loop]] = {
    function.__name__: function
    for function in (
        mlp,
        tree_lstm,
        unrolled_gan,
        python_lstm,
        mixture_of_experts,
        batch_norms,
        dropouts,
        exchanges,
        gpt2,
    )
}

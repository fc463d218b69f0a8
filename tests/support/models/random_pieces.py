"""Random models that are captured as several graphs: short pieces of operations on a few tensors, between graph breaks."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SIZE = 4
Operation = Callable[[Sequence[Tensor], "Piece"], Sequence[Tensor]]

# Each takes tensors of SIZE rows and columns; results of other sizes are made square again by the reader.
ONE: dict[str, Operation] = {
    "same": lambda x, _: x,
    "add a number": lambda x, _: [x[0] + 1.0],
    "multiply": lambda x, _: [x[0] * 0.5],
    "clone": lambda x, _: [x[0].clone()],
    "detach": lambda x, _: [x[0].detach()],
    "detached beside": lambda x, _: [x[0], x[0].detach()],
    "transposed and detached": lambda x, _: [y := (x[0] * 2.0).t(), y.detach()],
    "written and detached": lambda x, _: [y := (x[0] * 2.0).t().relu_(), y.detach()],
    "tanh": lambda x, _: [x[0].tanh()],
    "view": lambda x, _: [x[0].reshape(-1)],
    "transpose": lambda x, _: [x[0].t()],
    "transposed twice": lambda x, _: [x[0].t(), x[0].t()],
    "unbind": lambda x, _: x[0].unbind(-1),
    "chunk": lambda x, _: x[0].chunk(2, -1),
    "split": lambda x, _: x[0].split([1, SIZE - 1]),
    "slices": lambda x, _: [x[0][:, :2], x[0][1:]],
    "parts of a result": lambda x, _: (x[0] * 2.0).chunk(2),
    "diagonal": lambda x, _: [x[0].diagonal()],
    "expand": lambda x, _: [x[0][:1].expand(3, SIZE)],
    "nothing": lambda x, _: [x[0][:0], x[0]],
    "sum": lambda x, _: [x[0].sum()],
    "indices": lambda x, _: [x[0].argmax(-1), x[0]],
    "sorted": lambda x, _: x[0].sort(-1),
    "mask": lambda x, _: [x[0] > 0, x[0].relu()],
    "constant": lambda x, _: [torch.ones(SIZE, SIZE), x[0]],
    "write to a copy": lambda x, _: [x[0].clone().mul_(2.0)],
    "write to a part": lambda x, _: [_write_part(x[0])],
    "linear": lambda x, piece: [piece.layer(x[0])],
    "shift": lambda x, piece: [piece.shift + 1.0, x[0]],
    "add a parameter": lambda x, piece: [x[0] + piece.shift],
    "parameter": lambda x, piece: [piece.shift, x[0]],
    "detached layer": lambda x, piece: [x[0] + piece.layer(x[0]).detach()],
    "count": lambda x, piece: [_count(x[0], piece)],
    "dropout": lambda x, _: [nn.functional.dropout(x[0], 0.5)],
    "double": lambda x, _: [x[0].double(), x[0]],
}
TWO: dict[str, Operation] = {
    "add": lambda x, _: [x[0] + x[1]],
    "multiply two": lambda x, _: [x[0] * x[1]],
    "product": lambda x, _: [x[0] @ x[1]],
    "cat": lambda x, _: [torch.cat([x[0], x[1]])],
    "stack": lambda x, _: [torch.stack([x[0], x[1]], -1)],
    "where": lambda x, _: [torch.where(x[0] > x[1], x[0], x[1])],
    "add in place": lambda x, _: [x[0].clone().add_(x[1])],
    "both": lambda x, _: [x[0], x[1]],
    "swapped": lambda x, _: [x[1], x[0]],
}
# Writes to what other operations may have saved, which eager PyTorch may refuse.
WRITES: dict[str, Operation] = {
    "write to an input": lambda x, _: [x[0].mul_(0.5)],
    "write to a view": lambda x, _: [x[0].t().add_(1.0)],
    "write without gradients": lambda x, _: [_write_silently(x[0])],
}
OPERATIONS = ONE | TWO | WRITES


def _write_part(value: Tensor) -> Tensor:
    copy = value.clone()
    copy[:, 0] = 1.0
    return copy


def _write_silently(value: Tensor) -> Tensor:
    with torch.no_grad():
        value.detach().mul_(0.5)
    return value * 1.5


def _count(value: Tensor, piece: "Piece") -> Tensor:
    piece.calls.add_(1.0)
    return value + piece.calls


@dataclass(frozen=True, slots=True)
class Call:
    """An operation on the tensors at `reads`; its results are appended if `kept`, and else replace the tensors that it read."""

    operation: str
    reads: tuple[int, ...]
    kept: bool


def square(value: Tensor) -> Tensor:
    """Return SIZE rows and columns with the elements of `value`, as a view where that is possible."""
    if value.shape == (SIZE, SIZE) and value.is_floating_point():
        return value.float()
    if value.numel() >= SIZE * SIZE:
        return value.reshape(-1)[: SIZE * SIZE].view(SIZE, SIZE).float()
    return value.float().sum() + torch.zeros(SIZE, SIZE)


class Piece(nn.Module):
    """Some operations, captured as one graph: from a list of tensors to another."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls_made = tuple(calls)
        self.layer = nn.Linear(SIZE, SIZE)
        self.shift = nn.Parameter(torch.randn(SIZE, SIZE))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        for call in self.calls_made:
            reads = [i % len(values) for i in call.reads]
            made = OPERATIONS[call.operation]([square(values[i]) for i in reads], self)
            values = [*values, *made] if call.kept else [*made, *(v for i, v in enumerate(values) if i not in reads)]
        return values


class Pieces(nn.Module):
    """A model of several pieces with graph breaks between them, which returns several tensors."""

    def __init__(self, pieces: Sequence[Sequence[Call]]) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.one, self.two, self.three = (Piece(calls) for calls in pieces)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = self.one([self.first(x), x])
        torch._dynamo.graph_break()
        values = self.two(values)
        torch._dynamo.graph_break()
        return self.three(values)


def random_pieces(seed: int) -> list[list[Call]]:
    """Return the calls of three pieces."""
    draw = random.Random(seed)
    names = sorted(ONE | TWO)

    def call() -> Call:
        name = draw.choice(names)
        return Call(name, tuple(draw.randrange(6) for _ in range(1 + (name in TWO))), draw.random() < 0.4)

    return [[call() for _ in range(draw.randint(1, 3))] for _ in range(3)]

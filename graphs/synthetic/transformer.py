"""A large training step: a decoder-only transformer of any size."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graphs.ir import Graph, Kind, Phase
from planner.graphs.synthetic.draft import Draft

_ITEM_BYTES = 4  # of a number
# Rates of the device; the time of an op is the larger of its compute and its traffic.
_FLOPS_PER_S, _BYTES_PER_S = 60e12, 1.5e12


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """The sizes of a decoder-only transformer, and its batch.

    Attributes:
        layers, width, heads: sizes of the network; the feed-forward part is 4 times as wide.
        vocabulary: rows of the embedding.
        batch, sequence: sequences in a batch, and their length.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    batch: int = 8
    sequence: int = 1024


def transformer(size: TransformerSize) -> Graph:
    """Return a training step of a decoder-only transformer with dropout; about 33 ops per layer.

    The backward pass is derived from the forward ops and the tensors that they save.
    """
    return _Transformer(size).build_graph()


class _Transformer:
    """A tape of forward ops with the tensors that their backward ops read, which is traversed in reverse."""

    def __init__(self, size: TransformerSize) -> None:
        self.size = size
        self.draft = Draft()
        self.tape: list[tuple[str, list[int], int, list[int], int, float]] = []
        self.kept: list[int] = []
        self.tokens = size.batch * size.sequence

    def build_graph(self) -> Graph:
        size = self.size
        tokens = self.draft.add_static("tokens", 8 * self.tokens, Kind.INPUT)
        row = self.tokens * size.width
        x = self.forward("embedding", [], row, needs=[], parameters=size.vocabulary * size.width, reads=[tokens])
        for layer in range(size.layers):
            x = self.block(f"block{layer}.", x)
        x = self.normalize("norm", x)
        logits = self.add_linear("head", x, size.width, size.vocabulary)
        loss, gradient = self.draft.add_op(
            "loss",
            [logits],
            [4, self.tokens * size.vocabulary * _ITEM_BYTES],
            time_s=self.compute_traffic_s(2 * self.tokens * size.vocabulary),
        )
        self.kept.append(loss)
        self.add_backward(logits, gradient)
        return self.draft.build_graph(self.kept, layers=size.layers)

    def block(self, at: str, x: int) -> int:
        size, row = self.size, self.tokens * self.size.width
        scores = size.batch * size.heads * size.sequence**2
        y = self.normalize(at + "norm1", x)
        qkv = self.add_linear(at + "qkv", y, size.width, 3 * size.width)
        s = self.forward(at + "scores", [qkv], scores, needs=[qkv], work=2 * scores * size.width // size.heads)
        p = self.forward(at + "softmax", [s], scores, needs=[-1])
        d = self.add_dropout(at + "dropout1", p, scores)
        a = self.forward(at + "attend", [d, qkv], row, needs=[d, qkv], work=2 * scores * size.width // size.heads)
        o = self.add_dropout(at + "dropout2", self.add_linear(at + "project", a, size.width, size.width), row)
        x = self.forward(at + "add1", [x, o], row, needs=[])
        y = self.normalize(at + "norm2", x)
        h = self.add_linear(at + "up", y, size.width, 4 * size.width)
        h = self.forward(at + "gelu", [h], 4 * row, needs=[h])
        h = self.add_dropout(at + "dropout3", self.add_linear(at + "down", h, 4 * size.width, size.width), row)
        return self.forward(at + "add2", [x, h], row, needs=[])

    def normalize(self, name: str, x: int) -> int:
        return self.forward(name, [x], self.tokens * self.size.width, needs=[x], parameters=2 * self.size.width)

    def add_linear(self, name: str, x: int, wide_in: int, wide_out: int) -> int:
        work = 2 * self.tokens * wide_in * wide_out
        return self.forward(name, [x], self.tokens * wide_out, needs=[x], parameters=wide_in * wide_out, work=work)

    def add_dropout(self, name: str, x: int, numbers: int) -> int:
        (state,) = self.draft.add_op(name + ".state", [], [5056], time_s=0.0, recomputable=False)
        y, mask = self.draft.add_op(
            name, [x, state], [numbers * _ITEM_BYTES, numbers], time_s=self.compute_traffic_s(2 * numbers)
        )
        self.tape.append((name, [x], y, [mask], 0, self.compute_traffic_s(2 * numbers)))
        return y

    def forward(
        self,
        name: str,
        inputs: list[int],
        numbers: int,
        *,
        needs: list[int],
        parameters: int = 0,
        work: int = 0,
        reads: Sequence[int] = (),
    ) -> int:
        """Add an op with an output of `numbers`; its backward op reads `needs` (-1: its output) and the gradient."""
        weight = [self.draft.add_static(name + ".weight", parameters * _ITEM_BYTES)] if parameters else []
        touched = numbers + sum(self.draft.tensors[t].size_bytes for t in inputs) // _ITEM_BYTES
        time_s = max(work / _FLOPS_PER_S, self.compute_traffic_s(touched))
        (y,) = self.draft.add_op(name, [*inputs, *weight, *reads], [numbers * _ITEM_BYTES], time_s=time_s)
        saved = [y if t == -1 else t for t in needs]
        self.tape.append((name, inputs, y, [*saved, *weight], parameters, time_s))
        return y

    def compute_traffic_s(self, numbers: int) -> float:
        return 3e-6 + numbers * _ITEM_BYTES / _BYTES_PER_S

    def add_backward(self, output: int, gradient: int) -> None:
        """Add for each recorded op, latest first, the sum of its output's gradients and the gradients of its inputs."""
        gradients: dict[int, list[int]] = {output: [gradient]}
        for name, inputs, y, needs, parameters, time_s in reversed(self.tape):
            parts = gradients.pop(y)
            size_bytes = self.draft.tensors[y].size_bytes
            if len(parts) > 1:
                parts = list(
                    self.draft.add_op(
                        name + ".sum",
                        parts,
                        [size_bytes],
                        time_s=self.compute_traffic_s(3 * size_bytes // _ITEM_BYTES),
                        phase=Phase.BACKWARD,
                    )
                )
            sizes = [self.draft.tensors[t].size_bytes for t in inputs]
            if not needs and not parameters:
                # An addition passes the gradient on unchanged.
                for t in inputs:
                    gradients.setdefault(t, []).append(parts[0])
                continue
            made = self.draft.add_op(
                name + ".backward",
                [*parts, *needs],
                [*sizes, *([parameters * _ITEM_BYTES] if parameters else [])],
                time_s=2 * time_s if parameters else time_s,
                phase=Phase.BACKWARD,
            )
            if parameters:
                self.kept.append(made[-1])
            for t, part in zip(inputs, made, strict=False):
                gradients.setdefault(t, []).append(part)

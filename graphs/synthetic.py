"""Graphs made from a few numbers: small ones with known optima, random ones, and large training steps.

For tests and for benchmarks of solvers: nothing here needs torch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphs.ir import Graph, Kind, Op, Phase, Tensor

MiB = 2**20


@dataclass(slots=True)
class Draft:
    """A graph in the making: ops are added in program order, tensors as their outputs."""

    ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def static(self, name: str, size_bytes: int, kind: Kind = Kind.PARAMETER) -> int:
        """Add a tensor that lives throughout; returns its id."""
        self.tensors.append(Tensor(len(self.tensors), name, size_bytes, (), kind))
        return len(self.tensors) - 1

    def op(
        self,
        name: str,
        inputs: Sequence[int],
        sizes_bytes: Sequence[int],
        *,
        time_s: float = 1.0,
        workspace_bytes: int = 0,
        phase: Phase = Phase.FORWARD,
        recomputable: bool = True,
        mutates: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Add an op with an output per size; returns their ids."""
        index = len(self.ops)
        outputs = tuple(range(len(self.tensors), len(self.tensors) + len(sizes_bytes)))
        for place, (t, size) in enumerate(zip(outputs, sizes_bytes, strict=True)):
            self.tensors.append(Tensor(t, f"{name}.{place}" if place else name, size, (index,)))
        self.ops.append(
            Op(
                id=index,
                name=name,
                target="synthetic",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=outputs,
                time_s=time_s,
                workspace_bytes=workspace_bytes,
                phase=phase,
                recomputable=recomputable,
                mutates=mutates,
            )
        )
        return outputs

    def graph(self, kept: Sequence[int] = (), **provenance: object) -> Graph:
        """The graph, with what must be in memory at the end."""
        return Graph(tuple(self.ops), tuple(self.tensors), frozenset(kept), {"made": "synthetic", **provenance})


# Small graphs with known optima.


def chain(length: int) -> Graph:
    """Each op reads the output of the one before; unit times and sizes.

    Keeping everything takes 2 bytes (input and output of an op): that is the least and the optimum.
    """
    draft = Draft()
    last: tuple[int, ...] = ()
    for i in range(length):
        last = draft.op(f"f{i}", last, [1])
    return draft.graph(length=length)


def training_chain(layers: int) -> Graph:
    """Forward f_1..f_n, backward g_n..g_1; g_i reads f_(i-1) and g_(i+1) (g_n reads f_n); unit times and sizes; n >= 3.

    Optima: 2 n seconds from n + 1 bytes on, 2 n + 1 with n bytes (f_1 is made twice), and with 3 bytes, the least,
    2 n + (n - 1)(n - 2) / 2: beside a gradient there is room for two tensors, so g_i makes f_1..f_(i-1) again.
    """
    draft = Draft()
    f: list[int] = []
    for i in range(layers):
        f += draft.op(f"f{i + 1}", f[-1:], [1])
    (g,) = draft.op(f"g{layers}", f[-2:], [1], phase=Phase.BACKWARD)
    for i in range(layers - 1, 0, -1):
        (g,) = draft.op(f"g{i}", [*f[max(0, i - 2) : i - 1], g], [1], phase=Phase.BACKWARD)
    return draft.graph(layers=layers)


def diamond() -> Graph:
    """Ops a -> b, c -> d, where d reads both; then e reads a and d. Sizes a 2, b 3, c 3, d 1, e 1; times 1, c 5.

    Optima: 9 seconds from 9 bytes on (d: a, b, c, d), 10 with 8 bytes (a is freed before d and made again for e).
    With 7, though no op takes more, none: whichever of b and c comes second has a and the other beside it.
    """
    draft = Draft()
    (a,) = draft.op("a", [], [2])
    (b,) = draft.op("b", [a], [3])
    (c,) = draft.op("c", [a], [3], time_s=5)
    (d,) = draft.op("d", [b, c], [1])
    draft.op("e", [a, d], [1])
    return draft.graph()


def two_outputs() -> Graph:
    """An op whose outputs live apart: s makes x (4) and y (1); u reads x; w (workspace 4) reads y and u's output.

    Optima: 3 seconds from 7 bytes on (w: y, u, w's output of 1 and its workspace, 1 + 1 + 1 + 4); u takes
    x, y and its own output, 6. One op = one tensor would hold x until w, 11 bytes. With 6 none.
    """
    draft = Draft()
    x, y = draft.op("s", [], [4, 1])
    (u,) = draft.op("u", [x], [1])
    draft.op("w", [y, u], [1], workspace_bytes=4)
    return draft.graph()


def kept_output() -> Graph:
    """An op with a kept and a passing output: making it again makes the kept one a second time.

    a makes x (2, passing) and y (1, kept); b (4) reads nothing; c (1) reads b; d (1) reads x and c. Times 1.
    Optima: 4 seconds from 8 bytes on (c: x, y, b, c). With 7 bytes 5: x is freed before b and made again before
    d, beside y and c: 1 + 1 + 2 + 1 = 5. With 5 none: c alone takes 5 beside y.
    """
    draft = Draft()
    x, y = draft.op("a", [], [2, 1])
    (b,) = draft.op("b", [], [4])
    (c,) = draft.op("c", [b], [1])
    draft.op("d", [x, c], [1])
    return draft.graph([y])


def skips(depth: int) -> Graph:
    """A U-Net in small: down d_1..d_n, up u_n..u_1, where u_i reads d_i and u_(i+1); sizes halve going down."""
    draft = Draft()
    down: list[int] = []
    for i in range(depth):
        down += draft.op(f"d{i + 1}", down[-1:], [2 ** (depth - i)])
    last = down[-1]
    for i in range(depth - 1, -1, -1):
        (last,) = draft.op(f"u{i + 1}", [down[i], last], [2 ** (depth - i)])
    return draft.graph(depth=depth)


# Random graphs.


def random_graph(seed: int, ops: int) -> Graph:
    """A graph of `ops` ops with small whole sizes and times, and a bit of everything.

    Several outputs per op, workspaces, kept tensors, ops that must not run again, ops that take no time,
    and now and then a static tensor that is read and then written in place.
    """
    draw = random.Random(seed)
    draft = Draft()
    state = draft.static("state", draw.randint(0, 3)) if draw.random() < 0.2 else None
    writer = draw.randrange(ops) if state is not None else -1
    made: list[int] = []
    mirrored = draw.random() < 0.7
    for i in range(ops):
        recent = made[-3:] if mirrored else made
        inputs = draw.sample(recent, min(len(recent), draw.choice((0, 1, 1, 2))))
        if mirrored and 2 * i >= ops:
            # As in a backward, what was made first is read last.
            inputs += [t for t in draft.ops[ops - 1 - i].outputs if draw.random() < 0.8] if ops - 1 - i < i else []
        if state is not None and (i == writer or draw.random() < 0.4):
            inputs.append(state)
        made += draft.op(
            f"op{i}",
            inputs,
            [draw.randint(0 if draw.random() < 0.1 else 1, 9) for _ in range(draw.choice((1, 1, 1, 2, 2, 3)))],
            time_s=float(draw.randint(0 if draw.random() < 0.1 else 1, 9)),
            workspace_bytes=draw.choice((0, 0, 0, draw.randint(1, 6))),
            recomputable=i != writer and draw.random() < 0.85,
            mutates=(state,) if state is not None and i == writer else (),
        )
    kept = [t for t in made if draw.random() < 0.12]
    return draft.graph(kept, seed=seed)


def random_training_step(seed: int, layers: int) -> Graph:
    """A random feed-forward network with residual connections and its backward, of 2 `layers` + 1 ops.

    Layer i reads layer i - 1 and at times an earlier one; its backward op reads its inputs and its gradient, and
    makes a kept parameter gradient and the gradients of its inputs.
    """
    draw = random.Random(seed)
    draft = Draft()
    inputs: list[tuple[int, ...]] = []
    outputs: list[int] = []
    sizes = [draw.randint(10, 100) * MiB for _ in range(layers)]
    times = [draw.uniform(0.5, 5.0) * 1e-3 for _ in range(layers)]
    sources: list[tuple[int, ...]] = []
    for i in range(layers):
        read = (i - 1,) if i else ()
        if i > 2 and draw.random() < 0.25:
            read = (*read, draw.randrange(max(0, i - 12), i - 1))
        sources.append(read)
        inputs.append(tuple(outputs[j] for j in read))
        outputs += draft.op(f"layer{i}", inputs[i], [sizes[i]], time_s=times[i], workspace_bytes=sizes[i] // 8)
    loss, top = draft.op("loss", outputs[-1:], [4, sizes[-1]], time_s=1e-4)
    kept = [loss]
    gradients: dict[int, list[int]] = {layers - 1: [top]}
    for i in range(layers - 1, -1, -1):
        parts = [MiB, *(sizes[j] for j in sources[i])]
        made = draft.op(
            f"layer{i}_backward",
            [*inputs[i], *gradients.pop(i)],
            parts,
            time_s=2 * times[i],
            workspace_bytes=sizes[i] // 4,
            phase=Phase.BACKWARD,
        )
        kept.append(made[0])
        for j, t in zip(sources[i], made[1:], strict=True):
            gradients.setdefault(j, []).append(t)
    return draft.graph(kept, seed=seed)


# Large training steps.


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """Numbers of a decoder-only transformer and its batch.

    Attributes:
        layers, width, heads: of the network; the feed-forward part is 4 times as wide.
        vocabulary: rows of the embedding.
        batch, sequence: sequences in a batch, and their length.
        item_bytes: bytes of a number.
        flops_per_s, bytes_per_s: of the device; an op takes the larger of its work and its traffic.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    batch: int = 8
    sequence: int = 1024
    item_bytes: int = 4
    flops_per_s: float = 60e12
    bytes_per_s: float = 1.5e12


def transformer(size: TransformerSize) -> Graph:
    """A training step of a decoder-only transformer with dropout; about 33 ops per layer.

    Forward ops are written once; their backward follows from what each says it needs.
    """
    return _Transformer(size).graph()


class _Transformer:
    """Records forward ops with what their backward reads, then walks back over them."""

    def __init__(self, size: TransformerSize) -> None:
        self.size = size
        self.draft = Draft()
        self.tape: list[tuple[str, list[int], int, list[int], int, float]] = []
        self.kept: list[int] = []
        self.tokens = size.batch * size.sequence

    def graph(self) -> Graph:
        size = self.size
        tokens = self.draft.static("tokens", 8 * self.tokens, Kind.INPUT)
        row = self.tokens * size.width
        x = self.forward("embedding", [], row, needs=[], parameters=size.vocabulary * size.width, reads=[tokens])
        for layer in range(size.layers):
            x = self.block(f"block{layer}.", x)
        x = self.normalise("norm", x)
        logits = self.linear("head", x, size.width, size.vocabulary)
        loss, gradient = self.draft.op(
            "loss",
            [logits],
            [4, self.tokens * size.vocabulary * size.item_bytes],
            time_s=self.traffic_s(2 * self.tokens * size.vocabulary),
        )
        self.kept.append(loss)
        self.backward(logits, gradient)
        return self.draft.graph(self.kept, layers=size.layers)

    def block(self, at: str, x: int) -> int:
        size, row = self.size, self.tokens * self.size.width
        scores = size.batch * size.heads * size.sequence**2
        y = self.normalise(at + "norm1", x)
        qkv = self.linear(at + "qkv", y, size.width, 3 * size.width)
        s = self.forward(at + "scores", [qkv], scores, needs=[qkv], work=2 * scores * size.width // size.heads)
        p = self.forward(at + "softmax", [s], scores, needs=[-1])
        d = self.dropout(at + "dropout1", p, scores)
        a = self.forward(at + "attend", [d, qkv], row, needs=[d, qkv], work=2 * scores * size.width // size.heads)
        o = self.dropout(at + "dropout2", self.linear(at + "project", a, size.width, size.width), row)
        x = self.forward(at + "add1", [x, o], row, needs=[])
        y = self.normalise(at + "norm2", x)
        h = self.linear(at + "up", y, size.width, 4 * size.width)
        h = self.forward(at + "gelu", [h], 4 * row, needs=[h])
        h = self.dropout(at + "dropout3", self.linear(at + "down", h, 4 * size.width, size.width), row)
        return self.forward(at + "add2", [x, h], row, needs=[])

    def normalise(self, name: str, x: int) -> int:
        return self.forward(name, [x], self.tokens * self.size.width, needs=[x], parameters=2 * self.size.width)

    def linear(self, name: str, x: int, wide_in: int, wide_out: int) -> int:
        work = 2 * self.tokens * wide_in * wide_out
        return self.forward(name, [x], self.tokens * wide_out, needs=[x], parameters=wide_in * wide_out, work=work)

    def dropout(self, name: str, x: int, numbers: int) -> int:
        (state,) = self.draft.op(name + ".state", [], [5056], time_s=0.0, recomputable=False)
        y, mask = self.draft.op(name, [x, state], [numbers * self.size.item_bytes, numbers], time_s=self.traffic_s(2 * numbers))
        self.tape.append((name, [x], y, [mask], 0, self.traffic_s(2 * numbers)))
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
        """An op with an output of `numbers`; its backward reads `needs` (-1: its output) and the gradient."""
        size = self.size
        weight = [self.draft.static(name + ".weight", parameters * size.item_bytes)] if parameters else []
        touched = numbers + sum(self.draft.tensors[t].size_bytes for t in inputs) // size.item_bytes
        time_s = max(work / size.flops_per_s, self.traffic_s(touched))
        (y,) = self.draft.op(name, [*inputs, *weight, *reads], [numbers * size.item_bytes], time_s=time_s)
        saved = [y if t == -1 else t for t in needs]
        self.tape.append((name, inputs, y, [*saved, *weight], parameters, time_s))
        return y

    def traffic_s(self, numbers: int) -> float:
        return 3e-6 + numbers * self.size.item_bytes / self.size.bytes_per_s

    def backward(self, output: int, gradient: int) -> None:
        """For each recorded op, latest first: add up the gradients of its output, then make those of its inputs."""
        gradients: dict[int, list[int]] = {output: [gradient]}
        for name, inputs, y, needs, parameters, time_s in reversed(self.tape):
            parts = gradients.pop(y)
            size_bytes = self.draft.tensors[y].size_bytes
            if len(parts) > 1:
                parts = list(
                    self.draft.op(
                        name + ".sum",
                        parts,
                        [size_bytes],
                        time_s=self.traffic_s(3 * size_bytes // self.size.item_bytes),
                        phase=Phase.BACKWARD,
                    )
                )
            sizes = [self.draft.tensors[t].size_bytes for t in inputs]
            if not needs and not parameters:
                # Addition: the gradient passes on unchanged.
                for t in inputs:
                    gradients.setdefault(t, []).append(parts[0])
                continue
            made = self.draft.op(
                name + ".backward",
                [*parts, *needs],
                [*sizes, *([parameters * self.size.item_bytes] if parameters else [])],
                time_s=2 * time_s if parameters else time_s,
                phase=Phase.BACKWARD,
            )
            if parameters:
                self.kept.append(made[-1])
            for t, part in zip(inputs, made, strict=False):
                gradients.setdefault(t, []).append(part)

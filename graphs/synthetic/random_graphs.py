"""Random graphs, reproducible by their seeds."""

import random

from graphs.ir import Graph, Phase
from graphs.synthetic.draft import Draft

MiB = 2**20


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

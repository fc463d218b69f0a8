"""Random graphs, reproducible from a seed."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from planner.graphs.ir import Graph, Op, Phase, Tensor
from planner.graphs.provenance import Provenance
from planner.graphs.synthetic.draft import Draft

MiB = 2**20


def draw_graph(seed: int, ops: int) -> Graph:
    """Return a graph of `ops` ops with small integer sizes and times and all features of plain graphs.

    It has several outputs per op, workspaces, kept tensors, ops that must not be recomputed, ops that take no time, and sometimes
    a static tensor that is read and then written in place.
    """
    draw = random.Random(seed)
    draft = Draft()
    state = draft.add_static("state", draw.randint(0, 3)) if draw.random() < 0.2 else None
    writer = draw.randrange(ops) if state is not None else -1
    made: list[int] = []
    mirrored = draw.random() < 0.7
    for i in range(ops):
        recent = made[-3:] if mirrored else made
        inputs = draw.sample(recent, min(len(recent), draw.choice((0, 1, 1, 2))))
        if mirrored and 2 * i >= ops:
            # As in a backward pass, the first tensors are read last.
            inputs += [t for t in draft.ops[ops - 1 - i].outputs if draw.random() < 0.8] if ops - 1 - i < i else []
        if state is not None and (i == writer or draw.random() < 0.4):
            inputs.append(state)
        made += draft.add_op(
            f"op{i}",
            inputs,
            [draw.randint(0 if draw.random() < 0.1 else 1, 9) for _ in range(draw.choice((1, 1, 1, 2, 2, 3)))],
            time_s=float(draw.randint(0 if draw.random() < 0.1 else 1, 9)),
            workspace_bytes=draw.choice((0, 0, 0, draw.randint(1, 6))),
            recomputable=i != writer and draw.random() < 0.85,
            mutates=(state,) if state is not None and i == writer else (),
        )
    kept = [t for t in made if draw.random() < 0.12]
    return draft.build_graph(kept, seed=seed)


def draw_training_step(seed: int, layers: int) -> Graph:
    """Return a random feed-forward network with residual connections and its backward pass, of 2 `layers` + 1 ops.

    Layer i reads layer i - 1 and sometimes an earlier one; its backward op reads its inputs and its gradient, and makes a kept
    parameter gradient and the gradients of its inputs.
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
        outputs += draft.add_op(f"layer{i}", inputs[i], [sizes[i]], time_s=times[i], workspace_bytes=sizes[i] // 8)
    loss, top = draft.add_op("loss", outputs[-1:], [4, sizes[-1]], time_s=1e-4)
    kept = [loss]
    gradients: dict[int, list[int]] = {layers - 1: [top]}
    for i in range(layers - 1, -1, -1):
        parts = [MiB, *(sizes[j] for j in sources[i])]
        made = draft.add_op(
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
    return draft.build_graph(kept, seed=seed)


def draw_overwriting(graph: Graph, draw: random.Random) -> Graph:
    """Return `graph` in which many outputs of the program may overwrite an input of their size."""
    tensors, made = list(graph.tensors), []
    owner = {pool.name: pool.owner for pool in graph.pools}
    for op in graph.program:
        own = {t for t in (*op.inputs, *op.outputs) if owner[tensors[t].pool] == op.stream}
        free = [t for t in op.inputs if t in own and not tensors[t].static and t not in graph.kept]
        pairs = []
        for o in op.outputs:
            if free and o in own and draw.random() < 0.7:
                t = free.pop(draw.randrange(len(free)))
                tensors[o] = replace(tensors[o], size_bytes=tensors[t].size_bytes)
                pairs.append((o, t))
        made.append(replace(op, overwrites=tuple(pairs)))
    return replace(graph, ops=(*made, *graph.ops[len(made) :]), tensors=tuple(tensors))


def draw_options(seed: int, ops: int, most: int = 4) -> Graph:
    """Return a ``draw_graph`` with up to `most` optional ops: variants of one op, of several, and packed tensors.

    Ops that are replaced together need not follow each other. A packed tensor is unpacked, or read by a variant of its reader.
    """
    draw = random.Random(seed)
    graph = draw_graph(draw.randint(0, 10**9), ops)
    made, tensors = list(graph.ops), list(graph.tensors)

    def add(inputs: Iterable[int], outputs: Iterable[int], time_s: float, **more: Any) -> None:
        op = Op(len(made), f"option{len(made)}", "synthetic", tuple(inputs), tuple(outputs), time_s, optional=True, **more)
        op = replace(op, workspace_bytes=draw.choice((0, 0, draw.randint(1, 6))), recomputable=draw.random() < 0.85)
        for t in op.outputs:
            tensors[t] = replace(tensors[t], producers=(*tensors[t].producers, op.id))
        made.append(op)

    def add_variant(group: list[Op], time_s: float, swapped: tuple[int, int] = (-1, -1)) -> None:
        """Add an op that replaces `group`, with its kept outputs and those that other ops read; one input may be swapped."""
        inside = {t for p in group for t in p.outputs}
        read = {t for p in graph.ops if p not in group for t in p.inputs} | graph.kept
        inputs = [swapped[1] if t == swapped[0] else t for p in group for t in p.inputs if t not in inside]
        outputs = [t for p in group for t in p.outputs if t in read or draw.random() < 0.2]
        replaces = tuple(p.id for p in group)
        mutates = tuple(sorted({t for p in group for t in p.mutates}))
        add(dict.fromkeys(inputs), dict.fromkeys(outputs), time_s, replaces=replaces, mutates=mutates)

    while len(made) < ops + most and (len(made) == ops or draw.random() < 0.75):
        first = draw.choice(graph.ops)
        what = draw.random()
        if what < 0.3:
            add_variant([first], float(draw.randint(0, 9)))
        elif what < 0.65:
            group = [first, *(p for p in graph.ops[first.id + 1 : first.id + 4] if draw.random() < 0.6)]
            add_variant(group, float(round(sum(p.time_s for p in group) * draw.uniform(0.4, 1.6))))
        elif len(made) + 2 <= ops + most:
            t = draw.choice([t for t in graph.tensors if not t.static])
            packed = Tensor(len(tensors), f"{t.name}.packed{len(tensors)}", draw.randint(0, max(0, t.size_bytes - 1)), ())
            tensors.append(packed)
            add((t.id,), (packed.id,), float(draw.randint(0, 2)))
            readers = graph.consumers[t.id]
            if readers and draw.random() < 0.4:
                reader = graph.ops[draw.choice(readers)]
                add_variant([reader], reader.time_s + draw.randint(0, 2), (t.id, packed.id))
            else:
                add((packed.id,), (t.id,), float(draw.randint(0, 2)))
    return Graph(tuple(made), tuple(tensors), graph.kept, Provenance.of({"made": "synthetic", "seed": seed}))

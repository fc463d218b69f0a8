"""Small graphs with known answers, and random ones that overwrite inputs."""

import random
from dataclasses import replace
from random import Random

from planner.graphs.ir import Graph
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph, draw_overwriting, draw_training_step


def diamond() -> Graph:
    """Return ops a -> b, c -> d, where d reads both; then e reads a and d. Sizes a 2, b 3, c 3, d 1, e 1; times 1, c 5.

    Optima: 9 seconds from 9 bytes on (d: a, b, c, d), 10 with 8 bytes (a is freed before d and recomputed for e). With 7 bytes,
    though no op needs more, there is none: the second of b and c needs a and the other one in memory.
    """
    draft = Draft()
    (a,) = draft.add_op("a", [], [2])
    (b,) = draft.add_op("b", [a], [3])
    (c,) = draft.add_op("c", [a], [3], time_s=5)
    (d,) = draft.add_op("d", [b, c], [1])
    draft.add_op("e", [a, d], [1])
    return draft.build_graph()


def three_at_once() -> Graph:
    """Return ops seed -> a -> b -> small -> c, and d, which reads a and c. Sizes 4, 3, 4, 1, 3, 1; times 1.

    Optimum: 6 seconds from 8 bytes on. With 7 there is none, though no two ops need more: a is in memory beside b and small, or
    is made again from seed beside small.
    """
    draft = Draft()
    (seed,) = draft.add_op("seed", [], [4])
    (a,) = draft.add_op("a", [seed], [3])
    (b,) = draft.add_op("b", [a], [4])
    (small,) = draft.add_op("small", [b], [1])
    (c,) = draft.add_op("c", [small], [3])
    draft.add_op("d", [a, c], [1])
    return draft.build_graph()


def two_outputs() -> Graph:
    """Return a graph with an op of two outputs: s makes x (4) and y (1); u reads x; w (workspace 4) reads y and u's output.

    Optima: 3 seconds from 7 bytes on (w: y, u, w's output of 1 and its workspace, 1 + 1 + 1 + 4); u needs x, y and its own
    output, 6. One tensor per op would keep x until w, 11 bytes. With 6 there is none.
    """
    draft = Draft()
    x, y = draft.add_op("s", [], [4, 1])
    (u,) = draft.add_op("u", [x], [1])
    draft.add_op("w", [y, u], [1], workspace_bytes=4)
    return draft.build_graph()


def kept_output() -> Graph:
    """Return a graph whose op a has a kept output and one that is not: recomputing a makes both again.

    a makes x (2, not kept) and y (1, kept); b (4) reads nothing; c (1) reads b; d (1) reads x and c. Times 1.
    Optima: 4 seconds from 8 bytes on (c: x, y, b, c). With 7 bytes 5: x is freed before b and recomputed before d, with y and c
    in memory: 1 + 1 + 2 + 1 = 5. With 5 bytes there is none: c and y need 5 + 1.
    """
    draft = Draft()
    x, y = draft.add_op("a", [], [2, 1])
    (b,) = draft.add_op("b", [], [4])
    (c,) = draft.add_op("c", [b], [1])
    draft.add_op("d", [x, c], [1])
    return draft.build_graph([y])


def random_overwriting(seed: int, ops: int) -> Graph:
    """Return a ``draw_graph`` in which many outputs may overwrite an input of their size."""
    draw = random.Random(seed)
    return replace(
        draw_overwriting(draw_graph(draw.randint(0, 10**9), ops), draw), provenance={"made": "synthetic", "seed": seed}
    )


def of_four_sizes(seed: int, ops: int) -> Graph:
    """A step whose tensors are from segments of 20 MiB and of their own, which do not serve each other's sizes."""
    plain, sizes = draw_training_step(seed, ops), Random(seed)
    tensors = tuple(replace(t, size_bytes=sizes.choice((2, 11, 24, 36)) * 2**20) for t in plain.tensors)
    without = tuple(replace(op, workspace_bytes=0) for op in plain.ops)
    return replace(plain, tensors=tensors, ops=without, provenance={"device": "h200"})

"""Small graphs whose ops may run on several devices."""

import random
from dataclasses import replace

from graphs.ir import Graph, Phase
from graphs.options.surroundings import Link, OtherDevice, Surroundings
from graphs.synthetic.draft import Draft
from planner.capture.options import with_options


def on_devices(graph: Graph, *others: OtherDevice) -> Graph:
    return with_options(graph, ("placement",), Surroundings(Link.even(1.0), others=others))


def in_two_passes(graph: Graph) -> Graph:
    """`graph` with the second half of its program in the backward pass."""
    half = len(graph.program) / 2
    late = {op.id for op in graph.ops if max((op.id, *op.replaces) if not op.optional else op.replaces, default=-1) >= half}
    return replace(graph, ops=tuple(replace(op, phase=Phase.BACKWARD) if op.id in late else op for op in graph.ops))


def random_placement(seed: int, ops: int) -> tuple[Graph, int]:
    """A random graph on two devices, or now and then three, and a budget: several outputs, workspaces, ops that run only once
    or only here, a parameter, limits of the other memory."""
    draw = random.Random(seed)
    draft = Draft()
    parameter = draft.static("parameter", draw.randint(1, 4))
    made: list[int] = []
    for i in range(ops):
        inputs = draw.sample(made, min(len(made), draw.choice((0, 1, 1, 2))))
        made += draft.op(
            f"op{i}",
            [*inputs, *([parameter] if draw.random() < 0.4 else [])],
            [draw.randint(1, 5) for _ in range(draw.choice((1, 1, 2)))],
            time_s=float(draw.randint(1, 9)),
            workspace_bytes=draw.choice((0, 0, 2)),
            recomputable=draw.random() < 0.85,
        )
    graph = draft.graph([t for t in made if draw.random() < 0.25])
    others = []
    for name in ("second", "third")[: 2 if ops == 2 and draw.random() < 0.3 else 1]:
        times = [float(draw.randint(1, 9)) if draw.random() < 0.9 else None for _ in graph.ops]
        times[0] = times[0] or 3.0
        others.append(
            OtherDevice(name, tuple(times), draw.choice((1.0, 2.0, 4.0)), draw.choice((None, None, draw.randint(6, 14))))
        )
    total = sum(t.size_bytes for t in graph.tensors)
    return on_devices(graph, *others), int(total * draw.choice((0.5, 0.7, 0.85, 1.0, 3.0)))

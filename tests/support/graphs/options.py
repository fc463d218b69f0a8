"""Small graphs that offer transfers to the host or other devices, and what holds for every answer to them."""

import random
from dataclasses import replace

from planner.capture.options import apply_options
from planner.graphs.ir import Graph, Phase
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.pools import DEVICE
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.draft import Draft
from planner.graphs.synthetic.random_graphs import draw_graph
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers.result import Result
from tests.support.graphs.event_judge import judged, runs


def on_devices(graph: Graph, *others: OtherDevice) -> Graph:
    return apply_options(graph, ("placement",), Surroundings(Link.even(1.0), others=others))


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
    parameter = draft.add_static("parameter", draw.randint(1, 4))
    made: list[int] = []
    for i in range(ops):
        inputs = draw.sample(made, min(len(made), draw.choice((0, 1, 1, 2))))
        made += draft.add_op(
            f"op{i}",
            [*inputs, *([parameter] if draw.random() < 0.4 else [])],
            [draw.randint(1, 5) for _ in range(draw.choice((1, 1, 2)))],
            time_s=float(draw.randint(1, 9)),
            workspace_bytes=draw.choice((0, 0, 2)),
            recomputable=draw.random() < 0.85,
        )
    graph = draft.build_graph([t for t in made if draw.random() < 0.25])
    others = []
    for name in ("second", "third")[: 2 if ops == 2 and draw.random() < 0.3 else 1]:
        times = [float(draw.randint(1, 9)) if draw.random() < 0.9 else None for _ in graph.ops]
        times[0] = times[0] or 3.0
        others.append(
            OtherDevice(name, tuple(times), draw.choice((1.0, 2.0, 4.0)), draw.choice((None, None, draw.randint(6, 14))))
        )
    total = sum(t.size_bytes for t in graph.tensors)
    return on_devices(graph, *others), int(total * draw.choice((0.5, 0.7, 0.85, 1.0, 3.0)))


def with_trips(graph: Graph, bytes_per_s: float = 1.0, host_bytes: int | None = None) -> Graph:
    return apply_options(graph, ("offload",), Surroundings(Link.even(bytes_per_s), host_bytes))


def random_step(seed: int, most_ops: int = 12) -> Graph:
    """A random graph of which the second half is a backward pass, with modules ``h.0`` to ``h.2`` in the first."""
    draw = random.Random(seed)
    graph = draw_graph(draw.randint(0, 10**6), draw.randint(4, most_ops))
    n = len(graph.ops)
    ops = [replace(op, phase=Phase.BACKWARD) if 2 * op.id >= n else replace(op, module=f"h.{6 * op.id // n}") for op in graph.ops]
    return replace(graph, ops=tuple(ops))


def offered(seed: int, most_ops: int = 12) -> Graph:
    """The same with transfers, now and then to a host that is a limit."""
    draw = random.Random(seed)
    return with_trips(
        random_step(seed, most_ops), draw.choice((0.5, 1.0, 2.0, 8.0)), draw.choice((None, None, draw.randint(3, 30)))
    )


def small_gpt(layers: int = 3, bytes_per_s: float = 50e9) -> Graph:
    """A transformer with module paths like those of a traced one, and transfers."""
    graph = transformer(TransformerSize(layers=layers, batch=2, sequence=256, width=256, heads=4, vocabulary=2048))
    ops = []
    for op in graph.ops:
        block, _, rest = op.name.partition(".")
        inside = block.startswith("block") and op.phase is Phase.FORWARD
        ops.append(replace(op, module=f"model.h.{block.removeprefix('block')}.{rest}") if inside else op)
    return with_trips(replace(graph, ops=tuple(ops)), bytes_per_s)


def three_layers(layers: str = "001122") -> Graph:
    """Forward f1 to f6 of a second and a byte, two in each of three layers, and f7; g7 to g1 read input, output and gradient.

    f1, f3 and f5 are matmuls.

    Args:
        layers: of f1 to f6; a space: in none.
    """
    draft = Draft()
    f: list[int] = []
    for i in range(7):
        f += draft.add_op(f"f{i + 1}", f[-1:], [1])
    gradient: tuple[int, ...] = ()
    for i in range(6, -1, -1):
        gradient = draft.add_op(f"g{i + 1}", [*f[max(0, i - 1) : i + 1], *gradient], [1], phase=Phase.BACKWARD)
    graph = draft.build_graph(gradient)
    ops = (replace(op, module=f"h.{layers[op.id]}") if op.id < 6 and layers[op.id] != " " else op for op in graph.ops)
    targets = {0: "aten.mm.default", 2: "aten.mm.default", 4: "aten.mm.default"}
    return with_trips(replace(graph, ops=tuple(replace(op, target=targets.get(op.id, op.target)) for op in ops)))


def check_by_both_judges(graph: Graph, result: Result) -> None:
    """The schedule runs by both, with the same peak and time, and is within its budget."""
    simulation = simulate(graph, result.schedule)
    assert runs(graph, result.schedule.steps)
    verdict = judged(graph, result.schedule)
    assert verdict.peaks_bytes[DEVICE] == simulation.peak_bytes == result.peak_bytes
    assert simulation.peak_bytes <= result.budget_bytes
    assert abs(max(verdict.done_s.values()) - simulation.time_s) < 1e-9 and result.time_s == simulation.time_s


def names(graph: Graph, result: Result) -> list[str]:
    """Of the ops in the order in which they are issued."""
    return [graph.ops[op].name for op in result.schedule.computed]


def two_branches(capacity_bytes: int | None = None) -> Graph:
    """Ops a and b of 4 s that read nothing, c of 1 s that reads both; on the other device each takes as long, a copy 0.5 s."""
    draft = Draft()
    (a,) = draft.add_op("a", [], [2], time_s=4.0)
    (b,) = draft.add_op("b", [], [2], time_s=4.0)
    (c,) = draft.add_op("c", [a, b], [2], time_s=1.0)
    return on_devices(draft.build_graph([c]), OtherDevice("second", (4.0, 4.0, 1.0), 4.0, capacity_bytes))

"""Random small graphs with choices, and random schedules of them."""

import random
from dataclasses import replace

from graphs.ir import Graph, Op, Tensor
from graphs.pools import COMPUTE, DEVICE, Pool
from graphs.schedule import Compute, Free, Schedule, Step
from tests.support.event_judge import live, runs

SIDE, THIRD = "side", "third"


def graph_with_choices(draw: random.Random) -> Graph:
    """Three to six ops of the program on two streams, tensors in two pools, copies to the other pool and back, variants."""
    owner = draw.choice((SIDE, SIDE, COMPUTE, THIRD))
    host = Pool("host", owner, draw.choice((None, None, draw.randint(9, 30))))
    tensors: list[Tensor] = [Tensor(0, "state", draw.randint(0, 4), (), pool=draw.choice((DEVICE, "host")))]
    ops: list[Op] = []

    def add(inputs: tuple[int, ...], outputs: tuple[int, ...], news: list[str], **more: object) -> Op:
        """An op that makes `outputs` besides a new tensor in each pool of `news`."""
        for t in outputs:
            tensors[t] = replace(tensors[t], producers=(*tensors[t].producers, len(ops)))
        made = tuple(range(len(tensors), len(tensors) + len(news)))
        for t, pool in zip(made, news, strict=True):
            tensors.append(Tensor(t, f"t{t}", draw.randint(0, 6), (len(ops),), pool=pool))
        stream = draw.choice((COMPUTE, SIDE))
        op = Op(len(ops), f"op{len(ops)}", "f", inputs, (*outputs, *made), float(draw.randint(0, 5)), stream=stream)
        owns = stream in (COMPUTE, owner)
        op = replace(op, workspace_bytes=draw.choice((0, 3)) if owns else 0, recomputable=draw.random() < 0.9, **more)  # type: ignore[arg-type]
        ops.append(op)
        return op

    count = draw.randint(3, 6)
    writer = draw.choice((-1, draw.randrange(count)))
    for i in range(count):
        inputs = tuple(draw.sample(range(1, len(tensors)), min(len(tensors) - 1, draw.choice((0, 1, 1, 2)))))
        inputs += (0,) if draw.random() < 0.3 else ()
        news = [draw.choice((DEVICE, DEVICE, "host")) for _ in range(draw.choice((1, 1, 2)))]
        add(inputs, (), news, random=draw.random() < 0.2, mutates=(0,) if i == writer else ())
    program, made = tuple(ops), range(1, len(tensors))
    for t in draw.sample(made, min(len(made), 2)):
        out = add((t,), (), [draw.choice((DEVICE, "host"))], optional=True)
        add(out.outputs, (t,), [], optional=True)
    p = draw.choice(program)
    also = program[p.id + 1 : p.id + 2] if draw.random() < 0.3 else ()
    stood_for = (p, *also)
    add(
        tuple(t for t in p.inputs if t not in p.outputs),
        tuple(t for o in stood_for for t in o.outputs if t not in p.inputs),
        [],
        optional=True,
        replaces=tuple(o.id for o in stood_for),
        random=any(o.random for o in stood_for),
        mutates=tuple({t for o in stood_for for t in o.mutates}),
    )
    kept = frozenset(t for t in made if draw.random() < 0.2)
    return Graph(tuple(ops), tuple(tensors), kept, {}, (Pool(DEVICE, COMPUTE), host))


def schedule_with_choices(draw: random.Random, graph: Graph) -> Schedule:
    """Some random steps that can be taken, then the program's ops that are missing, each with what it reads.

    Where that meets a dead end it is no schedule, which is for a judge to say.
    """
    steps: list[Step] = []

    def take(step: Step) -> bool:
        possible = runs(graph, [*steps, step], to_the_end=False)
        if possible:
            steps.append(step)
        return possible

    def make(op: Op) -> bool:
        """Execute `op`, what it reads first."""
        for t in op.inputs:
            if t not in live(graph, steps) and not any(make(graph.ops[p]) for p in graph.tensors[t].producers[:1]):
                return False
        for t in set(op.outputs) & live(graph, steps):
            if draw.random() < 0.5 or op.stream == SIDE:
                take(Free(t))
        return take(Compute(op.id))

    for op in graph.program:
        for _ in range(draw.choice((0, 1, 3))):
            there = live(graph, steps)
            if draw.random() < 0.35 and there:
                take(Free(draw.choice(sorted(there))))
            else:
                take(Compute(draw.randrange(len(graph.ops))))
        computed = {p for s in steps if isinstance(s, Compute) for p in (s.op, *graph.ops[s.op].replaces)}
        if op.id not in computed and not make(op):
            break
    for t in sorted(graph.kept - live(graph, steps)):
        make(graph.ops[graph.tensors[t].producers[0]])
    return Schedule(tuple(steps))

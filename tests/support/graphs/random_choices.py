"""Random small graphs with choices of some or all kinds, and random schedules of them."""

import random
from collections.abc import Callable
from dataclasses import replace
from random import Random

from planner.graphs.ir import Graph, Op, Tensor
from planner.graphs.options.compress import VARIANCE
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.pools import COMPUTE, DEVICE, Pool
from planner.graphs.schedule import Compute, Free, Schedule, Step
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_options, draw_overwriting
from tests.support.graphs.event_judge import live, runs

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
        op = replace(op, workspace_bytes=draw.choice((0, 3)) if owns else 0, recomputable=draw.random() < 0.9, **more)
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


BESIDE = ("placement", "offload")  # options that are added to what was found in a step
_DEPTH = 6  # of what is made to be read


def found_in_a_step(seed: int, ops: int = 8) -> Graph:
    """A graph with optional ops on the main device, ops that may write over inputs, and a limit of what is lossy."""
    draw = Random(seed)
    return replace(draw_overwriting(draw_options(seed, ops), draw), limits=((VARIANCE, 0.5),))


def around(graph: Graph, *names: str, host_bytes: int | None = 1000) -> Surroundings:
    """Devices that any op of the program may run on."""
    others = tuple(OtherDevice(name, tuple(op.time_s for op in graph.program), 2.0) for name in names or ("second",))
    return Surroundings(Link.even(4.0), host_bytes, others)


def any_schedule(graph: Graph, seed: int) -> Schedule:
    """A schedule of `graph` that executes all kinds of its ops: stand-ins here and elsewhere, copies, recomputations.

    What is not read any more mostly goes, and now and then what can be made again by one op that is at hand.
    """
    found = Schedule(tuple(_Walk(graph, Random(seed)).steps()))
    simulate(graph, found)
    return found


class _Walk:
    def __init__(self, graph: Graph, random: Random) -> None:
        self.graph, self.random = graph, random
        self.found: list[Step] = []
        self.there = {t.id for t in graph.tensors if t.static}
        self.computed: set[int] = set()  # ops that were executed
        self.done: set[int] = set()  # ops of the program that were executed, or stood for
        self.owner = {pool.name: pool.owner for pool in graph.pools}
        self.optional = graph.ops[len(graph.program) :]
        self.stand_ins = {op.id: [other for other in self.optional if op.id in other.replaces] for op in graph.program}
        self.readers = [[r for r in readers if not graph.ops[r].optional] for readers in graph.consumers]
        self.in_order = {op.id for op in graph.program if op.random or op.mutates}
        self.writers = {t: [op.id for op in graph.program if t in op.mutates] for op in graph.program for t in op.mutates}

    def steps(self) -> list[Step]:
        for op in self.graph.program:
            if op.id not in self.done:
                ways = [way for way in self.stand_ins[op.id] if self._may_stand(way, op.id)]
                chosen = self.random.sample(ways, min(2, len(ways))) if self.random.random() < 0.6 else []
                assert any(self._tried(self._make, way) for way in (*chosen, op)), op.name
            self._free()
            self._more()
            self._free()
        for t in sorted(self.graph.kept - self.there):
            assert self._bring(t, 0)
        return self.found

    def _may_stand(self, way: Op, now: int) -> bool:
        """Whether all that it stands for can be done at once, before what is between."""
        return all(p == now or (p not in self.in_order and self._again(p)) for p in way.replaces)

    def _again(self, op: int) -> bool:
        return op not in self.done or self.graph.ops[op].recomputable

    def _may_run(self, op: Op) -> bool:
        places = op.replaces if op.optional else (op.id,)
        twice = any(self.owner[self.graph.tensors[t].pool] != op.stream for t in op.outputs if t in self.there)
        again = all(map(self._again, places)) and (op.recomputable or op.id not in self.computed)
        allowed = not op.uses or self.graph.allows({*self.computed, op.id})
        return not twice and again and allowed and all(self._is_on_its_side(op, place) for place in places)

    def _is_on_its_side(self, op: Op, place: int) -> bool:
        """Whether it reads what is written in place before or after that, as the op of the program at `place` does."""
        writers = {w for t in (*op.inputs, *op.mutates) for w in self.writers.get(t, ())}
        return all((w in self.done) == (w < place) for w in writers.difference((place, *op.replaces)))

    def _tried(self, make: Callable[[Op], bool], op: Op) -> bool:
        """Whether it was made; all is as before where it was not."""
        before = len(self.found), set(self.there), set(self.computed), set(self.done)
        if make(op):
            return True
        count, self.there, self.computed, self.done = before
        del self.found[count:]
        return False

    def _make(self, op: Op, depth: int = 0) -> bool:
        """Execute it, what it reads first."""
        if depth > _DEPTH or not all(t in self.there or self._bring(t, depth + 1) for t in op.inputs) or not self._may_run(op):
            return False
        self.found.append(Compute(op.id))
        self.there.update(op.outputs)
        self.computed.add(op.id)
        self.done.update(op.replaces if op.optional else (op.id,))
        return True

    def _bring(self, t: int, depth: int) -> bool:
        """Have `t` in memory."""
        makers = [op for op in self._makers(t) if self._may_run(op)]
        self.random.shuffle(makers)
        return any(self._tried(lambda op: self._make(op, depth), op) for op in makers)

    def _free(self) -> None:
        for t in sorted(self.there):
            if self.graph.tensors[t].static or t in self.graph.kept:
                continue
            of_program = self.graph.tensors[t].producers[0] < len(self.graph.program)
            if self.random.random() < (0.1 if not of_program else 0.2 if self._is_wanted(t) else 0.7):
                self.there.remove(t)
                if all(self._at_hand(x) for x in range(len(self.graph.tensors)) if self._is_wanted(x)):
                    self.found.append(Free(t))
                else:
                    self.there.add(t)

    def _is_wanted(self, t: int) -> bool:
        """Whether it was made, and the program is to read it yet, or returns it."""
        made = any(p in self.done for p in self.graph.tensors[t].producers)
        return made and (t in self.graph.kept or any(op not in self.done for op in self.readers[t]))

    def _at_hand(self, t: int) -> bool:
        """Whether it is there, or one op can make it at any time; what the step returns comes with its pass."""
        makers = [op for op in self._makers(t) if op.recomputable and self.writers.keys().isdisjoint(op.inputs)]
        makers = [op for op in makers if all(self.graph.ops[p].recomputable for p in op.replaces)]
        makers = [op for op in makers if not op.uses and (op.is_transfer or t not in self.graph.kept)]
        return t in self.there or any(self.there.issuperset(op.inputs) and self._may_run(op) for op in makers)

    def _makers(self, t: int) -> list[Op]:
        """What copies or unpacks it, or computes it again."""
        makers = (self.graph.ops[p] for p in self.graph.tensors[t].producers)
        return [op for op in makers if self.done.issuperset(op.replaces if op.optional else (op.id,))]

    def _more(self) -> None:
        """Now and then what nobody asked for: a tensor is sent, fetched, packed."""
        able = [op for op in self.optional if not op.replaces and self.there.issuperset(op.inputs)]
        able = [op for op in able if self.there.isdisjoint(op.outputs)]
        streams = sorted({op.stream for op in able})
        for stream in self.random.sample(streams, min(len(streams), self.random.choice((0, 1, 2)))):
            self._tried(self._make, self.random.choice([op for op in able if op.stream == stream]))

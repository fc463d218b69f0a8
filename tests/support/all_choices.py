"""Graphs with all kinds of choices at once, and random schedules of them, judged."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from graphs.ir import Graph, Op
from graphs.options.compress import VARIANCE
from graphs.options.surroundings import Link, OtherDevice, Surroundings
from graphs.schedule import Compute, Free, Schedule, Step
from graphs.simulate import simulate
from graphs.synthetic.random_graphs import random_options, with_overwriting

BESIDE = ("placement", "offload")  # options that are added to what was found in a step
_DEPTH = 6  # of what is made to be read


def found_in_a_step(seed: int, ops: int = 8) -> Graph:
    """A graph with optional ops on the main device, ops that may write over inputs, and a limit of what is lossy."""
    draw = Random(seed)
    return replace(with_overwriting(random_options(seed, ops), draw), limits=((VARIANCE, 0.5),))


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

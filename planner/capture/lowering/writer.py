"""A schedule as Python source: the lines of the program's calls, in the order of its steps."""

from collections.abc import Container, Iterable, Sequence

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.overwriting import Overwriting, Pairs
from graphs.schedule import Compute, Free, Step
from planner.capture.lowering.program import Call, Program, variable


class Writer:
    """Writes the steps of a schedule as source lines.

    Attributes:
        live: ids of the tensors in memory after the steps written so far, in order of appearance.
        origins: for each line of the last ``write``, the position of its step among those written; None for lines of no step.
    """

    def __init__(self, graph: Graph, program: Program, *, repeated: Container[int] = ()) -> None:
        """Write for `graph`; ops in `repeated` are executed more than once."""
        self.graph = graph
        self.program = program
        self._repeated = repeated
        self.live: dict[int, None] = {}
        self.origins: list[int | None] = []
        self._done: set[int] = set()
        self._overwriting = Overwriting(graph)

    def write(self, steps: Iterable[Step]) -> list[str]:
        """The lines that do `steps`, after those written before."""
        steps = tuple(steps)
        lines: list[str] = []
        self.origins = []
        for place, step in enumerate(steps):
            lines += self._write(step, self._overwriting.follow(steps, place))
            self._note_origin(lines, place)
        return lines

    def _note_origin(self, lines: Sequence[str], place: int | None) -> None:
        """Record that those of `lines` that have no origin yet are of the step at `place`."""
        self.origins += [place] * (len(lines) - len(self.origins))

    def _write(self, step: Step, over: Pairs) -> list[str]:
        """The lines that do one step; `over` is what its op writes over."""
        lines = self._before(step)
        match step:
            case Compute(op):
                wanted = [t for t in self.graph.ops[op].outputs if t not in self.live]
                lines = [*lines, *self._compute(op, frozenset(wanted), over)]
                self._done.add(op)
                self.live.update(dict.fromkeys(wanted))
            case Free(tensor):
                lines = [*lines, f"del {variable(tensor)}"]
                del self.live[tensor]
            case _:
                raise ScheduleError(f"step {step!r} cannot be executed")
        return lines

    def _before(self, step: Step) -> list[str]:
        """The lines that come before those of `step`."""
        return []

    def _compute(self, op: int, wanted: frozenset[int], over: Pairs) -> list[str]:
        """The lines that execute `op`."""
        call = self.program.calls[op]
        if call.random_state is None:
            return call.bind(wanted, over)
        assert isinstance(call, Call)
        return [f"with {self.program.lock}:", *(f"    {line}" for line in self._draw(op, call, call.random_state, wanted))]

    def _draw(self, op: int, call: Call, state: int, wanted: frozenset[int]) -> list[str]:
        """The lines of an op that draws: each time what it drew first, whoever else draws meanwhile."""
        generator, own = self.program.generator, self.program.own_generator
        plain = call.bind(wanted)
        # The state that was saved before is that of a moment ago, and others may have drawn since.
        now = [f"{variable(state)}.copy_({generator}.get_state())"]
        if op not in self._repeated:
            return plain
        if call.redraw is not None:
            body = [f"{own}.set_state({variable(state)})", *call.bind_to(call.redraw, wanted)]
            return body if op in self._done else [*now, *body, f"{generator}.set_state({own}.get_state())"]
        if op not in self._done:
            return [*now, *plain]
        # No kernel draws from another generator: this one is left as it was found.
        return [
            f"_now = {generator}.clone_state()",
            "try:",
            *(f"    {line}" for line in (f"{generator}.set_state({variable(state)})", *plain)),
            "finally:",
            f"    {generator}.set_state(_now.get_state())",
            "    del _now",
        ]

"""Writing of the steps of a schedule into passes."""

from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType

from graphs.errors import ScheduleError
from graphs.ir import Graph
from graphs.overwriting import Overwriting, Pairs
from graphs.schedule import Compute, Free, Step
from planner.passes.builder import PassBuilder
from planner.passes.draws import draw_again, draw_first, draw_once
from planner.passes.program import Call, OpCalls, Program, Ref, Statement

CallBefore = Callable[[int], Call | None]


class PassWriter:
    """A writer of the steps of a schedule into consecutive passes.

    Attributes:
        live: ids of the tensors in memory after the steps written so far, in order of appearance.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        *,
        calls: Mapping[int, OpCalls] = MappingProxyType({}),
        repeated: Container[int] = (),
        tick: Callable[[int], object] | None = None,
        call_before: CallBefore | None = None,
    ) -> None:
        """Initialize for `graph`.

        Args:
            calls: calls of further ops than those of `program`.
            repeated: ops that are executed more than once.
            tick: called after each execution of an op, with its id.
            call_before: returns a call before a step that executes an op, by its position among all steps.
        """
        self.graph = graph
        self.program = program
        self.live: dict[int, None] = {}
        self.builder: PassBuilder
        self._calls, self._repeated, self._tick, self._call_before = calls, repeated, tick, call_before
        self._done: set[int] = set()
        self._position = 0  # of the next step
        self._overwriting = Overwriting(graph)
        self._is_after_forward = False

    def end_forward(self) -> None:
        """Switch to the backward pass."""
        self._is_after_forward = True

    def write(self, builder: PassBuilder, steps: Iterable[Step]) -> None:
        """Write `steps`, which follow those written before, into the pass of `builder`."""
        self.builder = builder
        steps = tuple(steps)
        for place, step in enumerate(steps):
            builder.step = self._position
            self._write(step, self._overwriting.follow(steps, place))
            self._position += 1
        builder.step = None

    def _write(self, step: Step, over: Pairs) -> None:
        """Write one step; `over` has the in-place writes of its op."""
        match step:
            case Compute(op):
                wanted = [t for t in self.graph.ops[op].outputs if t not in self.live]
                if self._call_before is not None and (before := self._call_before(self._position)) is not None:
                    self.builder.call(before)
                self._compute(op, frozenset(wanted), over)
                self._done.add(op)
                self.live.update(dict.fromkeys(wanted))
                if self._tick is not None:
                    self.builder.call(Call(self._tick, (op,)))
            case Free(tensor):
                # In the backward pass, an op may make less than in the forward pass (``OpCalls.after_forward``).
                if tensor in self.builder.tensors or not self._is_after_forward:
                    self.builder.free_tensor(tensor)
                del self.live[tensor]
            case _:
                raise ScheduleError(f"step {step!r} cannot be executed")

    def _compute(self, op: int, wanted: frozenset[int], over: Pairs) -> None:
        """Write an execution of `op`."""
        calls = self._calls[op] if op in self._calls else self.program.calls[op]
        if self._is_after_forward and calls.after_forward is not None:
            statements: tuple[Statement, ...] = (calls.after_forward,)
        elif calls.random_state is None:
            statements = calls.written_over(over) if over else calls.statements
        else:
            (statement,) = calls.statements
            statements = (Statement(self._draw(op, calls, calls.random_state), statement.outputs),)
        self.builder.execute(statements, wanted)

    def _draw(self, op: int, calls: OpCalls, state: int) -> Call:
        """Return the call of a random op: each execution draws the same numbers."""
        if op not in self._repeated:
            return _drawn(draw_once, (), calls.call)
        own = None if calls.redraw is None else self.program.own_generator
        draw = draw_again if op in self._done else draw_first
        return _drawn(draw, (Ref(state), self.program.generator, own), calls.redraw or calls.call)


def _drawn(draw: Callable[..., object], given: tuple[object, ...], call: Call) -> Call:
    return Call(draw, (*given, call.target, *call.args), call.kwargs)

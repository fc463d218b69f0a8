"""Writing of the steps of a schedule into passes: for each device its part of them.

The part of a device contains its ops, the frees of its memory, and its ends of transfers (``runtime.transfers``). The host
computes nothing: its memory, and its ends of transfers, belong to the part of the main device. On a single device without
transfers that part is the whole pass.

The rules must stay those of ``planner.graphs.clocks``: a wait that is missing here is memory that a transfer still reads, one too
many is time that the plan does not have. Transfers with the host may cross from the forward to the backward pass; those between
devices end with their pass, since the caller gets the loss there.
"""

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from planner.capture.program.builder import PassBuilder
from planner.capture.program.draws import draw_again, draw_first, draw_once
from planner.capture.program.program import Argument, Call, OpCalls, Program, Ref, Statement
from planner.graphs.errors import GraphError, ScheduleError
from planner.graphs.ir import Graph, Op
from planner.graphs.options.placement import is_between_devices
from planner.graphs.options.transfers import find_transfers
from planner.graphs.overwriting import Overwriting, Pairs
from planner.graphs.pools import DEVICE, HOST, Pool
from planner.graphs.schedule import Compute, Free, Step

CallBefore = Callable[[int], Call | None]


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of `function` by the transfer that a pass gives."""

    function: Any

    def __call__(self, transfer: Any, *given: Any) -> Any:
        return transfer.start(self.function, *given)


@dataclass(frozen=True, slots=True)
class _Issued:
    """A transfer that was issued.

    Attributes:
        handle: the expression of its ``Transfer``.
    """

    op: Op
    handle: Argument


class PassWriter:
    """A writer of one device's part of consecutive passes.

    The computation waits for a transfer to the device before it reads the tensor, and for all transfers of a tensor before it
    frees it. These are the waits in ``planner.graphs.clocks``.

    Attributes:
        live: ids of the tensors in memory after the steps written so far, in order of appearance.
        streams: the streams of the transfers in the pass written last, in the order of the schedule.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        pool: Pool | None = None,
        *,
        calls: Mapping[int, OpCalls] = MappingProxyType({}),
        repeated: Container[int] = (),
        tick: Callable[[int], object] | None = None,
        call_before: CallBefore | None = None,
    ) -> None:
        """Initialize for `graph`.

        Args:
            pool: the memory of the device; None for the main one.
            calls: calls of further ops than those of `program`, such as those that run on other devices than the main one.
            repeated: ops that are executed more than once.
            tick: called after each execution of an op, with its id.
            call_before: returns a call before a step that executes an op, by its position among all steps.
        """
        self.graph = graph
        self.program = program
        self.live: dict[int, None] = {}
        self.streams: list[str] = []
        self.builder: PassBuilder
        self._calls, self._repeated, self._tick, self._call_before = calls, repeated, tick, call_before
        self._done: set[int] = set()
        self._position = 0  # of the next step
        self._overwriting = Overwriting(graph)
        self._is_after_forward = False
        self._pool = graph.pools[0] if pool is None else pool
        self._here = {self._pool.name, HOST} if self._pool.name == DEVICE else {self._pool.name}
        self._carried = find_transfers(graph)
        # Transfers that were issued and not waited for yet, by the tensor that they make or read on this device.
        self._making: dict[int, _Issued] = {}
        self._reading: dict[int, list[_Issued]] = {}

    @property
    def under_way(self) -> tuple[Argument, ...]:
        """The transfers that may be under way after the steps written so far."""
        return tuple(issued.handle for issued in self._list_under_way())

    def _list_under_way(self) -> tuple[_Issued, ...]:
        return (*self._making.values(), *(issued for each in self._reading.values() for issued in each))

    def end_forward(self, handles: Iterable[fx.Node] = ()) -> None:
        """Switch to the backward pass, where the transfers under way are parameters: `handles`, in the order of `under_way`."""
        self._is_after_forward = True
        new = iter(handles)
        self._making = {t: replace(issued, handle=next(new)) for t, issued in self._making.items()}
        self._reading = {t: [replace(issued, handle=next(new)) for issued in each] for t, each in self._reading.items()}

    def write(self, builder: PassBuilder, steps: Iterable[Step]) -> None:
        """Write the part of the device in the `steps` of all devices, which follow those written before, into a pass.

        Transfers between devices end with the pass, and those to and from the host may be under way.
        """
        self.builder, self.streams = builder, []
        if self._carried:
            self._transfers = builder.add_parameter("transfers")
        steps = tuple(steps)
        for place, step in enumerate(steps):
            builder.step = self._position
            self._write(step, self._overwriting.follow(steps, place))
            self._position += 1
        builder.step = None
        ending = [issued for issued in self._list_under_way() if is_between_devices(self.graph, issued.op)]
        for t in dict.fromkeys(t for issued in ending for t in (*issued.op.inputs, *issued.op.outputs)):
            self._wait_for(t)

    def _write(self, step: Step, over: Pairs) -> None:
        """Write one step; `over` has the in-place writes of its op."""
        match step:
            case Compute(op) if op in self._carried:
                if op < len(self.program.calls):
                    self._start(self.graph.ops[op], self.program.calls[op])
                else:
                    self._transfer(self.graph.ops[op])
            case Compute(op):
                if self.graph.ops[op].stream == self._pool.owner:
                    self._execute(op, over)
            case Free(tensor):
                if self._is_here(tensor):
                    self._free(tensor)
            case _:
                raise ScheduleError(f"step {step!r} cannot be executed")

    def _execute(self, op: int, over: Pairs) -> None:
        self._wait_for_arrival(self.graph.ops[op].inputs)
        wanted = [t for t in self.graph.ops[op].outputs if t not in self.live]
        if self._call_before is not None and (before := self._call_before(self._position)) is not None:
            self.builder.call(before)
        self._compute(op, frozenset(wanted), over)
        self._done.add(op)
        self.live.update(dict.fromkeys(wanted))
        if self._tick is not None:
            self.builder.call(Call(self._tick, (op,)))

    def _free(self, tensor: int) -> None:
        self._wait_for(tensor)
        # In the backward pass, an op may make less than in the forward pass (``OpCalls.again``).
        if tensor in self.builder.tensors or not self._is_after_forward:
            self.builder.free_tensor(tensor)
        del self.live[tensor]

    def _compute(self, op: int, wanted: frozenset[int], over: Pairs) -> None:
        """Write an execution of `op`."""
        calls = self._calls[op] if op in self._calls else self.program.calls[op]
        is_again = op in self._done if self.graph.ops[op].mutates else self._is_after_forward
        if is_again and calls.again is not None:
            statements: tuple[Statement, ...] = (calls.again,)
        elif calls.random_state is None:
            statements = calls.list_written_over(over) if over else calls.statements
        else:
            (statement,) = calls.statements
            statements = (Statement(self._draw(op, calls, calls.random_state), statement.outputs),)
        self.builder.execute(statements, wanted)

    def _draw(self, op: int, calls: OpCalls, state: int) -> Call:
        """Return the call of a random op: each execution draws the same numbers."""
        if op not in self._repeated:
            return _draw_call(draw_once, (), calls.call)
        own = None if calls.redraw is None else self.program.own_generator
        # The first execution saves the state that later ones draw from.
        draw = draw_again if op in self._done else draw_first
        return _draw_call(draw, (Ref(state), self.program.generator, own), calls.redraw or calls.call)

    def _issue(self, op: Op) -> _Issued:
        self.streams.append(op.stream)
        return _Issued(op, Call(operator.getitem, (self._transfers, len(self.streams) - 1)))

    def _start(self, op: Op, calls: OpCalls) -> None:
        """Write the start of a transfer that has a call. It makes its outputs at once, and fills them later."""
        self._wait_for_arrival(op.inputs)
        issued, wanted = self._issue(op), [t for t in op.outputs if t not in self.live]
        (statement,) = calls.statements
        assert statement.value is not None
        if not hasattr(statement.value.target, "begin"):
            raise GraphError(f"op {op.name!r} is on {op.stream!r}, a stream where only copies and collectives run")
        call = Call(_Start(statement.value.target), (issued.handle, *statement.value.args))
        self.builder.execute((replace(statement, value=call),), wanted)
        self.live.update(dict.fromkeys(wanted))
        self._making.update(dict.fromkeys(wanted, issued))
        for t in op.inputs:
            if not self.graph.tensors[t].static:
                self._reading.setdefault(t, []).append(issued)

    def _finish(self, issued: _Issued) -> None:
        """Wait for a transfer that has a call, once for all that it makes and reads."""
        self._making = {t: other for t, other in self._making.items() if other is not issued}
        self._reading = {t: [other for other in each if other is not issued] for t, each in self._reading.items()}
        self.builder.call(Call("finish", (issued.handle,)))

    def _transfer(self, op: Op) -> None:
        """Write the ends of a transfer that are here."""
        (source,), (target,) = op.inputs, op.outputs
        issued = self._issue(op)
        if self._is_here(source):
            made_by = self._making.get(source)
            given = () if made_by is None else (made_by.handle,)
            self.builder.call(Call("send", (issued.handle, Ref(source), *given)))
        is_new = target not in self.live
        if self._is_here(target):
            take = Call("take", (issued.handle, self.graph.tensors[target].size_bytes))
            if is_new:
                self.builder.replace_by_call(target, take)
                self.live[target] = None
            elif self._is_computed(target):  # an existing tensor is copied again, and dropped
                self.builder.call(Call("wait_for_arrival", (issued.handle, take)))
            else:
                self.builder.call(take)
        if self._is_computed(source):
            self._reading.setdefault(source, []).append(issued)
        # Arrival is waited for where the tensor is read, not here: a transfer is worth something only while ops run beside it.
        if self._is_computed(target) and is_new:
            self._making[target] = issued

    def _wait_for_arrival(self, tensors: Iterable[int]) -> None:
        """Wait for the transfers that make `tensors`."""
        for t in tensors:
            if (issued := self._making.pop(t, None)) is None:
                continue
            if issued.op.id < len(self.program.calls):
                self._finish(issued)
            else:
                self.builder.replace_by_call(t, Call("wait_for_arrival", (issued.handle, Ref(t))))
                self._forget(issued)

    def _wait_for(self, t: int) -> None:
        self._wait_for_arrival((t,))
        for issued in self._reading.pop(t, []):
            self._finish(issued)
            self._forget(issued)

    def _forget(self, issued: _Issued) -> None:
        if isinstance(issued.handle, fx.Node):  # a parameter
            self.builder.free(issued.handle)

    def _is_here(self, t: int) -> bool:
        return self.graph.tensors[t].pool in self._here

    def _is_computed(self, t: int) -> bool:
        return self.graph.tensors[t].pool == self._pool.name


def _draw_call(draw: Callable[..., object], given: tuple[object, ...], call: Call) -> Call:
    return Call(draw, (*given, call.target, *call.args), call.kwargs)

"""Writer of one device's part of each pass, with its ends of the transfers to and from other pools.

The part of a device contains its ops, the frees of its memory, and its ends of transfers (``planner.runtime.transfers``). The
host computes nothing: its memory, and its ends of transfers, belong to the part of the main device.
"""

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import fx

from graphs.ir import Graph, Op
from graphs.options.placement import between_devices
from graphs.overwriting import Pairs
from graphs.pools import DEVICE, HOST, Pool
from graphs.schedule import Compute, Free, Step
from planner.passes.builder import PassBuilder
from planner.passes.program import Argument, Call, OpCalls, Program, Ref
from planner.passes.writer import CallBefore, PassWriter


@dataclass(frozen=True, slots=True)
class _Issued:
    """A transfer that was issued.

    Attributes:
        op: the op in the graph.
        handle: the expression of its ``Transfer``.
    """

    op: Op
    handle: Argument


class UnderWay:
    """The transfers of a device that were issued and not waited for yet.

    The computation waits for a transfer to the device before it reads the tensor, and for all transfers of a tensor before it
    frees it. These are the waits in ``graphs.clocks``.
    """

    def __init__(self) -> None:
        self._making: dict[int, _Issued] = {}
        self._reading: dict[int, list[_Issued]] = {}

    @property
    def transfers(self) -> tuple[_Issued, ...]:
        """All transfers under way."""
        return (*self._making.values(), *(issued for each in self._reading.values() for issued in each))

    def rename(self, handles: Iterable[Argument]) -> None:
        """Replace the handles of all transfers under way, in the order of `transfers`."""
        new = iter(handles)
        self._making = {t: replace(issued, handle=next(new)) for t, issued in self._making.items()}
        self._reading = {t: [replace(issued, handle=next(new)) for issued in each] for t, each in self._reading.items()}

    def add(self, issued: _Issued, *, source_here: bool, target_here: bool) -> None:
        """Record a transfer with one or two ends on the device."""
        if source_here:
            self._reading.setdefault(issued.op.inputs[0], []).append(issued)
        if target_here:
            self._making[issued.op.outputs[0]] = issued

    def making(self, t: int) -> _Issued | None:
        """Return the transfer that makes `t`, if it may be under way."""
        return self._making.get(t)

    def take_making(self, tensors: Iterable[int]) -> list[_Issued]:
        """Remove and return the transfers to wait for before `tensors` are read."""
        return [issued for t in tensors if (issued := self._making.pop(t, None)) is not None]

    def take_reading(self, t: int) -> list[_Issued]:
        """Remove and return the transfers that read `t`, to wait for before it is freed."""
        return self._reading.pop(t, [])


class PartWriter(PassWriter):
    """A writer of one device's part of consecutive passes.

    Attributes:
        streams: the streams of the transfers in the pass written last, in the order of the schedule.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        pool: Pool,
        *,
        calls: Mapping[int, OpCalls] = MappingProxyType({}),
        repeated: Container[int] = (),
        tick: Callable[[int], object] | None = None,
        call_before: CallBefore | None = None,
    ) -> None:
        """Initialize for the device with this `pool`.

        Args:
            calls: calls of ops that run on other devices than the main one.
            repeated, tick, call_before: see ``PassWriter``.
        """
        super().__init__(graph, program, calls=calls, repeated=repeated, tick=tick, call_before=call_before)
        self.streams: list[str] = []
        self._pool, self._here = pool, {pool.name, HOST} if pool.name == DEVICE else {pool.name}
        self._under_way = UnderWay()

    def write(self, builder: PassBuilder, steps: Iterable[Step]) -> None:
        """Write the part of the device in a pass; `steps` are those of all devices.

        Transfers between devices end with the pass, and those to and from the host may be under way.
        """
        self.streams = []
        if any(op.is_transfer for op in self.graph.ops):
            self._transfers = builder.parameter("transfers")
        super().write(builder, steps)
        ending = [issued for issued in self._under_way.transfers if between_devices(self.graph, issued.op)]
        for t in dict.fromkeys(t for issued in ending for t in (*issued.op.inputs, *issued.op.outputs)):
            self._wait_for(t)

    @property
    def under_way(self) -> tuple[Argument, ...]:
        """The transfers that may be under way after the steps written so far."""
        return tuple(issued.handle for issued in self._under_way.transfers)

    def take_over(self, handles: Sequence[fx.Node]) -> None:
        """Replace the transfers under way by `handles`, parameters of the next pass."""
        self._under_way.rename(handles)

    def _write(self, step: Step, over: Pairs) -> None:
        match step:
            case Free(tensor):
                if self._is_here(tensor):
                    self._wait_for(tensor)
                    super()._write(step, over)
            case Compute(op) if (transfer := self.graph.ops[op]).is_transfer:
                self._transfer(transfer)
            case Compute(op) if (computed := self.graph.ops[op]).stream == self._pool.owner:
                self._arrive(computed.inputs)
                super()._write(step, over)

    def _transfer(self, op: Op) -> None:
        """Write the ends of a transfer that are here."""
        (source,), (target,) = op.inputs, op.outputs
        issued = _Issued(op, Call(operator.getitem, (self._transfers, len(self.streams))))
        self.streams.append(op.stream)
        if self._is_here(source):
            made_by = self._under_way.making(source)
            given = () if made_by is None else (made_by.handle,)
            self.builder.call(Call("send", (issued.handle, Ref(source), *given)))
        is_new = target not in self.live
        if self._is_here(target):
            take = Call("take", (issued.handle, self.graph.tensors[target].size_bytes))
            if is_new:
                self.builder.rebind(target, take)
                self.live[target] = None
            elif self._computes(target):  # an existing tensor is copied again, and dropped
                self.builder.call(Call("arrived", (issued.handle, take)))
            else:
                self.builder.call(take)
        self._under_way.add(issued, source_here=self._computes(source), target_here=self._computes(target) and is_new)

    def _arrive(self, tensors: Iterable[int]) -> None:
        """Wait for the transfers that make `tensors`."""
        for issued in self._under_way.take_making(tensors):
            (target,) = issued.op.outputs
            self.builder.rebind(target, Call("arrived", (issued.handle, Ref(target))))
            self._forget(issued)

    def _wait_for(self, t: int) -> None:
        """Wait for all transfers of `t`."""
        self._arrive((t,))
        for issued in self._under_way.take_reading(t):
            self.builder.call(Call("finish", (issued.handle,)))
            self._forget(issued)

    def _forget(self, issued: _Issued) -> None:
        if isinstance(issued.handle, fx.Node):  # a parameter
            self.builder.free(issued.handle)

    def _is_here(self, t: int) -> bool:
        return self.graph.tensors[t].pool in self._here

    def _computes(self, t: int) -> bool:
        return self.graph.tensors[t].pool == self._pool.name

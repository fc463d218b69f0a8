"""Compilation of a schedule on several devices: for each device and each half a pass with its part of the steps.

The part of a device contains its ops, the frees of its memory, and its end of copies: the source sends a tensor (``send``); the
target allocates memory (``take``), waits for the tensor before it is read (``arrived``), and for all copies of a tensor before it
is freed (``finish``). ``planner.runtime.devices`` runs the parts concurrently. A pass ends when all its parts have: no other
device runs while the caller has the loss.

The part of the main device also contains transfers to and from the host (``planner.runtime.copying``). A tensor from the host may
be sent on while it is under way. A tensor from another device is waited for before it goes to the host, since its layout is
unknown until then.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphs.errors import GraphError
from graphs.ir import Graph, Op
from graphs.options.passes import passes_of
from graphs.options.placement import between_devices
from graphs.overwriting import Pairs
from graphs.pools import COMPUTE, DEVICE_TO_HOST, HOST, HOST_TO_DEVICE
from graphs.schedule import Compute, Free, Schedule, Step
from planner.passes.builder import Line, PassBuilder
from planner.passes.program import Call, OpCalls, Program, Ref, leaves_of, mapped, read_by
from planner.runtime.channels import Channels
from planner.runtime.code import Code, assemble, repeated
from planner.runtime.copying import CopyingWriter, UnderWay
from planner.runtime.devices import Devices, Part
from planner.runtime.step_lines import StepLines
from planner.runtime.transfers import Transfer

Halves = tuple[Sequence[Step], Sequence[Step]]


def compile_placed(
    graph: Graph, program: Program, schedule: Schedule, devices: Devices, channels: Channels | None = None
) -> Code:
    """Compile `schedule`, which must be valid on `graph` (``simulate``), a graph with placement, for `devices`.

    Args:
        channels: channels for transfers to and from the host, if there are any.

    Raises:
        GraphError: it executes an op on a device where it cannot run.
    """
    elsewhere = {pool.owner: d for d, pool in enumerate(devices.pools) if d}
    executed = (graph.ops[op] for op in sorted({*schedule.computed}))
    calls = {op.id: _moved_calls(graph, program, devices, op, elsewhere[op.stream]) for op in executed if op.stream in elsewhere}
    halves = passes_of(graph, schedule)
    many = repeated(graph, program, schedule)
    main = DeviceWriter(graph, program, 0, devices, calls, many)
    assembled = assemble(main, halves, names={"channels": channels})
    parts = [_parts(DeviceWriter(graph, program, d, devices, calls, many), halves) for d in elsewhere.values()]
    passes = [_Pass(graph, devices, steps, [part.passes[i] for part in parts]) for i, steps in enumerate(halves)]

    run_forward: Callable[..., Any] = assembled.forward  # including the copies of the pass
    run_backward: Callable[..., Any] = assembled.backward

    def forward(static: Sequence[Any]) -> tuple[Any, tuple[Any, ...], list[Any]]:
        states: list[list[Any]] = [[] for _ in parts]
        loss, extras, saved = passes[0].run(partial(run_forward, static), states)
        return loss, extras, [*saved, states]

    def backward(static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        states = saved.pop()
        gradients: tuple[Any, ...] = passes[1].run(partial(run_backward, static, saved), states)
        return gradients

    lines = dict(assembled.lines.steps)
    for part in parts:
        lines.update(part.lines)
    sources = [assembled.source, *(f"# {pool.name}\n{part.source}" for pool, part in zip(devices.pools[1:], parts, strict=True))]
    located = StepLines(assembled.lines.schedule, lines)
    return replace(assembled, forward=forward, backward=backward, source="\n\n".join(sources), lines=located)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy within a pass.

    Attributes:
        number: its position among the copies of the pass.
        target: the tensor that it makes.
    """

    number: int
    target: int


class DeviceWriter(CopyingWriter):
    """A writer of one device's part of each pass."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        device: int,
        devices: Devices,
        calls: Mapping[int, OpCalls],
        repeated: set[int],
    ) -> None:
        """Initialize for the device at index `device`; `calls` are of ops on other devices. See ``CopyingWriter``."""
        super().__init__(graph, program, repeated=repeated)
        pool = devices.pools[device]
        self._pools = {pool.name} if device else {pool.name, HOST}
        self._streams = {pool.owner} if device else {COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE}
        self._calls = calls
        self._transfers: UnderWay[_Copy] = UnderWay()
        self._place = devices.places[device]

    def write(self, builder: PassBuilder, steps: Iterable[Step]) -> None:
        """Write the part of the device in a pass; `steps` are those of all devices."""
        self.builder = builder
        self._copies = builder.parameter("copies")
        numbers = 0
        steps = tuple(steps)
        for place, step in enumerate(steps):
            builder.step = self._position
            over = self._overwriting.follow(steps, place)
            if isinstance(step, Free):
                if self._is_here(step.tensor):
                    self._finish(self._transfers.before_freeing(step.tensor))
                    self._write(step, over)
            elif between_devices(self.graph, op := self.graph.ops[step.op]):
                self._copy(op, numbers)
                numbers += 1
            elif op.stream in self._streams:
                self._arrive(op.inputs)
                self._write(step, over)
            self._position += 1
        builder.step = None
        self._arrive(self.live)
        self._finish(self._transfers.copies)
        self._transfers = UnderWay()

    def _compute(self, op: int, wanted: frozenset[int], over: Pairs) -> None:
        if op in self._calls:
            self.builder.execute(self._calls[op].statements, wanted)
        else:
            super()._compute(op, wanted, over)

    def _copy(self, op: Op, number: int) -> None:
        (source,), (target,) = op.inputs, op.outputs
        if self._is_here(source):
            making = [self._numbered(copy) for copy in self._transfers.making(source)]
            self._transfers.out(source, _Copy(number, target))
            given = (self._numbered(_Copy(number, target)), Ref(source), *making, *self._trips.making(source))
            self.builder.call(Call("send", given))
        elif self._is_here(target):
            copy = _Copy(number, target)
            self._transfers.back(target, copy)
            self.live[target] = None
            size_bytes = self.graph.tensors[target].size_bytes
            self.builder.rebind(target, Call("take", (self._numbered(copy), size_bytes, self._place)))

    def _numbered(self, copy: _Copy) -> Call:
        return Call(operator.getitem, (self._copies, copy.number))

    def _arrive(self, tensors: Iterable[int]) -> None:
        for copy in self._transfers.before_reading(tensors):
            self.builder.rebind(copy.target, Call("arrived", (self._numbered(copy), Ref(copy.target))))

    def _finish(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            self.builder.call(Call("finish", (self._numbered(copy),)))

    def _is_here(self, t: int) -> bool:
        return self.graph.tensors[t].pool in self._pools


class _Pass:
    """One runnable pass: the parts of the other devices, and the copies of each channel."""

    def __init__(
        self, graph: Graph, devices: Devices, steps: Sequence[Step], parts: Sequence[Callable[[list[Any], Any], None]]
    ) -> None:
        self._devices = devices
        self._parts = dict(zip((pool.owner for pool in devices.pools[1:]), parts, strict=True))
        self._channels: dict[str, list[int]] = {}
        executed = [graph.ops[step.op] for step in steps if isinstance(step, Compute)]
        copies = [op for op in executed if between_devices(graph, op)]
        for number, op in enumerate(copies):
            self._channels.setdefault(op.stream, []).append(number)
        self._count = len(copies)

    def run(self, main: Callable[[Sequence[Transfer]], Any], states: Sequence[list[Any]]) -> Any:
        """Return the result of `main`; `states` are the values that the other devices hold between passes."""
        wanted: dict[str, Part] = {s: partial(part, state) for (s, part), state in zip(self._parts.items(), states, strict=True)}
        return self._devices.run(main, wanted, self._channels, self._count)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The passes of one device, called with its state and the copies; their source and its lines."""

    passes: tuple[Callable[[list[Any], Any], None], ...]
    source: str
    lines: dict[Line, int]


def _parts(writer: DeviceWriter, halves: Halves) -> _Parts:
    title = f"part of a schedule of {writer.graph.fingerprint}"
    first = PassBuilder(writer.program)
    state = first.parameter("state")
    writer.write(first, halves[0])
    alive = list(writer.live)
    first.call(Call("extend", (state, tuple(map(Ref, alive)))))
    forward = first.finish(None, title)
    second = PassBuilder(writer.program)
    second.tensor_list("state", alive, emptied=True)
    writer.write(second, halves[1])
    backward = second.finish(None, title)
    source = f"{forward.module.code}\n{backward.module.code}"
    return _Parts((forward.run, backward.run), source, {**forward.lines, **backward.lines})


def _moved_calls(graph: Graph, program: Program, devices: Devices, stand_in: Op, device: int) -> OpCalls:
    """Return the calls of an alternative for an op of the program, on the tensors of another device."""
    calls = moved(program, graph.ops[stand_in.replaces[0]], stand_in, devices.places[0], devices.places[device])
    if calls is None:
        raise GraphError(
            f"op {stand_in.name!r} cannot be called elsewhere than on {devices.places[0]}: it names another device, or what is "
            "only there, or is no one call of a kernel of eager PyTorch; to trace the step with other_devices= (--other-devices) "
            "finds out"
        )
    return calls


def moved(program: Program, op: Op, stand_in: Op, here: torch.device, there: torch.device) -> OpCalls | None:
    """Return the calls of `op`, of the program, to run on `there` with the tensors of `stand_in`; None if it cannot be moved.

    Device arguments are replaced. An op cannot be moved if its calls name another device than `here`, the main one; if they read
    more than the op's inputs, as batch norms with running statistics; or if they read nothing, name no device, and `there` has
    another type.
    """
    calls = program.calls[op.id]
    if calls.launches or calls.composed is not None or calls.random_state is not None or calls.is_nothing:
        return None
    named = [leaf for leaf in leaves_of(calls.call) if isinstance(leaf, torch.device)]
    if any(device.type != here.type for device in named):
        return None
    given = set(read_by(calls.call))
    if not given.issubset(op.inputs) or (not given and not named and there.type != "cpu"):
        return None
    numbers = dict(zip((*op.inputs, *op.outputs), (*stand_in.inputs, *stand_in.outputs), strict=True))
    (statement,) = calls.renumbered(numbers).statements
    placed = mapped(statement.value, lambda leaf: there if isinstance(leaf, torch.device) else leaf)
    return replace(calls, statements=(replace(statement, value=placed),), over=())

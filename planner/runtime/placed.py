"""From a schedule on several devices to code: for each device a function for each pass, with its part of the steps.

A device's part has what it computes, the frees of its memory, and its end of copies: who sends a tensor (``send``), and who takes
memory for it (``take``), waits for it before it is read (``arrived``), and for all copies of a tensor before it is freed
(``finish``). ``planner.runtime.devices`` runs the parts side by side. Both passes end when all parts have: no other device is at
work while the loss is the caller's.

The main device's part has also what goes to the host and comes back (``planner.runtime.copying``). What comes from the host may
be sent on while it is under way; what comes from another device is waited for before it goes to the host, since nobody here knows
until then how it is laid out.
"""

import re
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
from planner.capture.lowering.program import Call, Program, file_of, load, variable
from planner.runtime.channels import Channels
from planner.runtime.codegen import Code, assemble, repeated
from planner.runtime.copying import CopyingWriter, UnderWay
from planner.runtime.devices import Devices, Part
from planner.runtime.step_lines import Line, StepLines, number_lines
from planner.runtime.transfers import Transfer

Halves = tuple[Sequence[Step], Sequence[Step]]

_VARIABLE = re.compile(r"\bt(\d+)\b")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def compile_placed(
    graph: Graph, program: Program, schedule: Schedule, devices: Devices, channels: Channels | None = None
) -> Code:
    """Compile `schedule`, which must be valid on `graph` (``simulate``), a graph with placement, for `devices`.

    Args:
        channels: by which it copies to the host and back, if at all.

    Raises:
        GraphError: it executes an op where it cannot be called.
    """
    elsewhere = {pool.owner: d for d, pool in enumerate(devices.pools) if d}
    executed = (graph.ops[op] for op in sorted({*schedule.computed}))
    calls = {op.id: _moved_call(graph, program, devices, op, elsewhere[op.stream]) for op in executed if op.stream in elsewhere}
    halves = passes_of(graph, schedule)
    many = repeated(graph, program, schedule)
    main = DeviceWriter(graph, program, 0, devices, calls, many)
    names = {**program.namespace, **main.names, "channels": channels}
    assembled = assemble(graph, replace(program, namespace=names), main, halves, "copies")
    parts = [_parts(DeviceWriter(graph, program, d, devices, calls, many), halves) for d in elsewhere.values()]
    passes = [_Pass(graph, devices, steps, [part.passes[i] for part in parts]) for i, steps in enumerate(halves)]

    run_forward: Callable[..., Any] = assembled.forward  # with the copies of the pass besides
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
    """A copy of a pass.

    Attributes:
        number: position among those of the pass.
        target: tensor that it makes.
    """

    number: int
    target: int


class DeviceWriter(CopyingWriter):
    """Writes what one device does, of one pass after the other.

    Attributes:
        names: that its lines name, besides those of the program.
    """

    def __init__(
        self, graph: Graph, program: Program, device: int, devices: Devices, calls: Mapping[int, Call], repeated: set[int]
    ) -> None:
        """As ``Writer``, for the device that is `device` among those; `calls` are of ops on others than the main one."""
        super().__init__(graph, program, repeated=repeated)
        pool = devices.pools[device]
        self._pools = {pool.name} if device else {pool.name, HOST}
        self._streams = {pool.owner} if device else {COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE}
        self._calls = calls
        self._transfers: UnderWay[_Copy] = UnderWay()
        place = devices.places[device]
        self.names = {"_place": place, **(namespace_on(program, place) if device else {})}

    def write(self, steps: Iterable[Step]) -> list[str]:
        """The lines of the device in a pass, `steps` of which are of all devices."""
        lines: list[str] = []
        self.origins = []
        numbers = 0
        steps = tuple(steps)
        for place, step in enumerate(steps):
            over = self._overwriting.follow(steps, place)
            if isinstance(step, Free):
                if self._is_here(step.tensor):
                    lines += self._finish(self._transfers.before_freeing(step.tensor))
                    lines += self._write(step, over)
            elif between_devices(self.graph, op := self.graph.ops[step.op]):
                lines += self._copy(op, numbers)
                numbers += 1
            elif op.stream in self._streams:
                lines += self._arrive(op.inputs)
                lines += self._write(step, over)
            self._note_origin(lines, place)
        lines += self._arrive(self.live)
        lines += self._finish(self._transfers.copies)
        self._note_origin(lines, None)
        self._transfers = UnderWay()
        return lines

    def _compute(self, op: int, wanted: frozenset[int], over: Pairs) -> list[str]:
        return self._calls[op].bind(wanted) if op in self._calls else super()._compute(op, wanted, over)

    def _copy(self, op: Op, number: int) -> list[str]:
        (source,), (target,) = op.inputs, op.outputs
        if self._is_here(source):
            making = [f"copies[{copy.number}]" for copy in self._transfers.making(source)]
            self._transfers.out(source, _Copy(number, target))
            return [f"copies[{number}].send({', '.join((variable(source), *making, *self._trips.making(source)))})"]
        if self._is_here(target):
            self._transfers.back(target, _Copy(number, target))
            self.live[target] = None
            return [f"{variable(target)} = copies[{number}].take({self.graph.tensors[target].size_bytes}, _place)"]
        return []

    def _arrive(self, tensors: Iterable[int]) -> list[str]:
        copies = self._transfers.before_reading(tensors)
        return [f"{variable(c.target)} = copies[{c.number}].arrived({variable(c.target)})" for c in copies]

    def _finish(self, copies: Iterable[_Copy]) -> list[str]:
        return [f"copies[{copy.number}].finish()" for copy in copies]

    def _is_here(self, t: int) -> bool:
        return self.graph.tensors[t].pool in self._pools


class _Pass:
    """One pass, as it is run: with the parts of the devices but the main one, and the copies of each channel."""

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
        """What `main` returns; `states` are what each other device holds between passes."""
        wanted: dict[str, Part] = {s: partial(part, state) for (s, part), state in zip(self._parts.items(), states, strict=True)}
        return self._devices.run(main, wanted, self._channels, self._count)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What one device does: in each pass, called with what it holds between them and the copies; its source and its lines."""

    passes: tuple[Callable[[list[Any], Any], None], ...]
    source: str
    lines: dict[Line, int]


def _parts(writer: DeviceWriter, halves: Halves) -> _Parts:
    forward = writer.write(halves[0])
    forward_origins = writer.origins
    names = [variable(t) for t in writer.live]
    state = f"state.extend(({''.join(f'{name}, ' for name in names)}))"
    begin = [*([f"{', '.join(names)}, = state"] if names else []), "state.clear()"]
    backward = writer.write(halves[1])
    passes = _part("forward", [*forward, state]), _part("backward", [*begin, *backward])
    source = "\n".join(passes)
    functions = load(writer.program, source, f"part of a schedule of {writer.graph.fingerprint}", writer.names)
    file = file_of(functions["forward"])
    lines = number_lines(file, 2, forward, forward_origins, 0)
    second = passes[0].count("\n") + 3 + len(begin)
    lines |= number_lines(file, second, backward, writer.origins, len(halves[0]))
    return _Parts((functions["forward"], functions["backward"]), source, lines)


def _part(name: str, lines: Sequence[str]) -> str:
    return f"def {name}(state, copies):\n" + "".join(f"    {line}\n" for line in lines)


def _moved_call(graph: Graph, program: Program, devices: Devices, stand_in: Op, device: int) -> Call:
    """The call of an op that stands for one of the program, over the tensors of its device."""
    call = moved(program, graph.ops[stand_in.replaces[0]], stand_in, devices.places[0], devices.places[device])
    if call is None:
        raise GraphError(
            f"op {stand_in.name!r} cannot be called elsewhere than on {devices.places[0]}: it names another device, or what is "
            "only there, or is no one call of a kernel of eager PyTorch; to trace the step with other_devices= (--other-devices) "
            "finds out"
        )
    return call


def moved(program: Program, op: Op, stand_in: Op, here: torch.device, there: torch.device) -> Call | None:
    """The call of `op`, of the program, to be made `there` over the tensors that `stand_in` has in place of its own.

    Where a call names a device, names of the program's namespace that are devices stand for the other one there. None where
    that is not enough: where it names another device than the main one, `here`, or several operators that may; where it is
    called with what the op does not read, as batch norms with the statistics that they update; or where it reads nothing and
    names no device, and `there` is of another type.
    """
    call = program.calls[op.id]
    if not isinstance(call, Call) or call.composed is not None or call.random_state is not None:
        return None
    named = [value for name in _NAME.findall(call.expression) if isinstance(value := program.namespace.get(name), torch.device)]
    if any(device.type != here.type for device in named):
        return None
    given = {int(t) for t in _VARIABLE.findall(call.expression)}
    if not given.issubset(op.inputs) or (not given and not named and there.type != "cpu"):
        return None
    place = dict(zip((*op.inputs, *op.outputs), (*stand_in.inputs, *stand_in.outputs), strict=True))
    expression = _VARIABLE.sub(lambda found: variable(place[int(found[1])]), call.expression)
    return replace(call, expression=expression, outputs=tuple((place[t], path) for t, path in call.outputs), in_place=None)


def namespace_on(program: Program, place: torch.device) -> dict[str, object]:
    """What stands on `place` for those names of `program` that are devices."""
    return {name: place for name, value in program.namespace.items() if isinstance(value, torch.device)}

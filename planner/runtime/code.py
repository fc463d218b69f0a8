"""Compilation of a schedule to the two passes that run it.

The passes contain the calls and the frees of the schedule in its order. The forward pass ends with the first execution of its
last op. Tensors that are alive then and not returned, and transfers under way, are passed to the backward pass in a list. The
backward pass empties the list first, so that only its own variables keep tensors in memory.

On several devices each has its part of both passes (``planner.capture.program.writer``). ``runtime.devices`` runs the parts
concurrently. A pass ends when all its parts have: no other device runs while the caller has the loss.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import torch

from planner.capture.program.builder import Line, Pass, PassBuilder
from planner.capture.program.other_device import move_calls
from planner.capture.program.program import Call, OpCalls, Program, Ref, read_by
from planner.capture.program.writer import CallBefore, PassWriter
from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph
from planner.graphs.options.offload import remove_offload
from planner.graphs.options.passes import split_into_passes
from planner.graphs.options.selection import remove_computed
from planner.graphs.pools import COMPUTE, DEVICE
from planner.graphs.schedule import Compute, Schedule, Step
from planner.native.passes import SwitchedPass
from planner.runtime.devices import Devices
from planner.runtime.step_lines import StepLines

# forward(static) -> (loss, extras, saved); backward(static, saved) -> gradients
Returned = tuple[Any, tuple[Any, ...], list[Any]]
Forward = Callable[[Sequence[Any]], Returned]
Backward = Callable[[Sequence[Any], list[Any]], tuple[Any, ...]]


class Stage(Protocol):
    """What runs around both passes of a step: each of its methods calls `run`, the pass with the stages within."""

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass; what is appended to the list of saved tensors reaches ``run_backward`` at its end."""

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass, after removing from the end of `saved` what ``run_forward`` has appended."""


_Halves = tuple[Sequence[Step], Sequence[Step]]


@dataclass(frozen=True, slots=True)
class Code:
    """The compiled step.

    Attributes:
        forward, backward: the two passes; `static` are the tensors of ``Program.sources``, in order, and the program's numbers.
        backward_reads: for each source, True if the backward pass reads it.
        saved: ids of the tensors in the list that the forward pass saves.
        returned: positions in that list of tensors that the caller gets too, and may overwrite.
        source: source of both passes, for display.
        lines: steps of the lines of the passes.
    """

    forward: Forward
    backward: Backward
    backward_reads: tuple[bool, ...]
    saved: tuple[int, ...]
    returned: tuple[int, ...]
    source: str
    lines: StepLines

    def wrap_in_stages(self, *stages: Stage | None) -> Self:
        """Return the passes within `stages`, the outermost first; None stands for a stage that the step does not have."""
        forward, backward = self.forward, self.backward
        for stage in reversed(stages):
            if stage is not None:
                forward, backward = partial(stage.run_forward, forward), partial(stage.run_backward, backward)
        return replace(self, forward=forward, backward=backward)


def compile_schedule(
    graph: Graph,
    program: Program,
    schedule: Schedule,
    devices: Devices,
    *,
    tick: Callable[[int], None] | None = None,
    call_before: CallBefore | None = None,
    static_given_up: bool = False,
) -> Code:
    """Compile `schedule`, which must be valid on `graph` (``simulate``), for its `devices`.

    Args:
        tick: called with the id of each op after its execution.
        call_before: a call before a step, of passes on one device (``PassWriter``).
        static_given_up: the passes empty the lists of static tensors too, and free these after they are read for the last time.

    Raises:
        GraphError: it executes an op on a device where it cannot run.
    """
    calls = _build_calls_elsewhere(graph, program, schedule, devices)
    repeated = {op for op, count in Counter(schedule.computed).items() if count > 1}
    halves = split_into_passes(graph, schedule)
    write = partial(PassWriter, graph, program, calls=calls, repeated=repeated, tick=tick, call_before=call_before)
    writers = [write(pool) for pool in devices.pools]
    main = _write_main_part(writers[0], halves, static_given_up=static_given_up)
    parts = {pool.owner: _write_other_part(writer, halves) for pool, writer in zip(devices.pools[1:], writers[1:], strict=True)}
    all_parts = (main, *parts.values())
    forward, backward = _build_runners(devices, main, parts)
    return Code(
        forward,
        backward,
        backward_reads=tuple(f"t{source.tensor}" in main.passes[1].read for source in program.sources),
        saved=main.saved,
        returned=tuple(i for i, t in enumerate(main.saved) if t in graph.kept),
        source="\n\n".join([main.source, *(f"# {pool.name}\n{parts[pool.owner].source}" for pool in devices.pools[1:])]),
        lines=StepLines(Schedule((*halves[0], *halves[1])), dict(line for part in all_parts for line in part.lines)),
    )


def check_runnable(graph: Graph, program: Program) -> None:
    """Raise for a graph with options that cannot be run.

    Raises:
        GraphError: an option is neither offloading, nor placement on other devices, nor an op on the compute stream with calls in
            `program`.
    """
    remove_offload(remove_computed(graph))
    unknown = [op.name for op in graph.ops[len(program.calls) :] if op.stream == COMPUTE]
    if unknown:
        raise GraphError(
            f"the graph offers {unknown[0]!r}, but the captured step has no call for it: capture the step with the options that "
            "the graph was traced with"
        )


@dataclass(frozen=True, slots=True)
class _DevicePasses:
    """The two passes of one device, the streams of all transfers in each, and the tensors that the first saves."""

    passes: tuple[Pass, Pass]
    streams: tuple[Sequence[str], Sequence[str]]
    saved: tuple[int, ...]

    @property
    def source(self) -> str:
        """The source of both passes."""
        return "\n".join(each.module.code for each in self.passes)

    @property
    def lines(self) -> list[tuple[Line, int]]:
        """The lines of steps in both passes."""
        return [line for each in self.passes for line in each.lines.items()]


def _write_main_part(writer: PassWriter, halves: _Halves, *, static_given_up: bool) -> _DevicePasses:
    """Return the passes of the main device: they take the static tensors, and return the results of the step."""
    graph, program = writer.graph, writer.program
    title = f"schedule of {graph.fingerprint}, {sum(map(len, halves))} steps"

    first = PassBuilder(program)
    first.add_static_list(emptied=static_given_up)
    writer.write(first, halves[0])
    streams = writer.streams
    gradients = tuple(gradient for _, gradient in program.gradients)
    later = {t for step in halves[1] if isinstance(step, Compute) for t in graph.ops[step.op].inputs}
    later.update(t for gradient in gradients for t in read_by(gradient))  # zeros may be made before the backward pass
    alive = [t for t in writer.live if t not in graph.kept or t in later]
    # A saved output would keep itself alive through its own backward pass: an alias is saved, if any.
    saved = [Call(torch.ops.aten.detach.default, (Ref(t),)) if t in graph.kept else Ref(t) for t in alive]
    under_way = writer.under_way
    returned = (program.loss, tuple(program.extras), [*saved, *under_way])
    if static_given_up:
        first.free_read([source.tensor for source in program.sources], returned)
    forward = first.finish(returned, title)

    second = PassBuilder(program)
    second.add_static_list(emptied=static_given_up)
    names = [f"transfer_{i}" for i in range(len(under_way))]
    writer.end_forward(second.add_tensor_list("saved", alive, names, emptied=True))
    writer.write(second, halves[1])
    if static_given_up:
        second.free_read([source.tensor for source in program.sources], gradients)
    return _DevicePasses((forward, second.finish(gradients, title)), (streams, writer.streams), tuple(alive))


def _write_other_part(writer: PassWriter, halves: _Halves) -> _DevicePasses:
    """Return the passes of another device: they take the list of the tensors that it holds between the passes."""
    title = f"part of a schedule of {writer.graph.fingerprint}"
    first = PassBuilder(writer.program)
    state = first.add_parameter("state")
    writer.write(first, halves[0])
    streams, alive = writer.streams, tuple(writer.live)
    first.call(Call("extend", (state, tuple(map(Ref, alive)))))
    second = PassBuilder(writer.program)
    second.add_tensor_list("state", alive, emptied=True)
    writer.write(second, halves[1])
    return _DevicePasses((first.finish(None, title), second.finish(None, title)), (streams, writer.streams), alive)


def _build_runners(devices: Devices, main: _DevicePasses, others: Mapping[str, _DevicePasses]) -> tuple[Forward, Backward]:
    """Return the functions that run each pass with its transfers, on all devices."""
    run_forward, run_backward = map(SwitchedPass, main.passes)
    if not devices.channels:
        return run_forward, run_backward

    parts = {stream: tuple(map(SwitchedPass, part.passes)) for stream, part in others.items()}
    runner = _Runner(devices, (run_forward, run_backward), main.streams, parts)
    return runner.forward, runner.backward


@dataclass(frozen=True, slots=True)
class _Runner:
    """The passes of a step with transfers: of the main device, with their streams, and of others, by stream."""

    devices: Devices
    main: tuple[SwitchedPass, SwitchedPass]
    streams: tuple[Sequence[str], Sequence[str]]
    others: Mapping[str, tuple[SwitchedPass, ...]]

    def forward(self, static: Sequence[Any]) -> Returned:
        states: list[list[Any]] = [[] for _ in self.others]
        loss, extras, saved = self._run(0, states, static)
        return loss, extras, [*saved, *states]

    def backward(self, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        states = [saved.pop() for _ in self.others][::-1]
        gradients: tuple[Any, ...] = self._run(1, states, static, saved)
        return gradients

    def _run(self, half: int, states: Sequence[list[Any]], *given: Any) -> Any:
        items = zip(self.others.items(), states, strict=True)
        parts = {stream: partial(run[half], state) for (stream, run), state in items}
        return self.devices.run(partial(self.main[half], *given), parts, self.streams[half])


def _build_calls_elsewhere(graph: Graph, program: Program, schedule: Schedule, devices: Devices) -> dict[int, OpCalls]:
    """Return the calls of the executed ops that run on other devices than the main one."""
    places = {pool.owner: devices.places[pool.name] for pool in devices.pools[1:]}
    executed = (graph.ops[op] for op in sorted({*schedule.computed}))
    here, found = devices.places[DEVICE], dict[int, OpCalls]()
    for op in executed:
        if op.stream in places:
            calls = move_calls(program, graph.ops[op.replaces[0]], op, here, places[op.stream])
            if calls is None:
                raise GraphError(
                    f"op {op.name!r} cannot be called elsewhere than on {here}: it names a device, or an object that exists "
                    "only there, or is not a single call of an eager kernel; trace the step with other_devices= "
                    "(--other-devices) to find such ops"
                )
            found[op.id] = calls
    return found

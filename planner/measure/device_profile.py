"""Costs of a step's ops on other devices, and of transfers to them, measured with the runtime that plans use."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from planner.capture.frontend.preserved_state import has_same_values
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.options import list_needing
from planner.capture.program.builder import PassBuilder
from planner.capture.program.other_device import move_calls
from planner.capture.program.program import Ref
from planner.capture.rewrites.explicit_generators import preserve_generator_states
from planner.graphs.errors import CopyError, DeviceError, GraphError
from planner.graphs.options.option import Feature, Need
from planner.graphs.options.placement import find_fixed
from planner.graphs.options.surroundings import OtherDevice
from planner.measure.profile import MeasuredOp, find_distinct_ops, isolate_ops
from planner.measure.steps import wait_for_device
from planner.measure.timing import compute_typical, time_call
from planner.runtime.allocator import Mark, measure_segment_peaks, record_cpu_allocations
from planner.runtime.devices import place_of
from planner.runtime.transfers.channels import open_channel
from planner.runtime.transfers.transfers import DeviceMemory, copy_tensor
from planner.runtime.transfers.workers import ThreadedCall, Worker
from planner.settings.compatibility import check_compatible
from planner.settings.other_devices import NamedDevice, parse_device

_LARGE_BYTES, _SMALL_BYTES = 2**24, 2**12
_COPIES, _SMALL_COPIES = 5, 32
_CUDA_BLOCK_BYTES = 512


def profile_other_devices(
    capture: Capture, static: Sequence[torch.Tensor], names: Sequence[str], *, passes: int
) -> tuple[OtherDevice, ...]:
    """Return the devices called `names`, with the time and workspace of each op that can run there.

    Each distinct op is executed once, alone, on the step's own device and, with copies of the same inputs, on the other one. The
    fastest of `passes` executions counts; on CUDA the median. An op has no time if it fails, if its result has another layout or
    needs more memory than the program's, or if it must stay on the main device.

    Raises:
        GraphError: there is no such device, one is named twice, or a kernel is not eager PyTorch's.
    """
    if len(set(names)) < len(names):
        raise GraphError(f"other devices are {', '.join(names)}: name each once (threads of a CPU tell them apart: cpu:1, cpu:2)")
    if any(calls.launches for calls in capture.program.calls):
        check_compatible((*list_needing(Need.DEVICES), Feature.INDUCTOR))
    return tuple(_Profile(capture, static, parse_device(name)).measure_device(passes) for name in names)


class _Profile:
    """The profile of one device."""

    def __init__(self, capture: Capture, static: Sequence[torch.Tensor], named: NamedDevice) -> None:
        self._capture, self._static, self._named = capture, static, named
        self._here = static[0].device
        self._place = place_of(named)
        self._worker = Worker(named.name, f"ops on {named.name}", DeviceError, named.threads)
        self._block_bytes = _CUDA_BLOCK_BYTES if self._place.type == "cuda" else 1
        self._graph = capture.graph
        self._calls = self._build_functions()

    def measure_device(self, passes: int) -> OtherDevice:
        """Measure the ops and the link."""
        times: dict[int, float] = {}
        exact: list[int] = []
        able: list[tuple[MeasuredOp, tuple[int, ...]]] = []
        ops = find_distinct_ops(self._capture, self._static, self._calls)
        with isolate_ops(self._here), preserve_generator_states(self._capture.program):
            for measured, equal in ops:
                tensors = measured.build_tensors()
                inputs = [tensors[t] for t in measured.call.op.inputs]
                outputs = measured.run(*(tensors[t] for t in measured.call.reads))
                if (is_exact := self._compare(measured.call.op.id, inputs, outputs)) is None:
                    continue
                times |= dict.fromkeys(equal, self._time_s(measured.call.op.id, inputs, passes))
                exact += equal if is_exact else ()
                able.append((measured, equal))
                del tensors, inputs, outputs
            workspaces = self._measure_workspaces(able)
            rate, latency_s = self._link()
        return OtherDevice(
            name=self._named.name,
            times_s=tuple(times.get(op.id) for op in self._graph.program),
            bytes_per_s=rate,
            capacity_bytes=torch.cuda.mem_get_info(self._place)[0] if self._place.type == "cuda" else None,
            differs="" if len(exact) == len(times) else "rounding",
            exact=tuple(sorted(exact)),
            workspaces_bytes=tuple(workspaces.get(op.id, op.workspace_bytes) for op in self._graph.program),
            latency_s=latency_s,
            block_bytes=self._block_bytes,
        )

    def _build_functions(self) -> dict[int, Callable[..., tuple[Any, ...]]]:
        """Return for each op that can be called on the device a function from its inputs to its outputs."""
        program, functions = self._capture.program, dict[int, Callable[..., tuple[Any, ...]]]()
        stay = find_fixed(self._graph)
        for op in self._graph.program:
            calls = None if op.id in stay else move_calls(program, op, op, self._here, self._place)
            if calls is not None:
                builder = PassBuilder(program)
                builder.add_tensor_parameters(op.inputs)
                builder.execute(calls.statements, op.outputs)
                functions[op.id] = builder.finish(tuple(map(Ref, op.outputs)), f"op {op.name} on {self._named.name}").run
        return functions

    def _compare(self, op: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> bool | None:
        """Return True if the op has the same bits on the device; None if it cannot run there."""
        try:
            made = self._run_there(lambda: self._calls[op](*self._copy_to_device(op, inputs)))
            room = [self._round_up_bytes(self._graph.tensors[t].size_bytes) for t in self._graph.ops[op].outputs]
            if not all(self._is_like(a, b, most) for a, b, most in zip(made, outputs, room, strict=True)):
                return None
        except (RuntimeError, CopyError, ValueError, TypeError):  # the errors of kernels that are missing or refuse
            return None
        return all(a is None or b is None or has_same_values(a.to(b.device), b) for a, b in zip(made, outputs, strict=True))

    def _is_like(self, made: torch.Tensor | None, wanted: torch.Tensor | None, most_bytes: int) -> bool:
        if made is None or wanted is None:
            return made is wanted
        size_bytes = compute_allocated_bytes(made.untyped_storage().nbytes(), self._place)
        return made.device.type == self._place.type and made.stride() == wanted.stride() and size_bytes <= most_bytes

    def _time_s(self, op: int, inputs: Sequence[torch.Tensor], passes: int) -> float:
        call = self._calls[op]
        times: list[float] = [
            self._run_there(lambda: time_call(call, self._copy_to_device(op, inputs), self._place)[0]) for _ in range(passes)
        ]
        return compute_typical(times, self._place)

    def _measure_workspaces(self, ops: Sequence[tuple[MeasuredOp, tuple[int, ...]]]) -> dict[int, int]:
        """Return the workspace bytes of each op on the device, measured in the device's thread."""
        if self._place.type == "cpu":
            record_cpu_allocations(lambda: None)  # the profiler starts in this thread, or raises
        run = partial(self._run_marked, [measured for measured, _ in ops])
        rises = self._run_there(lambda: measure_segment_peaks(run, self._place))[1::2]
        found: dict[int, int] = {}
        for (measured, equal), rise in zip(ops, rises, strict=True):
            made = sum(self._round_up_bytes(self._graph.tensors[t].size_bytes) for t in measured.call.op.outputs)
            found |= dict.fromkeys(equal, max(0, rise - made))
        return found

    def _run_marked(self, ops: Sequence[MeasuredOp], mark: Mark) -> None:
        for measured in ops:
            op, tensors = measured.call.op, measured.build_tensors()
            given = self._copy_to_device(op.id, [tensors[t] for t in op.inputs])
            mark()
            made = self._calls[op.id](*given)
            mark()
            del made, given, tensors

    def _link(self) -> tuple[float, float]:
        """Return bytes per second in the slower direction, and the latency of a copy in seconds, with the thread handover."""
        large = max(min(self._time_copies(_LARGE_BYTES, _COPIES, away=away)) for away in (True, False))
        small = median(self._time_copies(_SMALL_BYTES, _SMALL_COPIES, away=True))
        rate = _LARGE_BYTES / large
        return rate, max(0.0, small - _SMALL_BYTES / rate)

    def _time_copies(self, size_bytes: int, count: int, *, away: bool) -> list[float]:
        """Return the seconds of `count` copies one after the other, to the device or back."""
        source, target = (self._here, self._place) if away else (self._place, self._here)
        channel = open_channel(f"{source}_to_{target}", source, target, DeviceMemory(target))
        sent, made = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for device in (source, target))
        found = []
        for _ in range(count):
            for device in (source, target):
                wait_for_device(device)
            start = time.perf_counter()
            transfer = channel.transfer()
            transfer.send(sent)
            transfer.set_target(made)
            transfer.wait_for_arrival(made)
            transfer.finish()
            for device in (source, target):
                wait_for_device(device)
            found.append(time.perf_counter() - start)
        return found

    def _copy_to_device(self, op: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = (self._round_up_bytes(self._graph.tensors[t].size_bytes) for t in self._graph.ops[op].inputs)
        return [copy_tensor(tensor, size_bytes, self._place) for tensor, size_bytes in zip(inputs, sizes, strict=True)]

    def _round_up_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    def _run_there(self, run: Callable[[], Any]) -> Any:
        """Return the result of `run`, called in the thread of the device."""
        call = ThreadedCall(run)
        self._worker.issue(call)
        call.settle()
        if call.error is not None:
            raise call.error
        return call.value

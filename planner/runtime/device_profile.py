"""What the ops of a step take on other devices than its own, and what is copied there, by the means that plans run with."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from threading import Event, Thread
from typing import Any

import torch

from graphs.capture.program import Call, load, variable
from graphs.capture.statics import allocated_bytes
from graphs.capture.unchanged import same
from graphs.cost.allocator import Mark, cpu_allocations, segment_peaks
from graphs.cost.others import NamedDevice, named_device
from graphs.cost.replay import RealStep
from graphs.errors import CopyError, GraphError
from graphs.ir import Op
from graphs.options import Setting, check_goes_with
from graphs.options.placement import fixed
from graphs.options.surroundings import OtherDevice
from planner.runtime.devices import place_of
from planner.runtime.placed import moved, namespace_on
from planner.runtime.transfers import Channel, copied
from planner.runtime.workers import Worker

_LARGE_BYTES, _SMALL_BYTES = 2**24, 2**12
_COPIES, _SMALL_COPIES = 5, 32
_CUDA_BLOCK_BYTES = 512


def other_devices(real: RealStep, names: Sequence[str], *, passes: int) -> tuple[OtherDevice, ...]:
    """The devices called `names`, with the time and workspace of each op that can run there.

    The step is computed on its own device `passes` times after one, everything kept; behind each op, the same is computed on the
    other device from copies of what it has read, and timed there: the least counts, on CUDA the median. The first time it is
    compared. An op has no time where it fails, where its result is laid out otherwise or takes more memory than the program's,
    and where it stays on the main device anyway.

    Raises:
        GraphError: there is no such device, one is named twice, or a kernel is none of eager PyTorch's.
    """
    if len(set(names)) < len(names):
        raise GraphError(f"other devices are {', '.join(names)}: name each once (threads of a CPU tell them apart: cpu:1, cpu:2)")
    if not all(isinstance(call, Call) for call in real.capture.program.calls):
        check_goes_with(("placement",), Setting.INDUCTOR)
    return tuple(_Profile(real, named_device(name)).device(passes) for name in names)


class _Profile:
    """Of one device."""

    def __init__(self, real: RealStep, named: NamedDevice) -> None:
        self._real, self._named = real, named
        self._place = place_of(named)
        self._worker = Worker(named.name, f"ops on {named.name}", named.threads)
        self._block_bytes = _CUDA_BLOCK_BYTES if self._place.type == "cuda" else 1
        self._graph = real.capture.graph
        self._calls = self._functions()
        self._times: dict[int, list[float]] = {op: [] for op in self._calls}
        self._exact: list[int] = []

    def device(self, passes: int) -> OtherDevice:
        """All that is known of it."""
        run = self._real.compile(look=self._look, at_end=False)
        with self._real.running():
            run(self._compared)
            for _ in range(passes):
                run(self._timed)
            workspaces = self._workspaces(run)
            rate, latency_s = self._link()
        typical: Callable[[list[float]], float] = median if self._place.type == "cuda" else min
        return OtherDevice(
            name=self._named.name,
            times_s=tuple(typical(self._times[op.id]) if op.id in self._calls else None for op in self._graph.program),
            bytes_per_s=rate,
            capacity_bytes=torch.cuda.mem_get_info(self._place)[0] if self._place.type == "cuda" else None,
            differs="" if len(self._exact) == len(self._calls) else "rounding",
            exact=tuple(self._exact),
            workspaces_bytes=tuple(workspaces.get(op.id, op.workspace_bytes) for op in self._graph.program),
            latency_s=latency_s,
            block_bytes=self._block_bytes,
        )

    def _functions(self) -> dict[int, Callable[..., tuple[Any, ...]]]:
        """For each op that may be called there a function of its inputs, which returns its outputs."""
        program, sources = self._real.capture.program, []
        stay = fixed(self._graph)
        for op in self._graph.program:
            call = None if op.id in stay else moved(program, op, op, self._real.device, self._place)
            if call is not None:
                lines = [*call.bind(op.outputs), f"return ({_listed(op.outputs)})"]
                sources.append(f"def op_{op.id}({_listed(op.inputs)}):\n" + "".join(f"    {line}\n" for line in lines))
        there = {**program.namespace, **namespace_on(program, self._place)}
        functions = load(program, "\n".join(sources), f"ops on {self._named.name}", there)
        return {int(name.removeprefix("op_")): function for name, function in functions.items()}

    def _look(self, op: Op) -> str | None:
        return f"{op.id}, ({_listed(op.inputs)}), ({_listed(op.outputs)})" if op.id in self._calls else None

    def _compared(self, op: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Compute it, and know whether it can be, and makes the same."""
        try:
            made = self._there(lambda: self._calls[op](*self._copies(op, inputs)))
            room = [self._bytes_there(self._graph.tensors[t].size_bytes) for t in self._graph.ops[op].outputs]
            can = all(self._is_like(a, b, most) for a, b, most in zip(made, outputs, room, strict=True))
        except (RuntimeError, CopyError, ValueError, TypeError):  # what a kernel that is not there raises, or one that refuses
            can = False
        if not can:
            del self._calls[op]
        elif all(a is None or same(a.to(b.device), b) for a, b in zip(made, outputs, strict=True)):
            self._exact.append(op)

    def _is_like(self, made: torch.Tensor | None, wanted: torch.Tensor | None, most_bytes: int) -> bool:
        if made is None or wanted is None:
            return made is wanted
        size_bytes = allocated_bytes(made.untyped_storage().nbytes(), self._place)
        return made.device.type == self._place.type and made.stride() == wanted.stride() and size_bytes <= most_bytes

    def _timed(self, op: int, inputs: Sequence[torch.Tensor], _: object) -> None:
        if op in self._calls:
            self._times[op].append(self._there(lambda: self._seconds(self._calls[op], self._copies(op, inputs))))

    def _seconds(self, call: Callable[..., object], given: Sequence[torch.Tensor]) -> float:
        if self._place.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call(*given)
            last.record()
            torch.cuda.synchronize(self._place)
            return float(first.elapsed_time(last)) / 1e3
        start = time.perf_counter()
        call(*given)
        return time.perf_counter() - start

    def _workspaces(self, run: Callable[[Callable[..., object]], object]) -> dict[int, int]:
        """Bytes of each op that it holds there besides what it makes: in one pass, which is made in the device's thread."""
        done: list[int] = []

        def whole(mark: Mark) -> None:
            def look(op: int, inputs: Sequence[torch.Tensor], _: object) -> None:
                if op not in self._calls:
                    return
                given = self._copies(op, inputs)
                mark()
                made = self._calls[op](*given)
                mark()
                del made, given
                done.append(op)

            run(look)

        if self._place.type == "cpu":
            cpu_allocations(lambda _: None)  # the profiler begins in this thread, or complains
        rises = self._there(lambda: segment_peaks(whole, self._place))[1::2]
        made = (sum(self._bytes_there(self._graph.tensors[t].size_bytes) for t in self._graph.ops[op].outputs) for op in done)
        return {op: max(0, rise - size) for op, rise, size in zip(done, rises, made, strict=True)}

    def _link(self) -> tuple[float, float]:
        """Bytes a second in the slower direction, and what a copy takes besides, handing it to a thread and back included."""
        channel, here = Channel(), self._real.device
        large = max(self._copy_s(channel, _LARGE_BYTES, *ends) for ends in ((here, self._place), (self._place, here)))
        small = median(self._copy_s(channel, _SMALL_BYTES, here, self._place, 1) for _ in range(_SMALL_COPIES))
        rate = _LARGE_BYTES / large
        return rate, max(0.0, small - _SMALL_BYTES / rate)

    def _copy_s(
        self, channel: Channel, size_bytes: int, source: torch.device, target: torch.device, copies: int = _COPIES
    ) -> float:
        sent, made = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for device in (source, target))
        if source.type == "cuda" or target.type == "cuda":
            torch.cuda.synchronize()
        found = []
        for _ in range(copies):
            start = time.perf_counter()
            self._there(lambda: channel.copy(sent, made, []))
            found.append(time.perf_counter() - start)
        return min(found)

    def _copies(self, op: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = (self._bytes_there(self._graph.tensors[t].size_bytes) for t in self._graph.ops[op].inputs)
        return [copied(tensor, size_bytes, self._place) for tensor, size_bytes in zip(inputs, sizes, strict=True)]

    def _bytes_there(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    def _there(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, in the thread of the device."""
        call = _Called(run)
        self._worker.issue(call)
        call.ended.wait()
        if call.error is not None:
            raise call.error
        return call.value


class _Called:
    """A function, called in another thread."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.thread: Thread | None = None
        self.ended = Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self._run = run

    def make(self) -> None:
        """Call it."""
        try:
            with torch.no_grad():
                self.value = self._run()
        except BaseException as error:  # noqa: BLE001  # whoever waits for it gets it
            self.error = error
        self.ended.set()


def _listed(tensors: Sequence[int]) -> str:
    return "".join(f"{variable(t)}, " for t in tensors)

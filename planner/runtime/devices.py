"""The devices that a step runs on: pools of memory, channels between them, and a thread for each device except the main one."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from planner.graphs.errors import CopyError, DeviceError, GraphError, PlannerError
from planner.graphs.ir import Graph
from planner.graphs.options.placement import is_between_devices, list_devices
from planner.graphs.pools import HOST
from planner.runtime.transfers.channels import HostChannels, open_channel
from planner.runtime.transfers.cuda_channels import StreamChannel
from planner.runtime.transfers.host_memory import HostMemory
from planner.runtime.transfers.thread_channels import ThreadChannel
from planner.runtime.transfers.transfers import DeviceMemory, Transfer, TransferStoppedError
from planner.runtime.transfers.workers import ThreadedCall, Worker
from planner.settings.other_devices import NamedDevice, parse_device

Part = Callable[[Sequence[Transfer]], Any]  # the work of a device in a pass, with the transfers of that pass
Around = Callable[[Callable[[], object]], object]


class Devices:
    """The main device, whose thread calls the step; the other devices of a graph with placement; and the host.

    Attributes:
        pools: pools of the devices, the main one's first.
        places: by pool, its torch device; the host's is the CPU.
        channels: by stream of the graph.
        host: the host memory; None if the graph has no such pool.
    """

    def __init__(self, graph: Graph, main: torch.device, channels: HostChannels | None = None) -> None:
        """Initialize for `graph`; `main` has the parameters, and `channels`, opened if None, lead to the host."""
        self.pools = list_devices(graph)
        self._named = {pool.owner: parse_device(pool.name) for pool in self.pools[1:]}
        self.places = {pool.name: place_of(self._named[pool.owner]) if pool.owner in self._named else main for pool in self.pools}
        self.workers = {
            stream: Worker(device.name, f"ops on {device.name}", DeviceError, device.threads)
            for stream, device in self._named.items()
        }
        self._streams = {
            pool.owner: torch.cuda.Stream(self.places[pool.name])
            for pool in self.pools[1:]
            if self.places[pool.name].type == "cuda"
        }
        self.channels: dict[str, ThreadChannel | StreamChannel] = {}
        self.host: HostMemory | None = None
        if (host := next((pool for pool in graph.pools if pool.name == HOST), None)) is not None:
            channels = HostChannels(main, host.capacity_bytes) if channels is None else channels
            self.host, self.places[HOST] = channels.memory, torch.device("cpu")
            self.channels |= channels.by_stream
        for stream, (source, target) in {op.stream: graph.ends(op) for op in graph.ops if is_between_devices(graph, op)}.items():
            place = self.places[target]
            self.channels[stream] = open_channel(stream, self.places[source], place, DeviceMemory(place))
        self._issuing = threading.Lock()
        self._around: dict[str, Around] = {}

    def run(self, main: Part, parts: Mapping[str, Part], streams: Sequence[str]) -> Any:
        """Run one pass: all parts concurrently until all have ended; return the result of `main`, which runs in this thread.

        Args:
            parts: work of the other devices, by stream.
            streams: the streams of the transfers of the pass, in the order of the schedule.

        Raises:
            DeviceError: an op has failed on another device.
            CopyError: a transfer has failed.
        """
        if not parts:
            return main(tuple(self.channels[stream].transfer() for stream in streams))
        jobs: list[ThreadedCall] = []
        running = _RunningPass(tuple(self.channels[stream].transfer(lambda: _look(jobs)) for stream in streams))
        try:
            with self._issuing:  # passes started by several threads have the same order in each worker
                for stream, part in parts.items():
                    job = ThreadedCall(partial(self._compute, stream, part, running))
                    self.workers[stream].issue(job)
                    jobs.append(job)
            result = main(running.transfers)
            for job in jobs:
                job.wait(lambda: _look(jobs))
            if running.error is not None:
                raise TransferStoppedError
        except BaseException as error:
            running.fail(error)
            for job in jobs:
                job.settle()
            first = running.error if isinstance(error, TransferStoppedError) else None
            running.error, running.transfers = None, ()  # its frames would keep it and all tensors of the step alive
            if first is None:
                raise
            # A new one, without the frames of the failed thread.
            raise type(first)(str(first)) from first.__cause__
        return result

    @contextmanager
    def watch_pool(self, pool: str, around: Around) -> Iterator[None]:
        """Run the parts of the device of `pool` by `around` in that device's thread, inside the context."""
        stream = next(stream for stream, device in self._named.items() if device.name == pool)
        self._around[stream] = around
        try:
            yield
        finally:
            del self._around[stream]

    def _compute(self, stream: str, part: Part, running: "_RunningPass") -> None:
        try:
            with ExitStack() as stack:
                if stream in self._streams:
                    stack.enter_context(torch.cuda.stream(self._streams[stream]))
                around = self._around.get(stream)
                if around is None:
                    part(running.transfers)
                else:
                    around(partial(part, running.transfers))
        except TransferStoppedError:
            pass
        except (CopyError, DeviceError) as error:
            running.fail(error)
        except BaseException as error:  # noqa: BLE001  # whoever waits for it hears of it
            what = f"an op on {self._named[stream].name!r} failed: {type(error).__name__}: {error}; the step can be tried again"
            running.fail(_set_cause(DeviceError(what), error))


class _RunningPass:
    """The shared state of the threads of one pass.

    Attributes:
        transfers: its transfers, in the order of the schedule.
        error: the first error on any thread.
    """

    def __init__(self, transfers: tuple[Transfer, ...]) -> None:
        self.transfers = transfers
        self.error: BaseException | None = None
        self._failing = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Record `error`, and stop all waiting threads."""
        with self._failing:
            if self.error is None:
                self.error = error
        for transfer in self.transfers:
            transfer.stop()


def _look(jobs: Sequence[ThreadedCall]) -> None:
    if any(job.is_lost for job in jobs):
        raise DeviceError("ops on another device were not executed: their thread has died; the step can be tried again")


def _set_cause(error: PlannerError, cause: BaseException) -> PlannerError:
    error.__cause__ = cause
    return error


def place_of(device: NamedDevice) -> torch.device:
    """Return the torch device of `device`; raise GraphError if this machine has none."""
    place = torch.device(device.torch_device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise GraphError(f"there is no device {device.name!r} here: this machine has {torch.cuda.device_count()} GPUs")
    return place

"""The devices that a placed step runs on: a thread for each except the main one, and one for each channel."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch

from graphs.errors import CopyError, DeviceError, GraphError
from graphs.ir import Graph
from graphs.options.placement import between_devices, devices_of
from planner.profiling.other_devices import NamedDevice, parse_device
from planner.runtime.transfers import LOOK_S, Channel, Pass, StoppedError, Transfer
from planner.runtime.workers import Worker

Result = TypeVar("Result")
Part = Callable[[Sequence[Transfer]], object]  # the work of a device in a pass, with the copies of that pass
Around = Callable[[Callable[[], object]], object]


class Devices:
    """The main device, whose thread calls the step, and the other devices of a graph with placement.

    Attributes:
        pools: pools of the graph, the main device's first.
        places: torch devices of the pools.
    """

    def __init__(self, graph: Graph, main: torch.device) -> None:
        """Initialize for `graph`; `main` has the parameters. Threads start with their first job.

        Raises:
            GraphError: a pool has no name of a device of this machine.
        """
        self.pools = devices_of(graph)
        named = [parse_device(pool.name) for pool in self.pools[1:]]
        self.places = (main, *(place_of(device) for device in named))
        self._named = {pool.owner: device for pool, device in zip(self.pools[1:], named, strict=True)}
        self._place = dict(zip((pool.owner for pool in self.pools), self.places, strict=True))
        self._workers = {
            stream: Worker(device.name, f"ops on {device.name}", device.threads) for stream, device in self._named.items()
        }
        channels = dict.fromkeys(op.stream for op in graph.ops if between_devices(graph, op))
        self._channels = {stream: Channel() for stream in channels}
        self._workers |= {stream: Worker(_words(stream), f"copies from {_words(stream)}") for stream in channels}
        self._streams = {stream: torch.cuda.Stream(self._place[stream]) for stream in self._named if self._on_cuda(stream)}
        self._issuing = threading.Lock()
        self._around: dict[str, Around] = {}

    def run(
        self,
        main: Callable[[Sequence[Transfer]], Result],
        parts: Mapping[str, Part],
        channels: Mapping[str, Sequence[int]],
        copies: int,
    ) -> Result:
        """Run one pass: all parts concurrently until all have ended; return the result of `main`, which runs in this thread.

        Args:
            parts: work of the other devices, by stream.
            channels: the copies that each channel makes, in order, by stream.
            copies: number of copies.

        Raises:
            DeviceError: an op has failed on another device.
            CopyError: a copy has failed.
        """
        jobs: list[_Job] = []
        under = Pass(copies, lambda: _look(jobs))
        wanted: dict[str, Callable[[], object]] = {
            stream: partial(self._compute, stream, part, under) for stream, part in parts.items()
        }
        wanted |= {stream: partial(self._copy, stream, numbers, under) for stream, numbers in channels.items() if numbers}
        try:
            with self._issuing:  # passes started by several threads have the same order in each worker
                for stream, run in wanted.items():
                    job = _Job(run, under, self._words(stream))
                    self._workers[stream].issue(job)
                    jobs.append(job)
            result = main(under.copies)
            for job in jobs:
                under.wait(job.ended)
        except BaseException as error:
            under.fail(error)
            for job in jobs:
                job.settle()
            first = under.error if isinstance(error, StoppedError) else None
            under.error, under.copies = None, ()  # its frames would keep it and all tensors of the step alive
            if first is None:
                raise
            # A new one, without the frames of the failed thread.
            raise type(first)(str(first)) from first.__cause__
        return result

    @contextmanager
    def watched(self, pool: str, around: Around) -> Iterator[None]:
        """Run the parts of the device of `pool` by `around` in that device's thread, inside the context."""
        stream = next(stream for stream, device in self._named.items() if device.name == pool)
        self._around[stream] = around
        try:
            yield
        finally:
            del self._around[stream]

    def _compute(self, stream: str, part: Part, under: Pass) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if stream in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[stream]))
            around = self._around.get(stream)
            if around is None:
                part(under.copies)
            else:
                around(partial(part, under.copies))

    def _copy(self, stream: str, numbers: Sequence[int], under: Pass) -> None:
        for number in numbers:
            under.copies[number].make(self._channels[stream])

    def _on_cuda(self, stream: str) -> bool:
        return self._place[stream].type == "cuda"

    def _words(self, stream: str) -> str:
        return f"an op on {self._named[stream].name!r}" if stream in self._named else f"a copy from {_words(stream)}"


class _Job:
    """The work of one thread in one pass.

    Attributes:
        thread: its thread.
        ended: set when the work has ended, with or without an error.
        what: description for messages.
    """

    def __init__(self, run: Callable[[], object], under: Pass, what: str) -> None:
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.what = what
        self._run: Callable[[], object] | None = run
        self._under = under

    def make(self) -> None:
        """Run the job."""
        try:
            assert self._run is not None
            self._run()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  # whoever waits for it hears of it
            self._under.fail(_named_error(error, self.what))
        finally:
            self._run = None  # and release all that it holds
            self.ended.set()

    @property
    def is_lost(self) -> bool:
        """True if the thread has died before the job ended."""
        return self.thread is not None and not self.thread.is_alive() and not self.ended.is_set()

    def settle(self) -> None:
        """Wait until the job has ended or is lost."""
        while not self.ended.wait(LOOK_S):
            if self.is_lost:
                return


def _look(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.is_lost:
            raise DeviceError(f"{job.what} was not made: its thread has died; the step can be tried again")


def _named_error(error: BaseException, what: str) -> BaseException:
    kind = CopyError if what.startswith("a copy") else DeviceError
    named = kind(f"{what} failed: {type(error).__name__}: {error}; the step can be tried again")
    named.__cause__ = error
    return named


def _words(stream: str) -> str:
    return stream.replace("_", " ")


def place_of(device: NamedDevice) -> torch.device:
    """Return the torch device of `device`.

    Raises:
        GraphError: this machine has no such device.
    """
    place = torch.device(device.torch_device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise GraphError(f"there is no device {device.name!r} here: this machine has {torch.cuda.device_count()} GPUs")
    return place

"""A search for a better order of the ops in the background of a solve in program order."""

from types import TracebackType
from typing import Self

from graphs.ir import Graph
from solvers.clock import BackgroundThread, Clock
from solvers.order.reorder import Reordering, find_order, lowers_peak, may_lower_peak

_POLL = 0.05  # of the clock
_GRACE_S = 5.0  # wait for its end after a request to stop


class OrderSearch:
    """A background search for an order; leaving the ``with`` statement ends it.

    Attributes:
        found: the order that it ended with, if that is not program order; None before.
        lowers_peak: True if keeping everything has a notably lower peak in it than in program order; None before this is known.
    """

    def __init__(self, graph: Graph, clock: Clock) -> None:
        self.found: Reordering | None = None
        self.lowers_peak: bool | None = None
        self._graph = graph
        self._clock = clock
        self._failure: Exception | None = None
        self._cancelled = False

    def __enter__(self) -> Self:
        self._thread: BackgroundThread = self._clock.start(self._go)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cancelled = True
        self._thread.end(_GRACE_S)

    def wait(self, most: float) -> None:
        """Wait until it is known if an order lowers the peak, up to `most` of the clock."""
        until = self._clock.now + most
        while self._thread.running and self.lowers_peak is None and self._clock.now < until:
            self._thread.wait(_POLL)
        if self._failure is not None:
            raise self._failure

    def _go(self) -> None:
        try:
            promising = may_lower_peak(self._graph)
            self.lowers_peak = None if promising else False
            found = find_order(self._graph, self._clock, lambda: self._cancelled)
            self.found = found if found.changed else None
            self.lowers_peak = promising and lowers_peak(found)
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            self._failure = error

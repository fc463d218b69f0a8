"""A search for a better order of the ops in the background of a solve in program order."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from graphs.ir import Graph
from graphs.reordering import Reordering
from solvers.clock import BackgroundThread, Clock
from solvers.order.reorder import find_order, lowers_peak, may_lower_peak

_POLL = 0.05  # of the clock
_GRACE_S = 5.0  # wait for its end after a request to stop


class OrderSearch:
    """A search for an order in the background of a solve. Further solves of the same graph know what it found.

    Attributes:
        found: the order that it ended with, if that is not program order; None before.
        lowers_peak: True if keeping everything has a notably lower peak in it than in program order; None before this is known.
    """

    def __init__(self) -> None:
        self.found: Reordering | None = None
        self.lowers_peak: bool | None = None
        self._failure: Exception | None = None

    @contextmanager
    def run(self, graph: Graph, clock: Clock) -> Iterator[None]:
        """Search while the ``with`` statement is executed, unless an order of `graph` is known."""
        if self.found is None or self.found.source is not graph:
            self.found = self.lowers_peak = self._failure = None
        self._clock, self._cancelled = clock, False
        self._thread: BackgroundThread = clock.start(partial(self._search, graph))
        try:
            yield
        finally:
            self._cancelled = True
            self._thread.end(_GRACE_S)

    def wait(self, most: float) -> None:
        """Wait until it is known if an order lowers the peak, up to `most` of the clock."""
        until = self._clock.now + most
        while self._thread.running and self.lowers_peak is None and self._clock.now < until:
            self._thread.wait(_POLL)
        if self._failure is not None:
            raise self._failure

    def _search(self, graph: Graph) -> None:
        if self.found is not None:
            return
        try:
            promising = may_lower_peak(graph)
            self.lowers_peak = None if promising else False
            found = find_order(graph, self._clock, lambda: self._cancelled)
            self.found = found if found.changed else None
            self.lowers_peak = promising and lowers_peak(found)
        except Exception as error:  # noqa: BLE001 (raised in the thread that waits)
            self._failure = error

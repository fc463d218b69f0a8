"""A search in its own process, which does not share the interpreter's lock.

A process, since threads of one interpreter share its lock: beside other searches a bound got a fifth of a core. It is a fresh
interpreter that does not import the script of the caller, which may have no guard for that. If the parent ends, however it does,
so does the child.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from graphs.ir import Graph
from solvers.child_process import ChildProcess, connect_to_parent, describe_error
from solvers.clock import WallClock
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.decoding.decode import Order, Trial
from solvers.windows.params import WindowsParams
from solvers.windows.search import Search


@dataclass(slots=True)
class Inbox:
    """Messages to a search in its own process.

    Attributes:
        orders: orders to consider, latest last; the reader removes them.
        closed: True if no more orders follow.
    """

    orders: deque[Order] = field(default_factory=deque)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class PartTask:
    """The task of a process.

    Attributes:
        graph, budget_bytes, tolerance, params: of the request.
        limit: seconds.
        run: the search, a function of a module, which is pickled by name.
        nice: steps of lower priority, each a fourth less of a core.
        starts_others: True if it may start processes itself.
    """

    graph: Graph
    budget_bytes: int
    tolerance: Tolerance
    params: WindowsParams
    limit: float
    run: Callable[[Search, Inbox], None]
    nice: int = 0
    starts_others: bool = False


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """The last message of a process.

    Attributes:
        largest: as in ``Models``.
        failure: description of an internal error; "" if there was none.
        died: True if the process ended before its search.
    """

    largest: tuple[int, int] = (0, 0)
    failure: str = ""
    died: bool = False


class PartProcess:
    """The process of a search; leaving the ``with`` statement ends it."""

    def __init__(self, task: PartTask) -> None:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        self.process = ChildProcess(__name__)
        self.send(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.end()

    def send(self, what: PartTask | float | Trial | Order | None) -> None:
        """Send the task, the best time of the whole search, an order, or None at the end of the orders."""
        self.process.send(what)

    def receive(self, most: float) -> Trial | SearchEnd | None:
        """Return the next schedule found, waiting up to `most` seconds, or a ``SearchEnd`` if the process has ended."""
        try:
            found: Trial | SearchEnd | None = self.process.receive(most)
        except EOFError:
            return SearchEnd(died=True)
        return found


def main() -> None:
    """Run a search in the child process: read the task from the parent's socket, and send back schedules."""
    connection = connect_to_parent()
    try:
        task: PartTask = connection.recv()
    except (EOFError, OSError):
        return  # the parent is gone
    os.nice(task.nice)
    inbox, best_s = Inbox(), float("inf")
    sent: Trial | None = None

    def listen() -> None:
        nonlocal best_s
        try:
            while True:
                match connection.recv():
                    case float(time_s):
                        best_s = time_s
                    case Trial() as trial:
                        search.incumbent.take(trial)
                    case Order() as order:
                        inbox.orders.append(order)
                    case None:
                        inbox.closed = True
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone

    def stop() -> bool:
        nonlocal sent
        if search.incumbent.best is not None and search.incumbent.best is not sent:
            sent = search.incumbent.best
            connection.send(sent)
        return search.incumbent.bound_s >= best_s

    clock = WallClock(task.limit)
    request = Request(task.graph, task.budget_bytes, task.tolerance, clock, should_stop=stop, params=task.params)
    search = Search.of(request, may_start_processes=task.starts_others)
    threading.Thread(target=listen, daemon=True).start()
    failure = ""
    try:
        task.run(search, inbox)
    except Exception as error:  # noqa: BLE001 (the parent reports it)
        failure = describe_error(error)
    with suppress(OSError):
        stop()
        connection.send(SearchEnd(search.models.largest, failure))
    os._exit(0)  # whatever HiGHS has been left behind with

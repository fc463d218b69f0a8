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
from multiprocessing.connection import Connection

from planner.graphs.ir import Graph
from planner.solvers.child_process import ChildProcess, connect_to_parent, describe_error
from planner.solvers.clock import WallClock
from planner.solvers.request import Request
from planner.solvers.tolerance import Tolerance
from planner.solvers.windows.decoding.decode import Order, Trial
from planner.solvers.windows.params import WindowsParams
from planner.solvers.windows.search import Search


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
        failure: description of an internal error; "" if there was none.
        died: True if the process ended before its search.
    """

    largest: tuple[int, int] = (0, 0)
    failure: str = ""
    died: bool = False


class PartProcess(ChildProcess):
    """The process of a search. After the task it is sent best times of the whole search, orders, and None at their end."""

    def __init__(self, task: PartTask) -> None:
        """Start the process; raise OSError if it cannot be started."""
        super().__init__(__name__)
        self.send(task)

    def receive(self, most_s: float | None) -> Trial | SearchEnd | None:
        """Return the next schedule found, waiting up to `most_s` seconds, or a ``SearchEnd`` if the process has ended."""
        try:
            found: Trial | SearchEnd | None = super().receive(most_s)
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
    _Child(task, connection).run()
    os._exit(0)  # whatever HiGHS has been left behind with


class _Child:
    """The search of a child process, and its messages from and to the parent."""

    def __init__(self, task: PartTask, connection: Connection) -> None:
        self.task, self.connection = task, connection
        self.inbox, self.best_s = Inbox(), float("inf")
        self.sent: Trial | None = None
        clock = WallClock(task.limit)
        request = Request(task.graph, task.budget_bytes, task.tolerance, clock, should_stop=self.send_best, params=task.params)
        self.search = Search.of(request, may_start_processes=task.starts_others)

    def run(self) -> None:
        """Search, and report the end."""
        threading.Thread(target=self.listen, daemon=True).start()
        failure = ""
        try:
            self.task.run(self.search, self.inbox)
        except Exception as error:  # noqa: BLE001 (the parent reports it)
            failure = describe_error(error)
        with suppress(OSError):
            self.send_best()
            self.connection.send(SearchEnd(self.search.models.largest, failure))

    def listen(self) -> None:
        """Receive what ``PartProcess.send`` sends, until the parent is gone."""
        try:
            while True:
                match self.connection.recv():
                    case float(time_s):
                        self.best_s = time_s
                    case Trial() as trial:
                        self.search.incumbent.take(trial)
                    case Order() as order:
                        self.inbox.orders.append(order)
                    case None:
                        self.inbox.closed = True
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone

    def send_best(self) -> bool:
        """Send the best schedule, if it is new; return True if the search cannot improve the whole."""
        best = self.search.incumbent.best
        if best is not None and best is not self.sent:
            self.sent = best
            self.connection.send(best)
        return self.search.incumbent.bound_s >= self.best_s

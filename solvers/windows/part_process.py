"""A search in a process of its own, where the interpreter's lock is not shared."""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from graphs.ir import Graph
from solvers.child_process import ChildProcess, connection_to_parent, description
from solvers.clock import WallClock
from solvers.request import Request
from solvers.tolerance import Tolerance
from solvers.windows.decoding.decode import Order, Trial
from solvers.windows.params import WindowsParams
from solvers.windows.search import Search


@dataclass(slots=True)
class Inbox:
    """What a search in a process of its own has been sent.

    Attributes:
        orders: to look at, latest last; whoever does takes them from it.
        closed: there will be no more of these.
    """

    orders: deque[Order] = field(default_factory=deque)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """What is searched there.

    Attributes:
        graph, budget_bytes, tolerance, params: of the request.
        limit: seconds.
        run: searches; a function of a module, as it is known there by its name.
        nice: steps of priority that it is lower by, of which each is a fourth less of a core.
        starts_others: whether it starts processes in turn.
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
    """The last that a process sends.

    Attributes:
        largest: as in ``Search``.
        failure: what must not happen, and did.
        died: before it had done what it was to do.
    """

    largest: tuple[int, int] = (0, 0)
    failure: str = ""
    died: bool = False


class PartProcess:
    """The process, in a ``with`` statement that ends it."""

    def __init__(self, task: Task) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self._process = ChildProcess(__name__)
        self.send(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.end()

    def send(self, what: Task | float | Trial | Order | None) -> None:
        """Let it know of the whole's best schedule, of which a part is told the time; of an order, or with None of their end."""
        self._process.send(what)

    def receive(self, most: float) -> Trial | SearchEnd | None:
        """What it has found since, waiting for `most` seconds for that; of a process that has died, that it has ended."""
        try:
            found: Trial | SearchEnd | None = self._process.receive(most)
        except EOFError:
            return SearchEnd(died=True)
        return found


def main() -> None:
    """The process: search what comes over the standard input, a socket, and send back what is found."""
    connection = connection_to_parent()
    try:
        task: Task = connection.recv()
    except (EOFError, OSError):
        return  # nobody wants it any more
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
            os._exit(0)  # nobody is there who would want to know

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
    except Exception as error:  # noqa: BLE001 (who has started it says so)
        failure = description(error)
    with suppress(OSError):
        stop()
        connection.send(SearchEnd(search.models.largest, failure))
    os._exit(0)  # whatever HiGHS has been left behind with

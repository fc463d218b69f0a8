"""A solve in a separate process, concurrent with training, or a short one in this process. Never imports torch.

A process, since a thread would share the interpreter's lock with the training loop. Before, it had nice 10 and was served by that
loop: steps took 1.06 times as long while it ran. Now it runs on idle cores only, from its first instruction, a thread converses
with it, and steps take 0.99 to 1.00. Known weakness: where no core is idle it may find nothing, and a short run ends before the
process has started. A plan that was found in a moment is therefore solved again between two steps (``solve_here``).
"""

import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph
from planner.plans.plan import Plan
from planner.plans.solve import solve_graph
from planner.settings.budget import Budget
from planner.settings.plan import PlanSettings
from planner.solvers.child_process import ChildProcess, connect_to_parent, describe_error
from planner.solvers.request import Start

_LOWEST = 19  # steps of lower priority than the training process


@dataclass(frozen=True, slots=True)
class SolveJob:
    """A solve: a graph, a budget and settings.

    Attributes:
        graph, budget, settings, start: arguments of ``planner.plans.solve.solve_graph``.
    """

    graph: Graph
    budget: Budget
    settings: PlanSettings
    start: Start | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a solve.

    Attributes:
        plan: the best plan; None if none was found.
        failure: the reason if there is no plan.
    """

    plan: Plan | None = None
    failure: str = ""


class BackgroundSolve:
    """A solve that runs in a separate process.

    Attributes:
        ended: its end; None while it runs.
    """

    def __init__(self, job: SolveJob) -> None:
        """Start the process; raise OSError if none can be started."""
        self.ended: Ended | None = None
        self._process, self._news = ChildProcess(__name__), SimpleQueue[Plan | Ended]()
        _lower_priority(self._process.process.pid)  # before it has imported anything
        self._kill = weakref.finalize(self, self._process.process.kill)  # also if the object is collected before the end
        # A graph may be larger than what the system buffers, and the process may have to wait long for an idle core.
        threading.Thread(target=_converse, args=(self._process, job, self._news), name="background solve", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """True while the process runs, whether or not it has sent its end."""
        return self.ended is None and self._process.is_running

    def receive(self, most_s: float = 0.0) -> Plan | None:
        """Return the latest plan that is better than those before, waiting up to `most_s` seconds; None if there is none."""
        latest: Plan | None = None
        with suppress(Empty):
            while self.ended is None:
                found = self._news.get(timeout=0.0 if latest is not None else most_s)
                if isinstance(found, Ended):
                    self.ended = found
                    latest = found.plan or latest
                else:
                    latest = found
        return latest

    def stop(self) -> None:
        """End the process; results that it has not sent are lost."""
        if self.ended is None:
            self.ended = Ended(failure="it was stopped")
            self._kill()


def _converse(process: ChildProcess, job: SolveJob, news: "SimpleQueue[Plan | Ended]") -> None:
    """Send the job to the process, put all that it finds into `news`, and end it, without keeping the training thread."""
    with process:
        process.send(job)
        found: Plan | Ended | None = None
        while not isinstance(found, Ended):
            try:
                found = process.receive(None)
            except EOFError:
                found = Ended(failure="its process has died")
            if found is not None:
                news.put(found)


def solve_here(job: SolveJob, most_s: float) -> Ended:
    """Return the end of a solve in this process, of `most_s` seconds at most, with the best schedule so far."""
    end_s = time.monotonic() + most_s
    return _solve(job, must_stop=lambda: time.monotonic() > end_s)


def _solve(job: SolveJob, **callbacks: Any) -> Ended:
    """Return the end of a solve with these callbacks of ``solve_graph``."""
    try:
        return Ended(solve_graph(job.graph, job.budget, job.settings, start=job.start, **callbacks))
    except PlannerError as error:
        return Ended(failure=str(error))
    except Exception as error:  # noqa: BLE001  # who has started it goes on with the plan that there is
        return Ended(failure=describe_error(error))


def _lower_priority(process: int) -> None:
    """Let a process, and those that it starts, run only on cores that are idle, as far as the system can."""
    with suppress(OSError):  # it has ended, or may not
        os.setpriority(os.PRIO_PROCESS, process, _LOWEST)
        if sys.platform == "linux":  # above nice 19, it takes no core from a thread that is ready
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _send(connection: Connection, plan: Plan) -> None:
    try:
        connection.send(plan)
    except OSError:  # the receiver has gone
        os._exit(0)


def _end_with_parent(connection: Connection) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(0)


def main() -> None:
    """Solve the job received over the standard input, a socket; send back each better plan, and the end."""
    connection = connect_to_parent()
    try:
        job: SolveJob = connection.recv()
    except (EOFError, OSError):
        return  # the receiver has gone
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    ended = _solve(job, on_plan=partial(_send, connection))
    with suppress(OSError):
        connection.send(ended)
    os._exit(0)  # ends threads that HiGHS may have left running

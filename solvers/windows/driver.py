"""The driver of a solve: strategies that prove bounds, strategies that find schedules, and searches of smaller sets of options.

It reads from top to bottom; README.md describes the same in words.

Tried and removed, as no result depended on them by equal work: relax-and-fix, which ran where nothing else had found a schedule
(189 solves at and below the least known budget); a search of segments of the step (127 graphs); a search in one model with all
rows and ops (48 random graphs, 50 with options, 8 public ones). A search for first schedules by all methods was taken back: steps
with options, and small budgets within seconds, ended without the schedule that they had before.

Known weaknesses: for convolutional networks a few percent above the least budget a schedule is found soon, but a gap of a few
percent stays (docs/benchmarks.md). With lossy options the bound of the whole rises late, since the searches of parts start first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf

from planner.solvers.clock import BackgroundThread
from planner.solvers.windows.option_sets import goes_last, make_option_parts, make_plain_parts
from planner.solvers.windows.part_process import Inbox
from planner.solvers.windows.parts import LAST, Part, end_background, start_in_background, start_process, turn_of, wait_for
from planner.solvers.windows.search import Search
from planner.solvers.windows.strategies.branches import Branches
from planner.solvers.windows.strategies.commitments import Commitment, Commitments, Orders
from planner.solvers.windows.strategies.first_schedules import (
    OFFLOADING_RULES_LIMIT,
    EvictionRules,
    Imitation,
    KeepEverything,
)
from planner.solvers.windows.strategies.portfolio import OffloadingPortfolio, Portfolio
from planner.solvers.windows.strategies.refinement import Relaxation
from planner.solvers.windows.strategies.state_space import StateSpace
from planner.solvers.windows.strategies.strategy import Strategy

_EARLY_RULES_LIMIT = 0.2  # of the clock: for eviction rules before the relaxation, until one finds a schedule
_RULES_LIMIT = 1.0  # for the other rules while no other strategy searches
_IMITATION_LIMIT = 4.0  # for all baselines that are imitated


def leave_unlimited(search: Search) -> float:
    """Return the limit of a stage without one."""
    return inf


@dataclass(frozen=True, slots=True)
class SearchStage:
    """A strategy and its time.

    Attributes:
        limit: of its step, by the clock.
        repeated: True if more steps follow, each longer than the last, until nothing is left to do.
        in_background: True if it runs in a thread while the next stages run.
        improves: True if from here on those in the background have time to improve a solution within the tolerance.
        last: True if it starts once those in the background have ended.
    """

    strategy: type[Strategy]
    limit: Callable[[Search], float] = leave_unlimited
    repeated: bool = False
    in_background: bool = False
    improves: bool = False
    last: bool = False


# Strategies that do not apply to the problem are skipped. The solve ends with the stage that solves it.
STAGES = (
    SearchStage(KeepEverything),
    SearchStage(EvictionRules, lambda s: 0.0 if s.problem.round_trips else _EARLY_RULES_LIMIT),
    SearchStage(OffloadingPortfolio, in_background=True),
    SearchStage(Relaxation, lambda s: s.params.bound.first_slice),
    SearchStage(EvictionRules, lambda s: OFFLOADING_RULES_LIMIT if s.problem.round_trips else _RULES_LIMIT),
    SearchStage(Portfolio, in_background=True, improves=True),
    SearchStage(Imitation, lambda _: _IMITATION_LIMIT),
    SearchStage(Relaxation, lambda s: s.params.bound.first_slice * s.params.bound.longer, repeated=True),
    SearchStage(StateSpace, last=True),
)


def run(search: Search) -> None:
    """Search until solved, stopped, or nothing is left to do, with smaller sets of options in the background."""
    if search.problem.places.plain:
        with ExitStack() as stack:
            parts = [stack.enter_context(_search_in_background(part)) for part in make_plain_parts(search)]
            run_plain(search, parts)
    elif not search.may_start_processes:  # the parent process searches smaller sets
        run_alone(search)
    else:
        commitments = Commitments.begin(search)
        with ExitStack() as stack:
            # The search of the program needs no help if work is counted; with a low priority on few cores it does.
            commitments.program.closed = search.clock.counts_work
            parts = [stack.enter_context(_search_in_background(part)) for part in make_option_parts(search, commitments)]
            _bound_and_commit(search, commitments, nice=LAST if goes_last(search) else 0)
            wait_for(search, parts, lambda: search.stopping.is_solved() or search.stopping.poll_stop())


def run_alone(search: Search) -> None:
    """Search a graph with optional ops without searches of smaller sets."""
    _bound_and_commit(search, Commitments.begin(search))


def run_plain(search: Search, parts: Sequence[Part] = ()) -> None:
    """Search a graph without optional ops other than transfers to the host."""
    threads: list[BackgroundThread] = []
    try:
        _run_stages(search, threads)
        search.incumbent.release()
        for part in parts:
            part.finish()
    finally:
        search.stopping.halt()
        for one in threads:
            end_background(one)
        search.incumbent.close()


def _run_stages(search: Search, threads: list[BackgroundThread]) -> None:
    """Run the stages that apply until solved or stopped; create each strategy once, add background threads to `threads`."""
    stopping, improves = search.stopping, False
    strategies: dict[type[Strategy], Strategy] = {}
    for stage in STAGES:
        # A million states may take a gigabyte, and those in the background may end the solve before.
        if stage.last:
            wait_for(search, threads, stopping.is_enough)
        if stopping.is_solved() or stopping.poll_stop():
            break
        improves |= stage.improves
        limit = stage.limit(search)
        if not stage.strategy.applies(search.problem):
            continue
        if stage.strategy not in strategies:
            strategies[stage.strategy] = stage.strategy(search)
        strategy = strategies[stage.strategy]
        if stage.in_background:
            threads.append(start_in_background(search, partial(strategy.step, limit)))
        else:
            while strategy.step(limit) and stage.repeated and not (stopping.is_solved() or stopping.poll_stop()):
                limit *= search.params.bound.longer
    if improves:
        wait_for(search, threads, stopping.is_enough)


def _bound_and_commit(search: Search, commitments: Commitments, *, nice: int = 0) -> None:
    """Refine the relaxation, and in the background solve plain graphs of its solutions, while there is anything to do.

    Args:
        nice: run in another thread with a priority lower by this, since this thread's priority could not be raised again.
    """
    stopping = search.stopping
    if nice:
        with _halt_on_error(
            search, start_in_background(search, lambda: _bound_and_commit(search, commitments), nice=nice)
        ) as bounding:
            wait_for(search, [bounding], stopping.poll_stop)
        return
    branches = Branches(search)
    commitments.add_simple()
    with _halt_on_error(search, start_in_background(search, lambda: _commit(search, commitments, branches))) as committing:
        while branches.step(inf):
            pass
        wait_for(search, [committing], lambda: stopping.is_solved() or stopping.poll_stop())


def _commit(search: Search, commitments: Commitments, orders: Orders) -> None:
    """Solve the plain graphs of commitments; solves that take longer run in another process, in parallel with the bound."""
    for sub in commitments.generate_searches(orders, until=turn_of(search, 1)):
        run_plain(sub)
    if search.stopping.is_solved() or search.stopping.poll_stop():
        return
    function = partial(_commit_in_process, known=commitments.all)
    process = start_process(search, search.problem.whole, function, params=search.params)
    if process is None or not commitments.follow(process, orders):
        for sub in commitments.generate_searches(orders):
            run_plain(sub)


def _commit_in_process(search: Search, inbox: Inbox, *, known: dict[object, Commitment]) -> None:
    for sub in Commitments(search, known).generate_searches(inbox):
        run_plain(sub)


@contextmanager
def _search_in_background(part: Part) -> Iterator[Part]:
    """Search a part in a background thread."""
    part.thread = start_in_background(part.whole, lambda: _run_part(part))
    try:
        yield part
        part.finish()
    finally:
        part.end()


def _run_part(part: Part) -> None:
    """Search a part in its process, or in this thread if it has none."""
    if not part.await_turn():
        return
    function = run_alone if part.alone else run
    process = part.start_process(partial(_run_in_process, function=function))
    if process is not None:
        with process:
            if part.follow(process):
                return
    search = part.search()
    function(search)
    part.close(search)


def _run_in_process(search: Search, _: Inbox, *, function: Callable[[Search], None]) -> None:
    function(search)


@contextmanager
def _halt_on_error(search: Search, thread: BackgroundThread) -> Iterator[BackgroundThread]:
    """Wait for the end of `thread`; halt the search on an exception."""
    try:
        yield thread
    except BaseException:
        search.stopping.halt()
        raise
    finally:
        end_background(thread)

"""Looks for schedules, in several ways that take turns by what they achieve."""

from collections.abc import Callable, Iterator, Sequence

from solvers.clock import left
from solvers.problem import problem_of
from solvers.windows.decoding.decode import read_choice
from solvers.windows.decoding.encode import start_values
from solvers.windows.decoding.expand import Choice
from solvers.windows.decoding.refinement import even_windows
from solvers.windows.relaxation.discretization import Discretization, Model
from solvers.windows.search import Search
from solvers.windows.strategies.neighbourhoods import Neighbourhoods
from solvers.windows.strategies.parts import PartBeside
from solvers.windows.strategies.random_keys import RandomKeys
from solvers.windows.strategies.refinement import refine, solve_part
from solvers.windows.strategies.relax_and_fix import advance
from solvers.windows.strategies.round_trips import polishing, variations
from solvers.windows.strategies.segments import improvements
from solvers.windows.strategies.turns import take_turns


class Portfolio:
    """Looks for schedules until the model that looks for them has no better one."""

    def __init__(
        self, search: Search, coarse: Discretization, detail: Discretization, without_copies: PartBeside | None = None
    ) -> None:
        """What it starts from.

        Args:
            coarse: two windows, up to the peak and after it.
            detail: what the relaxation came to so far.
            without_copies: the search without round trips to the host beside this one, if there is one.
        """
        self.search = search
        self.params = search.params.portfolio
        self.coarse = coarse
        self.detail = detail
        self.without_copies = without_copies
        self.neighbourhoods = Neighbourhoods(search, coarse)
        self.repairs = RandomKeys(search)

    def find(self) -> None:
        """Look for schedules."""
        search, params = self.search, self.params
        if search.problem.copies is not None:
            self.find_round_trips()
            return
        began = search.clock.now
        self.neighbourhoods.begin()  # the first of the restarts
        began_with = search.clock.now - began
        if search.incumbent.best is None:
            self.advance()
        restarts = self.neighbourhoods.restarts()
        if search.incumbent.best is None:
            self.take_turns([restarts], should_stop=lambda: search.incumbent.best is not None or search.stopping.enough())
        ways = [self.neighbourhoods.reopenings(), self.neighbourhoods.exchanges(), self.improvements(), restarts]
        self.take_turns(ways, least=params.least_shares, already=(0.0, 0.0, 0.0, began_with))
        self.repair()
        self.take_turns([self.improvements()])
        limit = params.first_slice
        exhausted = False
        detail = self.detail
        while not (exhausted or search.stopping.enough()):
            detail, exhausted = refine(search, detail, limit, is_relaxation=False)
            limit *= 2

    def find_round_trips(self) -> None:
        """The same where tensors may go to the host: in the ways that know of it."""
        search, near = self.search, self.neighbourhoods
        # Round trips are hidden in windows of equal time.
        near.detail = even_windows(self.coarse, search.problem.time_s, search.params.neighbourhoods.even_windows)
        trying, evicting = variations(search, self.coarse, near.known), self.evictions()
        stop = self.enough_after(search.params.round_trips.rules_limit)
        for _ in evicting:
            if stop():
                break
        for _ in range(search.params.round_trips.first):
            if search.stopping.enough():
                return
            next(trying)
        # Not before: beside a good schedule that sends nothing, a rough one that does, and would come to more when improved, is
        # given up.
        if self.without_copies is not None:
            self.without_copies.tell()
        ways = [evicting, trying, near.restarts()]
        if search.incumbent.best is None:
            near.begin()
            self.take_turns(ways, should_stop=lambda: search.incumbent.best is not None or search.stopping.enough())
        if search.incumbent.best is not None:
            self.take_turns([*ways, polishing(search), near.reopenings(), near.exchanges()])

    def evictions(self) -> Iterator[None]:
        """Evict, in many ways, until that leads no further; what is the best is polished."""
        search, repairs = self.search, self.repairs
        idle = 0
        while idle < self.params.idle_runs:
            best, before = search.incumbent.best, repairs.runs
            repairs.guided(self.enough_after(search.params.round_trips.guided_limit))
            yield
            repairs.varied(search.params.round_trips.runs, search.stopping.enough)
            yield
            idle += repairs.runs - before
            if search.incumbent.best is not best and search.incumbent.best is repairs.found:
                idle = 0
                yield from polishing(search)

    def enough_after(self, limit: float) -> Callable[[], bool]:
        """``Search.enough``, or that so much has been spent from now on."""
        clock = self.search.clock.part(limit)
        return lambda: self.search.stopping.enough() or left(clock) <= 0

    def take_turns(
        self,
        ways: Sequence[Iterator[None]],
        *,
        should_stop: Callable[[], bool] | None = None,
        least: Sequence[float] | None = None,
        already: Sequence[float] | None = None,
    ) -> None:
        """As ``take_turns``, for the best schedule's time."""
        search = self.search
        take_turns(
            ways,
            lambda: search.incumbent.best_s,
            should_stop or search.stopping.enough,
            search.clock,
            self.params,
            least=least,
            already=already,
        )

    def advance(self) -> None:
        """Go from the first op to the last, settling what fits; first without repeating ops after the peak."""
        search = self.search
        graph, budget_bytes = search.problem.graph, search.budget_bytes
        for repeatable, share in ((range(self.coarse.ends[0] + 1), 1), (None, 2)):
            problem = problem_of(graph, budget_bytes, repeatable=repeatable)
            clock = search.clock.part(share * self.params.advance_limit)
            if search.stopping.stopped() or advance(problem, self.coarse, self.solve_place, search.offer, clock, search.params):
                return

    def repair(self) -> None:
        """Evict, in many ways, until that leads no further."""
        search = self.search
        search.progress.tell("trying rules of eviction")
        idle = 0
        while idle < self.params.idle_runs and not search.stopping.enough():
            before = search.incumbent.best_s
            self.repairs.guided(search.stopping.enough)
            self.repairs.varied(self.params.runs, search.stopping.enough)
            idle = 0 if search.incumbent.best_s < before * (1 - self.params.segment_gap) else idle + self.params.runs

    def improvements(self) -> Iterator[None]:
        """Choose anew in one segment of the best schedule after another."""
        search = self.search
        if search.incumbent.best is None:
            return
        yield from improvements(
            search.problem,
            lambda: search.incumbent.best_trial,
            self.solve_segment,
            search.offer,
            search.stopping.enough,
            search.params,
        )

    def solve_segment(self, model: Model, choice: Choice, below_s: float) -> Choice | None:
        """A solution of the model of a segment that costs less than `below_s`."""
        search = self.search
        search.progress.tell(f"improving ops {model.detail.ends[0] + 1} to {model.detail.ends[-1]}")
        below = search.problem.units(below_s - self.params.segment_gap * search.problem.base_s)
        start = start_values(model, choice)
        limit, gap = self.params.segment_limit, self.params.segment_gap
        answer = solve_part(search, model.program, limit, gap=gap, start=start, below=below, should_stop=search.stopping.stopped)
        if answer.values is None or answer.objective is None or answer.objective >= below:
            return None
        return read_choice(model, answer.values)

    def solve_place(self, model: Model, most: float) -> Choice | None:
        """A solution of one of the models of ``advance``, good enough to go on from."""
        search = self.search
        search.progress.tell(f"searching from op {model.detail.ends[0] if model.detail.ends else 0} on")
        limit, gap = min(most, self.params.place_limit), self.params.place_gap
        answer = solve_part(search, model.program, limit, gap=gap, should_stop=search.stopping.stopped)
        return None if answer.values is None else read_choice(model, answer.values)

"""What the search of the windows solver is tuned by: nothing here changes what is proved, only how soon.

Durations are in the unit of the clock (``solvers.clock``): seconds, or units of work. Shares of the step are of its
time without recomputation. The values were found on the graphs of ``make bench-solve``.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from graphs.errors import UsageError
from solvers.eviction.rules import RULES, TIGHT_RULES, EvictionRule
from solvers.params_file import read_params
from solvers.registry import SOLVERS

# What tries most comes last.
_IMITATED = ("checkpoint-blocks", "sac-attention", "sac-every-second", "chen-sqrt", "dtr", "memory-budget", "chen-greedy", "sac")
_GUIDED_RULES = (
    EvictionRule(),
    EvictionRule(size=0.5, distance=0.5),
    EvictionRule(size=0.25, distance=2.0),
    EvictionRule(size=0.25, distance=0.5),
)


@dataclass(frozen=True, slots=True)
class BoundParams:
    """Of the relaxation, and of the end of the solve.

    Attributes:
        first_slice: for the relaxation in the first round;
        longer: times as long in each further one, as a model that was stopped begins anew.
        inner_gap: a model is solved to this part of the tolerance,
        close_gap: or to this once the tolerance is reached.
        least_moment: what a solve goes on for at least once it is within the tolerance;
        moment_share: and what share of the time that took.
        arithmetic: share of a schedule's time by which HiGHS's arithmetic may put its bound above it.
        most_bytes: that the process may grow by before a model is given up.
        small_ops: in graphs of at most so many, all states are searched before there are more windows;
        max_states: of that search, about a kilobyte each.
    """

    first_slice: float = 2.0
    longer: float = 3.0
    inner_gap: float = 0.8
    close_gap: float = 0.05
    least_moment: float = 0.5
    moment_share: float = 0.5
    arithmetic: float = 1e-5
    most_bytes: int = 2_500_000_000
    small_ops: int = 30
    max_states: int = 1_000_000


@dataclass(frozen=True, slots=True)
class FirstScheduleParams:
    """Of what is tried before and beside models.

    Attributes:
        rules, tight_rules: of eviction; the latter for budgets at which the others fail.
        early_rules_limit: for rules before the relaxation, until one finds a schedule;
        rules_limit: for the other rules while nothing else looks for schedules;
        few_executions: and per op of the graph.
        eviction_limit: for rules of eviction while something else looks.
        offloaded_limit: for orders that offload what is not needed now, where tensors may go to the host.
        imitated: other methods whose schedules are offered;
        imitation_limit: for all of them.
    """

    rules: tuple[EvictionRule, ...] = RULES
    tight_rules: tuple[EvictionRule, ...] = TIGHT_RULES
    early_rules_limit: float = 0.2
    rules_limit: float = 1.0
    few_executions: float = 4.0
    eviction_limit: float = 20.0
    offloaded_limit: float = 4.0
    imitated: tuple[str, ...] = _IMITATED
    imitation_limit: float = 4.0


@dataclass(frozen=True, slots=True)
class PortfolioParams:
    """Of the ways to look for schedules, and how they take turns.

    Attributes:
        first_slice: for the whole model with all rows; twice as much in each further round.
        advance_limit: for going from the first op to the last; twice as much if all may be repeated.
        place_limit, place_gap: of each model on the way; the gap is a share of the step.
        runs: of eviction at a time;
        idle_runs: of these without anything better, and it is given a rest.
        segment_limit, segment_gap: of each model of a segment; what is gained less than the gap is left.
        least_shares: of the time, for ways that gain nothing, beside the best: windows, ops, segments, restarts;
        even_share: for any other.
        slow: share of what is made smaller, in a unit of time: where no way gains as much, all get about the same time.
        memory: what was gained and spent counts this much less a unit of time later.
        pscost_minreliable: HiGHS's option: what looks for schedules wants many nodes rather than a bound, and so less strong
            branching than by default.
    """

    first_slice: float = 2.0
    advance_limit: float = 30.0
    place_limit: float = 4.0
    place_gap: float = 5e-3
    runs: int = 20
    idle_runs: int = 200
    segment_limit: float = 2.0
    segment_gap: float = 2e-5
    least_shares: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.05)
    even_share: float = 0.25
    slow: float = 1e-4
    memory: float = 0.95
    pscost_minreliable: int = 1


@dataclass(frozen=True, slots=True)
class NeighbourhoodParams:
    """Of the restricted model.

    Attributes:
        small_share: of the capacity, that tensors taken to be always there may take together.
        coarse_capacities: shares of the capacity that coarse models are solved for;
        coarse_limit: each of them.
        tight_share: of the budget, that an op takes which has a window of its own.
        windows: about so many at first, or more in small graphs: so many that
        size: is windows times ops.
        even_windows: parts of equal time that windows split the step into where there are round trips.
        choices: of what one op may want to be executed again before it, times windows;
        few_choices: in any case.
        whole_limit: for a model with nothing fixed;
        longer: times as long for each further.
        rounds: of fixing and looking closer;
        part_limit: for each model there.
        radius: windows on both sides of one that does not fit that are open;
        wider: times as many where that costs more than
        much: share of the step.
        open_limit, open_gap: for a model with a few choices open; the gap is a share of the step.
        shrink: of what is open, stays open where that was not solved in time;
        grow: so much more is opened where it took less than
        soon: share of the time.
        first_part: of all windows or ops, one in so many is open at first.
        settle_gap: part of the tolerance to which models are solved that only have to fit.
    """

    small_share: float = 5e-4
    coarse_capacities: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
    coarse_limit: float = 2.0
    tight_share: float = 0.85
    windows: int = 120
    size: int = 120_000
    even_windows: int = 12
    choices: int = 2_000
    few_choices: int = 15
    whole_limit: float = 5.0
    longer: float = 1.5
    rounds: int = 20
    part_limit: float = 3.0
    radius: int = 3
    wider: int = 4
    much: float = 0.01
    open_limit: float = 1.0
    open_gap: float = 1e-4
    shrink: float = 0.8
    grow: float = 0.1
    soon: float = 0.25
    first_part: int = 6
    settle_gap: float = 0.5


@dataclass(frozen=True, slots=True)
class RandomKeyParams:
    """Of eviction tried out by the hundred.

    Attributes:
        exponents: of rules that are drawn.
        guided_rules, factors: tried with each solution of a model as guide; factors of the budget.
        pool: ways that are varied.
        worse: times the best: a run that takes longer is given up.
        fresh: rules drawn before any is varied;
        fresh_share: of the runs after that, that draw one.
        whole_share: of the rules that are drawn, that keep to the budget; the others get a factor of it
        budget_factors: between these.
        varied: shares of the tensors that get another factor in a variation, one of which is drawn.
        rule_share, rule_step: how often its rule varies, and the deviation of each exponent.
        budget_share, budget_step: how often its budget varies, and the deviation of the factor's logarithm.
        most_executions: per op.
        prices, price_step: of the channels' time that are drawn, and the deviation of their logarithm.
    """

    exponents: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
    guided_rules: tuple[EvictionRule, ...] = _GUIDED_RULES
    factors: tuple[float, ...] = (1.0, 1.04)
    pool: int = 4
    worse: float = 1.15
    fresh: int = 40
    fresh_share: float = 0.05
    whole_share: float = 0.25
    budget_factors: tuple[float, float] = (0.9, 1.4)
    varied: tuple[float, ...] = (0.1, 0.025, 0.006)
    rule_share: float = 0.3
    rule_step: float = 0.1
    budget_share: float = 0.3
    budget_step: float = 0.02
    most_executions: float = 8.0
    prices: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1, 0.3)
    price_step: float = 0.3


@dataclass(frozen=True, slots=True)
class RelaxAndFixParams:
    """Of going from the first op to the last.

    Attributes:
        open_windows: before the first place over the budget, that stay open.
        most_solves: before it is given up.
    """

    open_windows: int = 2
    most_solves: int = 400


@dataclass(frozen=True, slots=True)
class SegmentParams:
    """Of large-neighbourhood search, segment by segment.

    Attributes:
        tight_share: of the budget: new ops that take as much have a window of their own.
        rounds: of solving and looking closer.
        first_length: new ops of a segment;
        longer: times as many in the next sweep.
    """

    tight_share: float = 0.7
    rounds: int = 6
    first_length: int = 10
    longer: float = 1.6


@dataclass(frozen=True, slots=True)
class RefinementParams:
    """Of how closely a model looks where its solution does not fit.

    Attributes:
        piece: executions: of a long run over the budget the worst of every piece of about this length is looked at;
        most_pieces: but of no more than so many.
        nearly: share of the budget: what takes as much is likely to be next over it.
        passes: over an order, each leaving out what it can.
        most_waits: of the places where a schedule with round trips waits for a copy, those of the longest waits.
    """

    piece: int = 12
    most_pieces: int = 8
    nearly: float = 0.9
    passes: int = 8
    most_waits: int = 4


@dataclass(frozen=True, slots=True)
class OffloadingParams:
    """Of schedules that offload tensors to the host and reload them.

    Attributes:
        capacities, slower: shares of the memory, and times as slow a link, that the coarse model is solved for.
        weight: of the link beside memory in which of these come first;
        first: as many of them before any other strategy.
        limit, gap: of each of these models; the gap is a share of the step.
        places, tensors: of the longest waits so many, and at each so many tensors, are tried to do without;
        longest: if no more ops than this make one again;
        least_gain: and that takes less time by this share.
        near: times the best schedule's time: what takes no longer is improved, though it is not the best.
        prices: of the channels' time, for rules of eviction, the last so high that only what cannot be made again is copied;
        rules_limit: for all of these while nothing else looks for schedules, and once more for rules that are drawn;
        guided_limit, runs: for rules with guides, and of others at a time.
    """

    capacities: tuple[float, ...] = (1.0, 0.99, 0.98, 0.97, 0.96, 0.94)
    slower: tuple[float, ...] = (1.0, 1.1, 1.2)
    weight: float = 0.2
    first: int = 2
    limit: float = 5.0
    gap: float = 5e-4
    places: int = 3
    tensors: int = 20
    longest: int = 4
    least_gain: float = 1e-6
    near: float = 1.01
    prices: tuple[float, ...] = (0.03, 0.0, 0.1, 1e3)
    rules_limit: float = 3.0
    guided_limit: float = 2.0
    runs: int = 4


@dataclass(frozen=True, slots=True)
class PartParams:
    """Of searches in a part of the choices, beside that of the whole.

    Attributes:
        least_idle: how long one that is behind the whole goes on at least without getting better;
        idle_share: and what share of its time.
        between, between_share: between the beginnings of two that may have processes, or this share of the limit if that is less.
    """

    least_idle: float = 20.0
    idle_share: float = 0.5
    between: float = 3.0
    between_share: float = 0.05


@dataclass(frozen=True, slots=True)
class CommitmentParams:
    """Of plain graphs that solutions with optional ops commit to.

    Attributes:
        share: each is solved to this share of the tolerance.
        options_share: times as long as that took, options of the best schedule are chosen again, where nothing can be offloaded.
    """

    share: float = 0.25
    options_share: float = 2.0


@dataclass(frozen=True, slots=True)
class PlacementParams:
    """Of placements on several devices that are varied.

    Attributes:
        memory: a variation is compared with what was accepted so many variations ago, and twice as many each time that this has
            come to nothing;
        most_memory: at most;
        idle: after so many without a better one it begins again from the best,
        beginnings: so often.
        first: as long as this it goes on before anything is solved, or this share of the limit if that is less:
        first_share.
        again_share: of the variations, in which one op is computed again, or no more, where what it makes is copied;
        sent_share: and in which a tensor goes to another memory where it is made, or no more, and comes back;
        linked_share: of the others, in which ops move that depend on each other, rather than such as follow each other;
        few: in half of them so many move as are drawn with this probability of an end after each.
        slice: as long as this it goes on beside other searches at a time.
    """

    memory: int = 30
    most_memory: int = 500
    idle: int = 2_000
    beginnings: int = 10
    first: float = 2.0
    first_share: float = 0.2
    again_share: float = 0.2
    sent_share: float = 0.15
    linked_share: float = 0.5
    few: float = 0.5
    slice: float = 0.5


@dataclass(frozen=True, slots=True)
class BranchParams:
    """Of the relaxation split by what is executed in a few places.

    Attributes:
        spread: share of the capacity by which what an op takes differs from what it stands for, where it is worth deciding;
        share: of the largest such difference.
        places: where there are more, nothing is decided.
        alike: ways of which the times differ by no more than this share of the step are one.
    """

    spread: float = 0.05
    share: float = 0.5
    places: int = 4
    alike: float = 3e-3


@dataclass(frozen=True, slots=True)
class WindowsParams:
    """All parameters of the exact solver, by what they tune."""

    bound: BoundParams = field(default_factory=BoundParams)
    first_schedule: FirstScheduleParams = field(default_factory=FirstScheduleParams)
    portfolio: PortfolioParams = field(default_factory=PortfolioParams)
    neighbourhoods: NeighbourhoodParams = field(default_factory=NeighbourhoodParams)
    random_keys: RandomKeyParams = field(default_factory=RandomKeyParams)
    relax_and_fix: RelaxAndFixParams = field(default_factory=RelaxAndFixParams)
    segments: SegmentParams = field(default_factory=SegmentParams)
    offloading: OffloadingParams = field(default_factory=OffloadingParams)
    refinement: RefinementParams = field(default_factory=RefinementParams)
    branches: BranchParams = field(default_factory=BranchParams)
    parts: PartParams = field(default_factory=PartParams)
    commitments: CommitmentParams = field(default_factory=CommitmentParams)
    placement: PlacementParams = field(default_factory=PlacementParams)

    @classmethod
    def from_toml(cls, path: Path | str) -> Self:
        """Return the parameters of a TOML file, which has a table for each group; what is not there is the default.

        Raises:
            UsageError: the file cannot be read, or has an unknown key, a value of another type, or an unknown method to imitate.
        """
        params = read_params(cls, path)
        if unknown := [name for name in params.first_schedule.imitated if name not in SOLVERS]:
            raise UsageError(f"{path}: first_schedule.imitated has {unknown[0]!r}: choose from {', '.join(SOLVERS)}")
        return params

    def recorded(self) -> dict[str, object]:
        """As results record them: by group and name, in what JSON has."""
        recorded: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return recorded

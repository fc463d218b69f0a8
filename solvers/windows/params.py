"""Parameters of the exact solver: they change how fast it finds schedules and proofs, not what is proved.

Durations are in the unit of the clock (``solvers.clock``): seconds, or units of work. Shares of the step are of its time without
recomputation. The values were found on the graphs of ``make bench-solve``.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from graphs.errors import UsageError
from solvers.eviction.rules import RULES, TIGHT_RULES, EvictionRule
from solvers.params_file import check_values, read_params
from solvers.registry import SOLVERS

# Methods that try most come last.
_IMITATED = ("checkpoint-blocks", "sac-attention", "sac-every-second", "chen-sqrt", "dtr", "memory-budget", "chen-greedy", "sac")
_GUIDED_RULES = (
    EvictionRule(),
    EvictionRule(size=0.5, distance=0.5),
    EvictionRule(size=0.25, distance=2.0),
    EvictionRule(size=0.25, distance=0.5),
)


@dataclass(frozen=True, slots=True)
class BoundParams:
    """Parameters of the relaxation, and of the end of the solve.

    Attributes:
        first_slice: duration of the relaxation in the first round;
        longer: factor to it in each further round, as a stopped model starts from scratch.
        inner_gap: models are solved to this share of the tolerance,
        close_gap: or to this one once the tolerance is reached.
        least_moment: a solve within the tolerance goes on for at least this long;
        moment_share: and for this share of the time so far.
        arithmetic: relative error that HiGHS's arithmetic may have in a bound.
        most_bytes: growth of the process at which a model is given up.
        small_ops: graphs of at most so many ops are searched state by state before windows are refined further;
        max_states: most states of that search, about a kilobyte each.
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
    """Parameters of methods that are tried before and in parallel with models.

    Attributes:
        rules, tight_rules: eviction rules; the latter for budgets at which the others fail.
        early_rules_limit: for rules before the relaxation, until one finds a schedule;
        rules_limit: for the other rules while no other strategy searches;
        few_executions: per op of the graph.
        eviction_limit: for eviction rules while other strategies search.
        offloaded_limit: for orders that offload, in graphs with transfers to the host.
        imitated: baselines whose schedules are offered;
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
    """Parameters of the portfolio and of the strategies in it.

    Attributes:
        idle_runs: evictions without improvement before random keys end.
        even_share: share of the time for a strategy that gains nothing, relative to 1 for the one that gains most;
        restarts_share: for restarts, in graphs without transfers to the host.
        slow: relative gain in a unit of time below which all strategies get about the same time.
        memory: factor to past gains and durations per unit of time.
        pscost_minreliable: HiGHS's option: searches for schedules need many nodes rather than a bound, so less strong branching
            than by default.
    """

    idle_runs: int = 200
    even_share: float = 0.25
    restarts_share: float = 0.05
    slow: float = 1e-4
    memory: float = 0.95
    pscost_minreliable: int = 1


@dataclass(frozen=True, slots=True)
class NeighbourhoodParams:
    """Parameters of the restricted model.

    Attributes:
        small_share: of the capacity, for all tensors that are assumed to be always in memory.
        coarse_capacities: shares of the capacity for which coarse models are solved;
        coarse_limit: for each of them.
        tight_share: of the budget; an op that needs as much has a window of its own.
        windows: about so many at first, or more in small graphs, up to
        size: windows times ops.
        even_windows: windows of equal time in graphs with transfers to the host.
        candidates: recomputations that may be needed before an op, times windows;
        few_candidates: least number of them.
        whole_limit: for a model with nothing fixed;
        longer: factor to it for each further one.
        rounds: of fixing and refining;
        part_limit: for each model there.
        radius: open windows on both sides of one that exceeds the budget;
        wider: factor to it if the repair costs more than
        much: share of the step.
        open_limit, open_gap: for a model with few open variables; the gap is a share of the step.
        shrink: factor to the size of the neighbourhood after a solve that ran out of time;
        grow: relative growth of it after a solve that took less than
        soon: share of its time.
        first_part: one window or op in so many is open at first.
        settle_gap: share of the tolerance for models that only have to fit.
    """

    small_share: float = 5e-4
    coarse_capacities: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
    coarse_limit: float = 2.0
    tight_share: float = 0.85
    windows: int = 120
    size: int = 120_000
    even_windows: int = 12
    candidates: int = 2_000
    few_candidates: int = 15
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
    """Parameters of eviction with random keys.

    Attributes:
        exponents: of random rules.
        guided_rules, factors: tried with each solution of a model as guide; factors to the budget.
        pool: number of runs that are varied.
        worse: factor to the best time at which a run is given up.
        fresh: random rules before the first variation;
        fresh_share: share of random rules in later runs.
        whole_share: share of random rules that use the whole budget; others use a factor
        budget_factors: between these.
        varied: shares of the tensors that get another factor in a variation, one of which is drawn.
        rule_share, rule_step: probability of a change of the rule, and deviation of each exponent.
        budget_share, budget_step: probability of a change of the budget, and deviation of the factor's logarithm.
        most_executions: per op.
        prices, price_step: random prices of channel time, and deviation of their logarithm.
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
class RefinementParams:
    """Parameters of the refinement of a model.

    Attributes:
        piece: length of the pieces of a long run over the budget, of each of which the worst execution is refined;
        most_pieces: at most so many.
        nearly: share of the budget that counts as likely to exceed it next.
        passes: of pruning over an order.
        most_waits: places with the longest waits for transfers that are refined.
    """

    piece: int = 12
    most_pieces: int = 8
    nearly: float = 0.9
    passes: int = 8
    most_waits: int = 4


@dataclass(frozen=True, slots=True)
class OffloadingParams:
    """Parameters of schedules that offload tensors to the host and reload them.

    Attributes:
        capacities, slower: shares of the memory, and slowdowns of the link, for which the coarse model is solved.
        weight: of the link relative to memory in the order of these;
        first: number of them before any other strategy.
        limit, gap: of each of these models; the gap is a share of the step.
        places, tensors: longest waits, and tensors at each, that are tried without a transfer;
        longest: if at most so many ops recompute the tensor;
        least_gain: and the step becomes faster by this share.
        near: factor to the best time up to which a schedule is improved although it is not the best.
        prices: of channel time, for eviction rules; the last is so high that only tensors that cannot be recomputed are
            offloaded;
        rules_limit: for eviction rules at all of these, in parallel with the portfolio, and for random rules in it;
        guided_limit, runs: for rules with guides, and the number of others at a time.
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
    """Parameters of searches of smaller sets of options in the background.

    Attributes:
        least_idle: such a search, if it is behind the whole, goes on at least so long without improvement;
        idle_share: and for this share of its time.
        between, between_share: time between the starts of two processes, or this share of the limit if that is less.
    """

    least_idle: float = 20.0
    idle_share: float = 0.5
    between: float = 3.0
    between_share: float = 0.05


@dataclass(frozen=True, slots=True)
class CommitmentParams:
    """Parameters of plain graphs of solutions with optional ops.

    Attributes:
        share: each is solved to this share of the tolerance.
        options_share: duration of the search for other options of the best schedule, relative to that solve, in graphs without
            transfers to the host.
    """

    share: float = 0.25
    options_share: float = 2.0


@dataclass(frozen=True, slots=True)
class PlacementParams:
    """Parameters of variations of placements on several devices.

    Attributes:
        memory: late acceptance: a variation is compared with the one accepted so many variations ago, and twice as many after
            each restart;
        most_memory: at most so many.
        idle: variations without improvement before a restart from the best,
        beginnings: number of restarts.
        first, first_share: duration before other strategies, at most this share of the limit.
        recompute_share: share of variations that add or remove a recomputation of an op instead of a transfer;
        sent_share: that add or remove a transfer of a tensor to another device where it is produced;
        linked_share: of the others, share that move dependent ops instead of consecutive ones;
        few: half of them move as many ops as are drawn with this probability of an end after each.
        slice: duration at a time in parallel with other searches.
    """

    memory: int = 30
    most_memory: int = 500
    idle: int = 2_000
    beginnings: int = 10
    first: float = 2.0
    first_share: float = 0.2
    recompute_share: float = 0.2
    sent_share: float = 0.15
    linked_share: float = 0.5
    few: float = 0.5
    slice: float = 0.5


@dataclass(frozen=True, slots=True)
class BranchParams:
    """Parameters of the relaxation split by decisions in a few places.

    Attributes:
        spread: least difference in memory between an op and its alternative for a decision, as a share of the capacity;
        share: and of the largest such difference.
        places: nothing is decided if there are more places.
        alike: alternatives whose times differ by at most this share of the step count as one.
    """

    spread: float = 0.05
    share: float = 0.5
    places: int = 4
    alike: float = 3e-3


@dataclass(frozen=True, slots=True)
class WindowsParams:
    """All parameters of the exact solver, grouped by strategy.

    Raises:
        UsageError: a value is of another type or negative, or a method to imitate is unknown.
    """

    bound: BoundParams = field(default_factory=BoundParams)
    first_schedule: FirstScheduleParams = field(default_factory=FirstScheduleParams)
    portfolio: PortfolioParams = field(default_factory=PortfolioParams)
    neighbourhoods: NeighbourhoodParams = field(default_factory=NeighbourhoodParams)
    random_keys: RandomKeyParams = field(default_factory=RandomKeyParams)
    offloading: OffloadingParams = field(default_factory=OffloadingParams)
    refinement: RefinementParams = field(default_factory=RefinementParams)
    branches: BranchParams = field(default_factory=BranchParams)
    parts: PartParams = field(default_factory=PartParams)
    commitments: CommitmentParams = field(default_factory=CommitmentParams)
    placement: PlacementParams = field(default_factory=PlacementParams)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.bound.first_slice:
            raise UsageError("bound.first_slice is 0: must be above 0")
        if self.bound.longer < 1:
            raise UsageError(f"bound.longer is {self.bound.longer!r}: must be at least 1")
        methods = [name for name, entry in SOLVERS.items() if entry.module.startswith("solvers.baselines.")]
        if unknown := [name for name in self.first_schedule.imitated if name not in methods]:
            raise UsageError(f"first_schedule.imitated has {unknown[0]!r}: choose from {', '.join(methods)}")

    @classmethod
    def from_toml(cls, path: Path | str) -> Self:
        """Return the parameters of a TOML file with a table for each group; missing ones have their defaults.

        Raises:
            UsageError: the file cannot be read, or has an unknown key or a wrong value.
        """
        return read_params(cls, path)

    def recorded(self) -> dict[str, object]:
        """Return the parameters by group and name, as JSON values, as recorded in results."""
        recorded: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return recorded

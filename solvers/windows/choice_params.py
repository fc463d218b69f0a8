"""The part of ``params.py`` that is for graphs with more to choose than when to execute the program's ops."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundTripParams:
    """Of schedules in which tensors go to the host and come back.

    Attributes:
        capacities, slower: shares of the memory, and times as slow a link, that the coarse model is solved for.
        weight: of the link beside memory in which of these come first;
        first: as many of them before any other way.
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
        anew: times as long as that took the best schedule is chosen anew, where there are no round trips.
    """

    share: float = 0.25
    anew: float = 2.0


@dataclass(frozen=True, slots=True)
class PlacingParams:
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

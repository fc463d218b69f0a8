"""Where a schedule waits for copies: compute something again that is copied now."""

from collections.abc import Callable, Iterator, Sequence

from solvers.problem import Problem
from solvers.windows.choice_params import RoundTripParams
from solvers.windows.decoding.decode import Trial, order_of, try_out
from solvers.windows.decoding.host_transfers import Stay, stays_of, timed
from solvers.windows.relaxation.discretization import Discretization

Away = frozenset[tuple[int, int]]


def with_fewer_waits(
    problem: Problem, trial: Trial, budget_bytes: int, should_stop: Callable[[], bool], params: RoundTripParams
) -> Trial:
    """`trial`, which fits, with what is copied computed again instead, one tensor after another, while that takes less time."""
    whole = Discretization((problem.ops - 1,))
    found: Trial | None = trial
    while found is not None:
        trial, found = found, None
        for computed, away in _computing_instead(problem, trial, params):
            if should_stop():
                return trial
            run = timed(problem, computed, away)
            fits = max(run.memory_bytes) + problem.graph.static_bytes <= budget_bytes
            if fits and run.time_s < trial.time_s * (1 - params.least_gain):
                found = try_out(problem, order_of(whole, computed, run.away))
                break
    return trial


def _computing_instead(problem: Problem, trial: Trial, params: RoundTripParams) -> Iterator[tuple[Sequence[int], Away]]:
    """Orders in which one tensor less is away: at the longest waits, of those that went before it the cheapest a second."""
    assert problem.copies is not None
    computed, away = trial.order.computed, trial.order.away
    stays = stays_of(problem, computed, away)
    waits = sorted(((wait_s, place) for place, wait_s in enumerate(trial.waits_s) if wait_s > 0), reverse=True)
    chains: dict[tuple[int, int], list[int] | None] = {}
    tried: set[tuple[int, int]] = set()
    for wait_s, place in waits[: params.places]:
        ranked: list[tuple[float, tuple[int, int]]] = []
        for stay in stays:
            pair = (stay.tensor, stay.read)
            if not stay.fetched or stay.after >= place or pair in tried:
                continue
            if pair not in chains:
                chains[pair] = _chain(problem, stays, computed, pair, params.longest)
            chain = chains[pair]
            cost_s = 0.0 if chain is None else sum(problem.time_s[op] for op in chain)
            if chain is not None and cost_s < wait_s:
                ranked.append((cost_s / problem.copies.trips[stay.tensor].out_s, pair))
        for _, pair in sorted(ranked)[: params.tensors]:
            tried.add(pair)
            chain = chains[pair]
            assert chain is not None
            yield _inserted(problem, computed, away, pair, chain)


def _chain(
    problem: Problem, stays: Sequence[Stay], computed: Sequence[int], pair: tuple[int, int], longest: int
) -> list[int] | None:
    """Ops that make a tensor again right before the position that it is fetched for; None if too many, or they must not run."""
    tensor, place = pair
    there = {stay.tensor for stay in stays if stay.read < place <= stay.end or (stay.read == place and stay.fetched)} - {tensor}
    done = max(computed[:place], default=-1) + 1
    chain: set[int] = set()
    stack = [tensor]
    while stack:
        t = stack.pop()
        op = problem.producers[t]
        if t in there or op in chain:
            continue
        if not problem.recomputable[op] or problem.last_again[op] < done or len(chain) == longest:
            return None
        chain.add(op)
        stack += problem.inputs[op]
    return sorted(chain)


def _inserted(
    problem: Problem, computed: Sequence[int], away: Away, pair: tuple[int, int], chain: Sequence[int]
) -> tuple[Sequence[int], Away]:
    """`computed` with `chain` in place of what `pair` fetches; what the chain reads of what is fetched there comes before it."""
    _, place = pair
    first_read = {t: place + i for i, op in reversed(list(enumerate(chain))) for t in problem.inputs[op]}
    moved = {
        (t, first_read.get(t, at + len(chain)) if at == place else at + len(chain) * (at > place)) for t, at in away - {pair}
    }
    return (*computed[:place], *chain, *computed[place:]), frozenset(moved)

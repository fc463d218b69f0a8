"""Several ways to make the same smaller, which take turns by what they achieve."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from solvers.clock import Clock
from solvers.windows.params import PortfolioParams

_ENDED = object()


def take_turns(
    ways: Sequence[Iterator[None]],
    value: Callable[[], float],
    should_stop: Callable[[], bool],
    clock: Clock,
    params: PortfolioParams,
    *,
    least: Sequence[float] | None = None,
    already: Sequence[float] | None = None,
) -> None:
    """Take steps of several ways until all have ended; a way that has gained more lately gets more of the time.

    The principle is that of adaptive large-neighbourhood search (Ropke and Pisinger, Transportation Science 2006).

    Args:
        value: what they make smaller.
        least: for each way its share where it gains nothing, beside 1 for the one that gains most; by default even.
        clock: what their time is counted by.
        already: what each is taken to have had; by default none.
    """
    ways, least = list(ways), list(least or [params.even_share] * len(ways))
    gained, spent = [0.0] * len(ways), list(already or [0.0] * len(ways))
    while ways and not should_stop():
        shares = [few + gain / (max(gained) + params.slow) for few, gain in zip(least, gained, strict=True)]
        turn = min(range(len(ways)), key=lambda i: spent[i] / shares[i])
        before, began = value(), clock.now
        ended = next(ways[turn], _ENDED) is _ENDED
        took = clock.now - began
        gain = (before - value()) / before if before > 0 else 0.0
        fading = params.memory**took
        gained = [fading * g for g in gained]
        spent = [fading * s for s in spent]
        gained[turn] += gain / took if np.isfinite(gain) and took > 0 else 0.0
        spent[turn] += took
        if ended:
            del ways[turn], least[turn], gained[turn], spent[turn]

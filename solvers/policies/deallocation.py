"""When a run in ``online`` lets go of what the program no longer needs."""

from enum import StrEnum


class Deallocation(StrEnum):
    """What happens when the program has no further use for a tensor."""

    EAGER = "eager"  # it is evicted; recomputing another may bring it back, to be evicted when memory runs out
    IGNORE = "ignore"  # nothing
    BANISH = "banish"  # once all that was made from it is in memory, it goes for good, and that is pinned

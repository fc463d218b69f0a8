"""The modules of a model in a few groups, one colour each."""

from collections.abc import Sequence
from itertools import groupby

_MOST = 14
_REST = "other modules"


def group_modules(names: Sequence[str]) -> dict[str, str]:
    """Return the group of each of `names`, the blocks of ops in program order: at most ``_MOST`` groups, in order of appearance.

    If there are too many blocks, numbered neighbours share a group, ``h.0`` to ``h.3``; blocks beyond form one group.
    """
    distinct = list(dict.fromkeys(names))
    if len(distinct) <= _MOST:
        return {name: name for name in distinct}
    runs = [list(run) for _, run in groupby(distinct, key=_get_stem)]
    single = sum(len(run) == 1 for run in runs)
    each = next(
        (size for size in range(2, len(distinct) + 1) if sum(-(-len(run) // size) for run in runs) <= max(_MOST, single + 1)),
        len(distinct),
    )
    found: dict[str, str] = {}
    for run in runs:
        for part in (run[i : i + each] for i in range(0, len(run), each)):
            label = part[0] if len(part) == 1 else f"{part[0]} to {part[-1].rpartition('.')[2]}"
            found |= dict.fromkeys(part, label)
    labels = list(dict.fromkeys(found.values()))
    rest = set(labels[_MOST - 1 :]) if len(labels) > _MOST else set()
    return {name: _REST if label in rest else label for name, label in found.items()}


def _get_stem(name: str) -> str:
    """Return the common prefix of numbered blocks, ``h.`` for ``h.3``; other names are returned unchanged."""
    stem, dot, last = name.rpartition(".")
    return f"{stem}{dot}" if last.isdecimal() else name

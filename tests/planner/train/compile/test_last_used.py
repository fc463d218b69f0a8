"""Values that are kept while they are used."""

import pytest

from planner.train.compile.lru import LRUCache


def test_the_one_used_longest_ago_goes_first() -> None:
    kept: LRUCache[str, str] = LRUCache(2)
    made: list[str] = []

    def use(key: str) -> str:
        return kept.use(key, lambda: made.append(key) or key.upper())

    assert [use(key) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]
    assert kept.values() == ("A", "B")


def test_failed_construction_leaves_the_cache_unchanged() -> None:
    kept: LRUCache[str, float] = LRUCache(1)
    kept.use("a", lambda: 1.0)
    with pytest.raises(ZeroDivisionError):
        kept.use("b", lambda: 1 / 0)
    assert kept.values() == (1.0,)
    kept.clear()
    assert kept.values() == ()

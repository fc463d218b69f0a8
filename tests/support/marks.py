"""Parameters of tests that run only with ``-m slow``."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: object) -> list[Any]:
    """Mark parameters as slow; a tuple is one for several names."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]


def slow_among(values: Iterable[object], *chosen: object) -> list[Any]:
    """Return `values`, and mark the `chosen` ones as slow."""
    return [slow(value)[0] if value in chosen else value for value in values]


def slow_except(values: Iterable[object], *quick: object) -> list[Any]:
    """Return `values`, and mark all but the `quick` ones as slow."""
    return [value if value in quick else slow(value)[0] for value in values]

"""Bytes and seconds: parsing and formatting."""

import math
import re

from planner.graphs.errors import BudgetError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
LARGEST_FRACTION = 1000.0  # of an overhead or a tolerance: more is a slip of the pen
UNLIMITED_BYTES = 2**63 - 1  # the largest budget: graphs that can be read need less
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]+|%)?\s*", re.IGNORECASE)


def parse_budget(text: str, *, peak_bytes: int) -> int:
    """Return the budget in bytes of ``8GB``, ``7.5 GiB`` or ``60%`` (of `peak_bytes`); at most `UNLIMITED_BYTES`.

    Args:
        text: amount and unit; units are case-insensitive, GB = 10^9 and GiB = 2^30.
        peak_bytes: the predicted peak of eager PyTorch, to which percentages refer.

    Raises:
        BudgetError: no amount, no unit, an unknown unit, or not above zero.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise BudgetError(f"budget {text!r} is not an amount of memory: write 8GB, 7.5GiB or 60%{explain_comma(text)}")
    amount, unit = float(match[1]), match[2]
    if unit is None:
        raise BudgetError(
            f"budget {text!r} has no unit: write {match[1]}GB (10^9 bytes), {match[1]}GiB (2^30 bytes), {match[1]}B (bytes) "
            f"or {amount if amount > 1 else 100 * amount:g}% (of the predicted peak of plain eager PyTorch)"
        )
    if unit == "%":
        size = amount / 100 * peak_bytes
    elif unit.lower() in _BYTES:
        size = amount * _BYTES[unit.lower()]
        size = round(size) if 1 <= size < math.inf else size  # 4.06 * 10**6 is 4059999.9999999995
    else:
        raise BudgetError(f"budget {text!r} has the unknown unit {unit!r}: use B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %")
    if not math.isfinite(size) or size < 1:
        raise BudgetError(f"budget {text!r} is {size:g} bytes: it must be at least one byte and finite")
    return min(int(size), UNLIMITED_BYTES)


def parse_fraction(text: str) -> float:
    """Return the fraction, from 0 to `LARGEST_FRACTION`, of ``10%`` or ``0.1``; raise a BudgetError if it is neither."""
    number = text.strip().removesuffix("%")
    percent = number != text.strip()
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LARGEST_FRACTION:
        way = f"write 0.1% or 0.001{explain_comma(text)}"
        raise BudgetError(f"{text!r} is not a fraction from 0 to {LARGEST_FRACTION:.0f}: {way}")
    if value > 1 and not percent:
        raise BudgetError(f"{text!r} has no unit: write {value:g}%, or {100 * value:g}% if that many times is meant")
    return value


def explain_comma(text: str) -> str:
    """Return what to add to the advice on how to write an amount if `text` has a comma; else an empty text."""
    return ", with a decimal point in place of the comma" if "," in text else ""


def parse_rate(text: str) -> float:
    """Return the bytes per second of ``25GB/s``; raise a BudgetError if it is not an amount of memory and ``/s``."""
    amount, slash, unit = text.strip().rpartition("/")
    if not slash or unit.strip() != "s" or amount.strip().endswith("%"):
        raise BudgetError(f"{text!r} is not a rate: write 25GB/s")
    return float(parse_budget(amount, peak_bytes=0))


def format_bytes(size_bytes: int | float) -> str:
    """Return `size_bytes` with a decimal unit and two decimals: ``8.41 GB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:,.2f} {unit}"
    return f"{int(size_bytes)} B"


def format_enough(size_bytes: int) -> str:
    """Return `size_bytes` as ``format_bytes`` does, but rounded up: a budget of what it says is at least `size_bytes`."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= scale:
            return f"{-(-size_bytes * 100 // scale) / 100:.2f} {unit}"
    return format_bytes(size_bytes)


def format_seconds(time_s: float) -> str:
    """Return `time_s` with a suitable unit: ``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.3g} {unit}" if time_s < 1000 else f"{time_s:.0f} s"
    return f"{time_s / 1e-9:.3g} ns" if time_s else "0 s"


def format_ratio(ratio: float) -> str:
    """Return a fraction as a percentage with two decimals: ``6.96%``; zero has no sign."""
    return f"{100 * ratio:z.2f}%"

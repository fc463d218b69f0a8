"""Parsing and formatting of amounts."""

import argparse
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from planner.cli import argument_types
from planner.graphs.errors import BudgetError
from planner.graphs.units import format_bytes, format_enough, format_ratio, format_seconds, parse_budget

PEAK_BYTES = 2 * 10**9


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        (" 8GB ", 8 * 10**9),
        ("7.5GiB", 15 * 2**29),
        ("7.5gib", 15 * 2**29),
        (".5MB", 500_000),
        ("4.06MB", 4_060_000),
        ("1e3kB", 10**6),
        ("1KiB", 1024),
        ("3MiB", 3 * 2**20),
        ("1TB", 10**12),
        ("2TiB", 2**41),
        ("12B", 12),
        ("60%", 1_200_000_000),
        ("100%", PEAK_BYTES),
        ("12.5 %", 250_000_000),
        ("150%", 3 * 10**9),
    ],
)
def test_budgets_are_parsed(text: str, size_bytes: int) -> None:
    assert parse_budget(text, peak_bytes=PEAK_BYTES) == size_bytes
    assert argument_types.check_budget(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8", "has no unit: write 8GB"),
        ("8.5", "8.5GiB"),
        ("", "is not an amount of memory"),
        ("GB", "is not an amount of memory"),
        ("-8GB", "is not an amount of memory"),
        ("8GB9", "is not an amount of memory"),
        ("nan%", "is not an amount of memory"),
        ("1,5GB", "60%, with a decimal point in place of the comma"),
        ("8GBit", "unknown unit 'GBit'"),
        ("8G", "unknown unit 'G'"),
        ("0GB", "at least one byte"),
        ("0%", "at least one byte"),
        ("0.1B", "at least one byte"),
        ("1e999GB", "finite"),
    ],
)
def test_invalid_budgets_raise(text: str, said: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(text, peak_bytes=PEAK_BYTES)
    assert said in str(caught.value) and repr(text) in str(caught.value)
    with pytest.raises(argparse.ArgumentTypeError, match="budget"):
        argument_types.check_budget(text)


@given(st.integers(1, 10**15))
def test_whole_bytes_are_exact(size_bytes: int) -> None:
    assert parse_budget(f"{size_bytes}B", peak_bytes=1) == size_bytes


@given(st.integers(1, 10**15), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "%"]))
def test_parsing_is_monotonic(amount: int, unit: str) -> None:
    assert parse_budget(f"{amount}{unit}", peak_bytes=100) <= parse_budget(f"{amount + 1}{unit}", peak_bytes=100)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (8_410_000_000, "8.41 GB"),
        (12_345_678, "12.35 MB"),
        (1_234_567_890_123, "1,234.57 GB"),
    ],
)
def test_sizes_are_shown_with_a_decimal_unit(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(10**6, 10**15))
def test_formatted_size_can_be_parsed_as_a_budget(size_bytes: int) -> None:
    again = parse_budget(format_bytes(size_bytes).replace(",", ""), peak_bytes=1)
    assert abs(again - size_bytes) <= 0.006 * size_bytes


@pytest.mark.parametrize(
    ("time_s", "text"), [(0.0, "0 s"), (0.0123, "12.3 ms"), (2.0, "2 s"), (1.5e-6, "1.5 us"), (3e-9, "3 ns"), (4000.4, "4000 s")]
)
def test_times_are_shown_with_a_unit_that_suits(time_s: float, text: str) -> None:
    assert format_seconds(time_s) == text


def test_ratios_are_shown_in_percent() -> None:
    assert format_ratio(0.0696) == "6.96%"
    assert format_ratio(0.0) == format_ratio(-1e-9) == "0.00%"


@pytest.mark.parametrize(
    ("text", "time_s"), [("90", 90), ("90s", 90), ("10m", 600), ("10 min", 600), ("1.5h", 5400), (".5", 0.5), ("2H", 7200)]
)
def test_durations_are_parsed(text: str, time_s: float) -> None:
    assert argument_types.parse_duration(text) == time_s


@pytest.mark.parametrize(
    ("text", "value"), [("0.1%", 0.001), ("0.001", 0.001), ("0", 0.0), ("5 %", 0.05), ("1e-3", 0.001), ("1", 1.0), ("500%", 5.0)]
)
def test_fractions_are_parsed(text: str, value: float) -> None:
    assert argument_types.parse_fraction_argument(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((argument_types.parse_duration, text) for text in ("", "0", "-1", "1d", "10 parsecs", "inf", "nan", "9" * 400)),
        *((argument_types.parse_fraction_argument, text) for text in ("", "%", "-1%", "nan", "inf", "a", "1%%", "10")),
        *((argument_types.count, text) for text in ("", "0", "-1", "1.5", "a", "9999999", "\u00b2")),
        *((argument_types.parse_seed, text) for text in ("", "-1", "1.5", "a", str(2**63))),
        *((argument_types.model, text) for text in ("gpt2", "zoo:", "a.py", "zoo:gpt2,", "zoo:gpt2,layers", "zoo:a,b=1,b=2")),
    ],
)
def test_invalid_amounts_raise_usage_errors(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


@pytest.mark.parametrize("text", ["1e30GB", "9223372036854775808B", "1e30%", "1e300B"])
def test_overflowing_budget_is_unlimited(text: str) -> None:
    assert parse_budget(text, peak_bytes=PEAK_BYTES) == 2**63 - 1
    assert argument_types.check_budget(text) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(999, "999 B"), (1000, "1.00 kB"), (676_512, "676.52 kB"), (8_410_000_001, "8.42 GB"), (1_234_000_000_000, "1234.00 GB")],
)
def test_format_enough_rounds_up(size_bytes: int, text: str) -> None:
    assert format_enough(size_bytes) == text


@given(st.integers(1, 10**15))
def test_format_enough_parses_to_a_sufficient_budget(size_bytes: int) -> None:
    budget_bytes = parse_budget(format_enough(size_bytes), peak_bytes=0)
    assert size_bytes <= budget_bytes <= size_bytes * 1.01 + 1

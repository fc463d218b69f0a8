"""Parsers of command-line arguments: amounts, budgets, names and files."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from planner.capture.workload.workload import ModelSpec, parse_spec
from planner.graphs.errors import BudgetError, ModelError, UsageError
from planner.graphs.units import explain_comma, parse_budget, parse_fraction, parse_rate
from planner.settings.budget import read_budget
from planner.solvers.registry import check_solver

Parsed = TypeVar("Parsed")

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)")


def check_budget(text: str) -> str:
    """Return `text` if it is an amount of memory; percentages are resolved later."""
    _parse_argument(lambda text: read_budget(text).resolve(10**15), text)  # refuses auto
    return text


def parse_rate_argument(text: str) -> float:
    """Return a rate in bytes per second."""
    return _parse_argument(parse_rate, text)


def parse_solver(text: str) -> str:
    """Return the name of a solver."""
    _parse_argument(check_solver, text)
    return text


def parse_names(text: str) -> tuple[str, ...]:
    """Return names of graph options from comma-separated text."""
    return tuple(part.strip() for part in text.split(","))


def parse_size(text: str) -> int:
    """Return an amount of memory in bytes; percentages raise."""
    if text.strip().endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} is a share of a peak, which changes with the batch: write 80GB or 79GiB")
    return parse_budget(check_budget(text), peak_bytes=0)


def parse_budgets(text: str) -> int | tuple[str, ...]:
    """Return a number of budgets, or budgets from comma-separated text."""
    return count(text.strip()) if text.strip().isdecimal() else parse_budget_list(text)


def parse_budget_list(text: str) -> tuple[str, ...]:
    """Return budgets from comma-separated text."""
    try:
        return tuple(check_budget(part.strip()) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; commas separate budgets") from None


def parse_duration(text: str) -> float:
    """Return seconds above 0 from ``90``, ``90s``, ``10m`` or ``1.5h``."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS_S or not 0 < (time_s := float(match[1]) * _UNITS_S[match[2]]) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0: write seconds, or 90s, 10m, 1.5h{explain_comma(text)}")
    return time_s


def parse_fraction_argument(text: str) -> float:
    """Return a fraction from ``0.001`` or ``0.1%``."""
    return _parse_argument(parse_fraction, text)


def parse_work(text: str) -> float:
    """Return a number of work units above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0: write 60 for the work of about a minute")
    return value


def count(text: str) -> int:
    """Return an integer above 0."""
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999")
    return int(text)


def parse_seed(text: str) -> int:
    """Return a seed: an integer of 0 or more that torch accepts."""
    if not text.isdecimal() or not int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def parse_output(text: str) -> str:
    """Return the path of an output file; ``-`` is the standard output."""
    return "/dev/stdout" if text == "-" else text


def parse_graph(text: str) -> str:
    """Return the path of a graph; what names a model raises."""
    if Path(text.split(":")[0]).suffix == ".py" or text.startswith("zoo:"):
        raise argparse.ArgumentTypeError(f"{text!r} names a model: write its graph first, planner trace {text} -o model.json")
    return text


def model(text: str) -> ModelSpec:
    """Return the specification of a model."""
    return _parse_argument(parse_spec, text)


def _parse_argument(parse: Callable[[str], Parsed], text: str) -> Parsed:
    try:
        return parse(text)
    except (BudgetError, ModelError, UsageError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None

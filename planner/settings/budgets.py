"""Budgets as users write them, and their values in bytes. Never imports torch.

A budget is an amount of memory (``8GB``, ``7.5GiB``, whole bytes), a share of the predicted peak of plain eager PyTorch (``60%``
or the float 0.6), or ``auto``: the free memory of the device. Alternatively, the allowed overhead of a plan can be given: the
budget is then the least memory with that overhead, encoded as the text that ``at_overhead`` returns.
"""

import math

from graphs.errors import BudgetError
from graphs.units import UNLIMITED_BYTES, parse_budget, parse_fraction

AUTO = "auto"
_AT_OVERHEAD = "overhead<="
_WRITTEN = "'8GB', '7.5GiB', '60%'"


def read_budget(budget: str | float) -> str | int:
    """Return `budget`, with a fraction (0.6) converted to a share (``60%``).

    Raises:
        BudgetError: a float is not above 0 and at most 1.
    """
    if not isinstance(budget, float):
        return budget
    if not 0 < budget <= 1:
        raise BudgetError(
            f"budget is {budget!r}: a float is a share of the predicted peak of plain eager PyTorch, above 0 and at most 1, such "
            "as 0.6; write bytes as an int, or text such as '8GB'"
        )
    return f"{100 * budget:.12g}%"


def budget_or_overhead(budget: str | float | None, max_overhead: str | float | None) -> str | int:
    """Return the budget (``read_budget``), or the text for the least memory at `max_overhead`.

    Raises:
        BudgetError: both are given or neither is, the budget is a float that is no share, or the overhead is not a fraction of
            0 or more.
    """
    if (budget is None) == (max_overhead is None):
        given = "neither" if budget is None else f"both (budget={budget!r}, max_overhead={max_overhead!r})"
        raise BudgetError(
            f"give either a budget or max_overhead, not {given}: budget='8GB' for the fastest step within 8 GB, "
            "max_overhead='10%' for the least memory at a tenth more time"
        )
    if budget is not None:
        return read_budget(budget)
    assert max_overhead is not None
    return at_overhead(max_overhead)


def at_overhead(max_overhead: str | float) -> str:
    """Return the text for the least memory at which a step takes at most `max_overhead` longer (0.1 or ``10%``).

    Raises:
        BudgetError: it is not a fraction of 0 or more.
    """
    try:
        share = parse_fraction(max_overhead) if isinstance(max_overhead, str) else float(max_overhead)
    except (BudgetError, TypeError, ValueError):
        share = math.nan
    if isinstance(max_overhead, bool) or not 0 <= share < math.inf:
        raise BudgetError(f"max_overhead is {max_overhead!r}: must be a fraction of the step time, 0 or more: write '10%' or 0.1")
    return f"{_AT_OVERHEAD}{share!r}"


def allowed_overhead(budget: str | int) -> float | None:
    """Return the overhead that `budget` encodes; None if it is a budget."""
    if isinstance(budget, str) and budget.startswith(_AT_OVERHEAD):
        return float(budget.removeprefix(_AT_OVERHEAD))
    return None


def is_auto(budget: str | int | None) -> bool:
    """Return True if the budget is the free memory of the device."""
    return isinstance(budget, str) and budget.strip().lower() == AUTO


def is_share(budget: str | int) -> bool:
    """Return True if the budget is a share of the peak of eager PyTorch."""
    return isinstance(budget, str) and budget.strip().endswith("%")


def budget_in_bytes(budget: str | int, peak_bytes: int) -> int:
    """Return a budget in bytes.

    Args:
        budget: as ``planner.solve`` takes it, neither ``auto`` nor an overhead.
        peak_bytes: the predicted peak of plain eager PyTorch, which shares are shares of.

    Raises:
        BudgetError: it cannot be read, is not above zero, or its bytes depend on a device or a solve.
    """
    if is_auto(budget):
        raise BudgetError(
            "budget 'auto' is the free memory of a device, and there is no device here, only a graph: write an amount such as "
            f"{_WRITTEN}, or use it where the model is: planner.compile, the trainers, torch.compile, planner advise"
        )
    if isinstance(budget, str) and allowed_overhead(budget) is not None:
        raise BudgetError("max_overhead= is not known in bytes before a solve: give a budget here")
    if isinstance(budget, str):
        return parse_budget(budget, peak_bytes=peak_bytes)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise BudgetError(f"budget is {budget!r}: must be whole bytes, above 0, or text such as {_WRITTEN} or 'auto'")
    return min(budget, UNLIMITED_BYTES)


def cache_key(budget: str | int) -> str | int:
    """Return the key of cached plans: bytes, however they are written; shares and overheads are unchanged."""
    known = is_share(budget) or (isinstance(budget, str) and allowed_overhead(budget) is not None)
    return budget if known else budget_in_bytes(budget, 0)

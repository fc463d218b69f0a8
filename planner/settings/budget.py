"""Budgets: read once where users write them, and typed from there on. Never imports torch.

A budget is an amount of memory (``8GB``, ``7.5GiB``, whole bytes), a share of the predicted peak of plain eager PyTorch (``60%``
or the float 0.6), or ``auto``: the free memory of the device. In its place the allowed overhead of a plan can be given: the
budget is then the least memory with that overhead.

Before, a budget travelled as text, and an allowed overhead as the text ``overhead<=0.1``, which eight modules took apart. A type
says now what it is, and what cannot be read is refused before anything is traced.
"""

from dataclasses import dataclass
from numbers import Integral

from planner.graphs.errors import BudgetError
from planner.graphs.units import UNLIMITED_BYTES, parse_budget, parse_fraction

_WRITTEN = "'8GB', '7.5GiB', '60%'"


@dataclass(frozen=True, slots=True)
class Bytes:
    """An amount of memory."""

    size_bytes: int

    def resolve(self, peak_bytes: int) -> int:
        """Return the amount; `peak_bytes` is not needed."""
        del peak_bytes
        return self.size_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the predicted peak of plain eager PyTorch, in percent: products of other fractions round differently."""

    percent: float

    def resolve(self, peak_bytes: int) -> int:
        """Return the share of `peak_bytes`, or raise BudgetError if it is less than a byte."""
        return parse_budget(str(self), peak_bytes=peak_bytes)

    def __str__(self) -> str:
        return f"{repr(self.percent).removesuffix('.0')}%"


@dataclass(frozen=True, slots=True)
class Auto:
    """The free memory of a device."""

    def resolve(self, peak_bytes: int) -> int:
        """Raise BudgetError: there is no device."""
        raise BudgetError(
            "budget 'auto' is the free memory of a device, and there is no device here, only a graph: write an amount such as "
            f"{_WRITTEN}, or use it where the model is: planner.compile, the trainers, torch.compile, planner advise"
        )


@dataclass(frozen=True, slots=True)
class Overhead:
    """The least memory at which a step takes at most `share` longer than keeping everything."""

    share: float

    def resolve(self, peak_bytes: int) -> int:
        """Raise BudgetError: the bytes are found by a solve."""
        raise BudgetError("max_overhead= is not known in bytes before a solve: give a budget here")


Budget = Bytes | Share | Auto | Overhead


def read_budget(budget: str | float | Budget) -> Budget:
    """Return a budget as users write it: an amount, a share or ``auto``.

    Raises:
        BudgetError: it cannot be read, or is not above zero.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        if budget.strip().lower() == "auto":
            return Auto()
        size_bytes = parse_budget(budget, peak_bytes=UNLIMITED_BYTES)  # raises if it cannot be read
        return Share(float(budget.strip()[:-1])) if budget.strip().endswith("%") else Bytes(size_bytes)
    number: object = budget
    if isinstance(number, Integral) and type(budget) is not bool and int(number) >= 1:  # of NumPy too
        return Bytes(min(int(number), UNLIMITED_BYTES))
    if not isinstance(budget, float):
        raise BudgetError(f"budget is {budget!r}: must be whole bytes, above 0, or text such as {_WRITTEN} or 'auto'")
    if not 0 < budget <= 1:
        raise BudgetError(
            f"budget is {budget!r}: a float is a share of the predicted peak of plain eager PyTorch, above 0 and at most 1, such "
            "as 0.6; write bytes as an int, or text such as '8GB'"
        )
    return Share(float(f"{100 * budget:.12g}"))


def read_budget_or_overhead(budget: str | float | Budget | None, max_overhead: str | float | None) -> Budget:
    """Return the budget (``read_budget``), or the least memory at `max_overhead` (0.1 or ``10%``).

    Raises:
        BudgetError: both are given or neither is, the budget cannot be read, or the overhead is no fraction and no percentage.
    """
    if (budget is None) == (max_overhead is None):
        given = "neither" if budget is None else f"both (budget={budget!r}, max_overhead={max_overhead!r})"
        raise BudgetError(
            f"give either a budget or max_overhead, not {given}: budget='8GB' for the fastest step within 8 GB, "
            "max_overhead='10%' for the least memory at a tenth more time"
        )
    if budget is not None:
        return read_budget(budget)
    try:
        return Overhead(parse_fraction(str(max_overhead)))
    except BudgetError:
        raise BudgetError(
            f"max_overhead is {max_overhead!r}: must be a fraction of the step time, from 0 to 1, or a percentage: write '10%' "
            "or 0.1"
        ) from None

"""Advice on which budget to choose. Never imports torch."""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from planner.capture.options import get_option
from planner.graphs.units import format_bytes, format_enough, format_seconds
from planner.memory.reserved import EagerMemory
from planner.plans.record import GraphSummary
from planner.settings.counted_memory import CountedMemory
from planner.show.views.figures import COLORS, add_legend, choose_size_unit, create_figure, set_title
from planner.show.views.text import format_table
from planner.studies.curve import SEARCH_CUT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Price:
    """The overhead at a budget.

    Attributes:
        budget_bytes: budget of the whole step, static memory included.
        overhead: overhead of the best schedule over keeping everything; None if none was found.
        bound: lower bound on the overhead, for the order of ops that was tried; None if unknown.
        reserved_bytes: bytes that PyTorch's allocator reserves for the schedule on CUDA; None on the CPU.
    """

    budget_bytes: int
    overhead: float | None
    bound: float | None
    reserved_bytes: int | None = None

    def __str__(self) -> str:
        return "none found" if self.overhead is None else f"{100 * self.overhead:+z.1f}%"


@dataclass(frozen=True, slots=True)
class OptionAdvice:
    """The gain from one option alone.

    Attributes:
        name: name in ``planner.solve``.
        ops: number of ops that it offers; 0 if it found none in this step.
        exact: True if none of them may change a bit of the results.
        least_proved_bytes, least_found_bytes: lower bound on the budget with it (in the order that was tried), and the least
            feasible budget found.
        price: overhead at the middle one of the budgets between.
        stopped: True if the search for the least budget was cut short, and a whole one may find less.
    """

    name: str
    ops: int
    exact: bool
    least_proved_bytes: int
    least_found_bytes: int
    price: Price
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The budget to take.

    Attributes:
        budget_bytes: None if no plan is needed, or none is known to fit.
        overhead: overhead of the schedule that was found; None if there is none.
        reason: the reason, or alternatives.
        reserved_bytes: bytes that PyTorch's allocator reserves for that schedule on CUDA; None on the CPU, or without one.
    """

    budget_bytes: int | None
    options: tuple[str, ...]
    overhead: float | None
    reason: str
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """The memory that a training step needs, and the budget to take. ``print`` shows it as a table, ``plot`` as a figure.

    Attributes:
        graph: the step; its ``keep_everything_peak_bytes`` is the predicted peak of plain eager PyTorch.
        memory: kind of memory that all budgets here count.
        eager_bytes: bytes of that memory that plain eager PyTorch needs.
        device: device that it was measured on or modelled for.
        available_bytes: bytes of that memory that a step may use there (``budget="auto"``); None if nothing is known of the
            device.
        least_proved_bytes, least: lower bound on the budget with recomputation only (in the order that was tried), and the least
            feasible budget found, with its price.
        least_stopped: True if the search for it was cut short, and a whole one may find less.
        between: budgets between the least and eager PyTorch's, least first.
        options: gain of each option.
        recommended: the budget to choose.
        eager_memory: memory that plain eager PyTorch takes, by models of allocators.
        seconds: duration of the analysis, without the trace.
    """

    graph: GraphSummary
    memory: CountedMemory
    eager_bytes: int
    device: str
    available_bytes: int | None
    least_proved_bytes: int
    least: Price
    between: tuple[Price, ...]
    options: tuple[OptionAdvice, ...]
    recommended: Recommendation
    eager_memory: EagerMemory
    seconds: float
    least_stopped: bool = False

    @property
    def eager_peak_bytes(self) -> int:
        """The predicted peak of plain eager PyTorch."""
        return self.graph.keep_everything_peak_bytes

    def plot(self) -> "Figure":
        """Return a ``matplotlib.figure.Figure`` of the overhead at each budget, and of what the options gain.

        Raises:
            PlannerError: matplotlib is not installed.
        """
        figure = create_figure()
        axes = figure.add_subplot()
        scale, unit = choose_size_unit(self.eager_bytes)
        prices = [(p.budget_bytes / scale, 100 * p.overhead) for p in (self.least, *self.between) if p.overhead is not None]
        xs, ys = zip(*prices, (self.eager_bytes / scale, 0.0), strict=True)
        axes.step(xs, ys, where="post", color=COLORS["ours"], marker="o", linewidth=2, label="recomputation alone")
        for option in self.options:
            if option.ops and option.price.overhead is not None:
                place = option.price.budget_bytes / scale, 100 * option.price.overhead
                axes.plot(*place, marker="D", linewidth=0, label=f"with {option.name}")
        for size_bytes, label in ((self.available_bytes, "available"), (self.recommended.budget_bytes, "recommended")):
            if size_bytes is not None and size_bytes <= 2 * self.eager_bytes:
                style = "--" if label == "available" else "-"
                axes.axvline(size_bytes / scale, color=COLORS["budget"], linestyle=style, linewidth=1.2, label=label)
        axes.set(xlabel=f"budget ({self.memory}) in {unit}", ylabel="overhead in %")
        axes.set_ylim(bottom=0)
        set_title(axes, self.device)
        add_legend(figure, axes)
        return figure

    def __repr__(self) -> str:
        found = self.recommended.budget_bytes
        said = "no budget" if found is None else format_enough(found)
        return f"Advice({said} recommended, eager PyTorch takes {format_bytes(self.eager_bytes)})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        eager, static, proved = map(format_bytes, (self.eager_peak_bytes, self.graph.static_bytes, self.least_proved_bytes))
        cut = f"; {SEARCH_CUT}" if self.least_stopped else ""
        available = "unknown" if self.available_bytes is None else f"{format_bytes(self.available_bytes)} on {self.device}"
        counted = f"{self.memory.said}, of which eager PyTorch takes {format_bytes(self.eager_bytes)}"
        facts = [
            ("eager PyTorch needs", f"{eager}, {static} of it throughout the step"),
            *((f"  {name}", value) for name, value in self.eager_memory.list_lines()),
            *([("budgets count", counted)] if self._on_cuda else ()),
            ("least budget", f"{format_enough(self.least.budget_bytes)} ({self.least}), proved to be no less than {proved}{cut}"),
            ("available", available),
            *([("host-bound", self.graph.host_bound)] if self.graph.host_bound else ()),
            ("analysed in", format_seconds(self.seconds)),
        ]
        prices = (*reversed(self.between), self.least)
        budgets = [
            ("budget", "of eager", "overhead", "bound", *([self.memory.taken] if self._on_cuda else ())),
            *map(self._build_row, prices),
        ]
        header = ("with", "least budget", f"overhead at {format_enough(self._middle.budget_bytes)}", "results")
        none = ("recomputation alone", format_enough(self.least.budget_bytes), str(self._middle), "exact")
        offered = [header, none, *(self._build_option_row(option) for option in self.options)]
        recommended = self.recommended
        take = "" if recommended.budget_bytes is None else format_enough(recommended.budget_bytes)
        take += f" with {', '.join(recommended.options)}" if recommended.options else ""
        tables = (format_table(rows[0], rows[1:], numbers=0) for rows in (facts, budgets, offered) if len(rows) > 1)
        size = recommended.reserved_bytes
        context = " and CUDA's context take" if self.memory.counts_context else " reserves"
        reserves = "" if size is None else f"; PyTorch's allocator{context} {format_bytes(size)} for it"
        return "\n\n".join((*tables, f"recommended: {take + ': ' if take else ''}{recommended.reason}{reserves}"))

    @property
    def _on_cuda(self) -> bool:
        return self.eager_memory.reserved_bytes is not None

    @property
    def _middle(self) -> Price:
        return self.between[len(self.between) // 2] if self.between else self.least

    def _build_row(self, price: Price) -> tuple[str, ...]:
        share = f"{100 * price.budget_bytes / self.eager_bytes:.0f}%"
        reserved = "" if price.reserved_bytes is None else format_bytes(price.reserved_bytes)
        bound = "none" if price.bound is None else f"{100 * price.bound:+z.1f}%"
        return format_enough(price.budget_bytes), share, str(price), bound, *([reserved] if self._on_cuda else ())

    def _build_option_row(self, option: OptionAdvice) -> tuple[str, ...]:
        if not option.ops:
            return option.name, "nothing to choose in this step", "", ""
        lossy = get_option(option.name).lossy
        results = "exact" if option.exact else "lossy" if lossy else "may be rounded differently"
        at_most = "at most " if option.stopped else ""
        return option.name, f"{at_most}{format_enough(option.least_found_bytes)}", str(option.price), results

"""The request and the answers of ``max_batch``. Never imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.measure.scaling import list_sample_sizes
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import RECOMPUTATION, OptionSettings
from planner.solvers.result import Result

OPTIMAL = "windows"
BATCH = "batch"
# Names in the tables and in the registry. Sizes that fit for a method are skipped for the methods after it.
METHODS = (("keep everything", "keep-everything"), ("checkpoint every block", "checkpoint-blocks"), ("optimal", OPTIMAL))
# Batches whose graphs give the first guess: large enough that fixed costs of kernels matter little.
BATCHES = (8, 16)


@dataclass(frozen=True, slots=True)
class LargestSize:
    """The largest size that one method fits into the budget.

    Attributes:
        method: name for display.
        size: None if not even the least fits.
        at_limit: `size` is the largest that was allowed; larger ones may fit.
        undecided: least size that was not decided in time; None if there is none.
        complete: False when the search was stopped: larger sizes may fit.
        extrapolated: True if the graph of `size` was extrapolated from others, not captured.
        result: the schedule at `size`, or the reason if there is none.
        keep_everything_time_s: time of the step at `size` without recomputation.
        reserved_bytes: bytes reserved for the schedule on CUDA, as the budget counts it; None on the CPU.
    """

    method: str
    size: int | None
    at_limit: bool
    undecided: int | None
    complete: bool
    extrapolated: bool
    result: Result | None
    keep_everything_time_s: float
    reserved_bytes: int | None = None

    @property
    def time_s(self) -> float | None:
        """The time of the schedule; None if there is none."""
        return None if self.size is None or self.result is None else self.result.time_s

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the schedule, static memory included; None if there is none."""
        return None if self.size is None or self.result is None else self.result.peak_bytes

    @property
    def gap(self) -> float | None:
        """The gap between the time and the proved lower bound; None if there is no schedule."""
        return None if self.size is None or self.result is None else self.result.gap

    @property
    def overhead(self) -> float | None:
        """The overhead of the schedule, as a fraction of the step without recomputation; None if there is no schedule."""
        if self.time_s is None:
            return None
        return self.time_s / self.keep_everything_time_s - 1 if self.keep_everything_time_s else 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request. Sizes are multiples of `unit`; fields marked "in units" are counted in it.

    Attributes:
        budget_bytes: budget of the whole step, static memory included.
        max_overhead: as a fraction of the step without recomputation; None: any.
        limit: the largest to consider, in units.
        tolerance: tolerance on the gap of the returned schedule.
        reorder: True to reorder ops for the optimal schedule if that lowers the peak; manual methods keep program order.
        varies: the name of the size.
        unit: sizes are multiples of it.
        samples: in units, the sizes whose graphs give the first guess: two for a straight line, three for a square.
        options: options of the optimal schedule in an additional row.
        memory: kind of memory that the budget counts; None: on CUDA what PyTorch's allocator reserves, on the CPU the bytes of
            tensors.
        guesses: first size to try in units, by name of the method; others are guessed from the samples.
    """

    budget_bytes: int
    max_overhead: float | None = None
    limit: int = 4096
    first: int = 1
    tolerance: float = 1e-3
    time_limit_s: float = 60.0
    reorder: bool = True
    varies: str = BATCH
    unit: int = 1
    samples: tuple[int, ...] = BATCHES
    options: OptionSettings = RECOMPUTATION
    memory: CountedMemory | None = None
    guesses: Mapping[str, int] = field(default_factory=dict)

    def name_size(self, units: int) -> str:
        """Return a size as text for a sentence."""
        size = units * self.unit
        return f"a batch of {size}" if self.varies == BATCH else f"{self.varies}={size}"

    @property
    def methods(self) -> "tuple[SizedMethod, ...]":
        """The methods to answer for."""
        methods = tuple(SizedMethod(name, solver) for name, solver in METHODS)
        return (*methods, SizedMethod(f"with {self.options.named}", OPTIMAL, self.options)) if self.options.names else methods


@dataclass(frozen=True, slots=True)
class SizedMethod:
    """A method: its name in tables, its solver in the registry, and the options of the graph."""

    name: str
    solver: str
    options: OptionSettings = RECOMPUTATION


def list_samples(varies: str, first: int) -> tuple[int, ...]:
    """Return ``Wanted.samples`` for a search from `first`: costs are linear in a batch, and may be quadratic in other sizes."""
    return BATCHES if varies == BATCH else list_sample_sizes(max(first, max(BATCHES)))

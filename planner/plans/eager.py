"""How a planned step compares with plain eager PyTorch, or with ``torch.compile``, on the batch it was planned for."""

from dataclasses import dataclass

from graphs.units import format_bytes, format_seconds

_NAMED = 3
_TIMES_OWN_ERROR = 3.0  # errors of two pairs of runs differ by chance


def slower_than(other: str, overhead: float) -> str:
    """Return a relative difference of times in words: ``4.1% slower than eager``, ``2.0% faster than eager``."""
    return f"{100 * abs(overhead):.1f}% {'faster' if overhead < 0 else 'slower'} than {other}"


def within_own_error(error: float | None, own_error: float | None) -> bool:
    """Return True if gradients differ by about as much as eager PyTorch's differ from its own of another run.

    Args:
        error: Euclidean distance of all gradients from eager PyTorch's, over the length of these.
        own_error: the same of a second run of eager PyTorch; None where that has the same bits.
    """
    return error is not None and own_error is not None and error <= _TIMES_OWN_ERROR * own_error


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that a planned step makes otherwise than eager PyTorch.

    Attributes:
        name: of a gradient, a buffer, the loss, another result, or a random state.
        max_abs: largest difference of two elements; None where one of them is missing, of another shape, or not finite.
        relative: the same as a fraction of the largest element that eager PyTorch makes; None likewise, or where that is 0.
    """

    name: str
    max_abs: float | None = None
    relative: float | None = None

    def __str__(self) -> str:
        if self.max_abs is None:
            return self.name
        share = "" if self.relative is None else f", {self.relative:.1e} of its largest element"
        return f"{self.name} by up to {self.max_abs:.1e}{share}"


@dataclass(frozen=True, slots=True)
class DifferingOp:
    """The first op that leads to a difference: eager PyTorch computes nothing that equals its result.

    Attributes:
        name, target, module: as of the op in the graph.
    """

    name: str
    target: str
    module: str

    def __str__(self) -> str:
        return f"op {self.name!r} ({self.target}){f' in {self.module}' if self.module else ''}"


@dataclass(frozen=True, slots=True)
class EagerComparison:
    """One step of eager PyTorch beside the planned one.

    Attributes:
        differences: what is not equal to the last bit, or does not come at all.
        first_op: where the differences begin; None where there are none, or where each op's result is one of eager's.
        peak_bytes: of an eager step, with all that is there throughout.
        time_s: seconds of an eager step, the median of several.
        planned_time_s: `time_s` times the median ratio of a planned step to the eager step of the same turn; 0 where it was not
            measured, as for a plan that has taken the place of the one that was compared.
        spread: half of the range in which the middle half of these ratios lies.
        failure: why eager PyTorch was not run, or could not be; "" where it was. Then nothing else is known.
        gradient_error: Euclidean distance of all gradients from eager's, over the length of these; None if not measured.
        eager_error: the same of a second run of eager PyTorch, where something differed; None where that has the same bits.
        beside: what it is that the plan stands beside: ``torch.compile`` where the kernels are Inductor's.
    """

    differences: tuple[Difference, ...] = ()
    first_op: DifferingOp | None = None
    peak_bytes: int = 0
    time_s: float = 0.0
    planned_time_s: float = 0.0
    spread: float = 0.0
    failure: str = ""
    beside: str = "eager"
    gradient_error: float | None = None
    eager_error: float | None = None

    @property
    def identical(self) -> bool:
        """Loss, other results, gradients, buffers and random states equal eager PyTorch's to the last bit."""
        return not (self.differences or self.failure)

    @property
    def overhead(self) -> float | None:
        """Measured time of the planned step beyond eager PyTorch's, as a fraction of the latter; below 0 where it is faster."""
        return self.planned_time_s / self.time_s - 1 if self.time_s and self.planned_time_s else None

    @property
    def slowdown(self) -> str:
        """The measured overhead in words: ``4.1% slower than eager, ±2.8%``; "" where it is not known."""
        if self.overhead is None:
            return ""
        return f"{slower_than(self.beside, self.overhead)}, ±{100 * self.spread:.1f}%"

    def __str__(self) -> str:
        if self.failure:
            return f"{self.beside}: not run, {self.failure}"
        costs = f"{self.beside} takes {format_seconds(self.time_s)} and {format_bytes(self.peak_bytes)}"
        found = f"identical to {self.beside}" if self.identical else self.what_differs()
        return f"{found}; {costs}"

    def what_differs(self) -> str:
        """The differences, the largest of the named kinds first, and where they begin."""
        named = "; ".join(map(str, self.differences[:_NAMED]))
        more = f" and {len(self.differences) - _NAMED} more" if len(self.differences) > _NAMED else ""
        where = "" if self.first_op is None else f", from {self.first_op} on"
        return f"differs from {self.beside} in {named}{more}{where}{self._beside_its_own()}"

    @property
    def within_own_error(self) -> bool:
        """True if all that differs does so about as much as in two runs of eager PyTorch, which has no bits to be equal to."""
        return within_own_error(self.gradient_error, self.eager_error)

    def _beside_its_own(self) -> str:
        if self.eager_error is None:
            return ""
        error = "not known" if self.gradient_error is None else f"{self.gradient_error:.1e}"
        return (
            f", by a gradient error of {error}; {self.beside} run twice differs from itself by {self.eager_error:.1e} "
            "(torch.use_deterministic_algorithms(True) asks for kernels that repeat their bits)"
        )

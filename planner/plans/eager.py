"""The comparison of a planned step with eager PyTorch, or with ``torch.compile``, on the batch it was planned for."""

from dataclasses import dataclass

from planner.graphs.units import format_bytes, format_seconds

_NAMED = 3
_TIMES_OWN_ERROR = 3.0  # the errors of two pairs of runs differ by chance


def describe_slower(other: str, overhead: float) -> str:
    """Return a relative difference of times in words: ``4.1% slower than eager``, ``2.0% faster than eager``."""
    return f"{100 * abs(overhead):.1f}% {'faster' if overhead < 0 else 'slower'} than {other}"


def is_within_own_error(error: float | None, own_error: float | None) -> bool:
    """Return True if gradients differ by about as much as between two runs of eager PyTorch.

    Args:
        error: Euclidean distance of all gradients from eager PyTorch's, relative to the norm of these.
        own_error: that of a second run of eager PyTorch; None if it has the same bits.
    """
    return error is not None and own_error is not None and error <= _TIMES_OWN_ERROR * own_error


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a planned step that differs from eager PyTorch's.

    Attributes:
        name: name of a gradient, a buffer, the loss, another result, or a random state.
        max_abs: largest difference of two elements; None if one is missing, of another shape, or not finite.
        relative: the same relative to the largest element of eager PyTorch; None likewise, or if that is 0.
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
    """The first op that leads to a difference: eager PyTorch has no result equal to its own.

    Attributes:
        name, target, module: those of the op in the graph.
    """

    name: str
    target: str
    module: str

    def __str__(self) -> str:
        return f"op {self.name!r} ({self.target}){f' in {self.module}' if self.module else ''}"


@dataclass(frozen=True, slots=True)
class EagerComparison:
    """One step of eager PyTorch, compared with the planned one.

    Attributes:
        differences: results that are not bitwise equal, or missing.
        first_op: the op where differences begin; None if there is none.
        peak_bytes: peak of an eager step, static memory included.
        time_s: seconds of an eager step, the median of several.
        planned_time_s: `time_s` times the median ratio of a planned step to the eager step of the same round; 0 if not measured,
            as for a plan that has replaced the compared one.
        spread: half of the interquartile range of these ratios; 0 if there is only one.
        failure: the reason why eager PyTorch was not run, or failed; "" if it was. Then nothing else is known.
        gradient_error: Euclidean distance of all gradients from eager's, relative to the norm of these; None if not measured.
        eager_error: that of a second run of eager PyTorch, measured if something differs; None if it has the same bits.
        reference: name of the reference: ``torch.compile`` if the kernels are Inductor's.
    """

    differences: tuple[Difference, ...] = ()
    first_op: DifferingOp | None = None
    peak_bytes: int = 0
    time_s: float = 0.0
    planned_time_s: float = 0.0
    spread: float = 0.0
    failure: str = ""
    reference: str = "eager"
    gradient_error: float | None = None
    eager_error: float | None = None

    @property
    def identical(self) -> bool:
        """True if loss, other results, gradients, buffers and random states are bitwise equal to eager PyTorch's."""
        return not (self.differences or self.failure)

    @property
    def overhead(self) -> float | None:
        """Measured time of the planned step relative to eager PyTorch's, minus 1; negative if it is faster."""
        return self.planned_time_s / self.time_s - 1 if self.time_s and self.planned_time_s else None

    @property
    def slowdown(self) -> str:
        """The measured overhead in words: ``4.1% slower than eager, ±2.8%``; "" if not measured."""
        if self.overhead is None:
            return ""
        spread = f"±{100 * self.spread:.1f}%" if self.spread else "one step of each"
        return f"{describe_slower(self.reference, self.overhead)}, {spread}"

    def __str__(self) -> str:
        if self.failure:
            return f"{self.reference}: not run, {self.failure}"
        costs = f"{self.reference} takes {format_seconds(self.time_s)} and {format_bytes(self.peak_bytes)}"
        found = f"identical to {self.reference}" if self.identical else self.describe_differences()
        return f"{found}; {costs}"

    def describe_differences(self) -> str:
        """Return the differences in words, and the op where they begin."""
        named = "; ".join(map(str, self.differences[:_NAMED]))
        more = f" and {len(self.differences) - _NAMED} more" if len(self.differences) > _NAMED else ""
        where = "" if self.first_op is None else f", from {self.first_op} on"
        return f"differs from {self.reference} in {named}{more}{where}{self._describe_errors()}"

    @property
    def within_own_error(self) -> bool:
        """True if the differences are about as large as between two runs of eager PyTorch."""
        return is_within_own_error(self.gradient_error, self.eager_error)

    def _describe_errors(self) -> str:
        if self.eager_error is None:
            return ""
        error = "not known" if self.gradient_error is None else f"{self.gradient_error:.1e}"
        return (
            f", by a gradient error of {error}; {self.reference} run twice differs from itself by {self.eager_error:.1e} "
            "(torch.use_deterministic_algorithms(True) asks for kernels that repeat their bits)"
        )

"""Python numbers that a step reads each time: a coefficient that is annealed, a count of steps.

What a step computes from them in Python (``1 - weight``, ``math.cos(step / total)``) is computed by the same functions on the
same values, so that its ops get the bits that eager PyTorch gives them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.graphs.errors import NumberMismatchError

Scope = Mapping[str, object]  # variables by their names


@dataclass(frozen=True, slots=True)
class Number:
    """A reference to a number of a program, as an argument of a call.

    Attributes:
        index: its position among them.
        value: its value when the step was captured, for ops that are called alone, to measure them.
    """

    index: int
    value: float


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a captured step: where they are read, and what is computed from them.

    Attributes:
        names: names of the values that are read, for messages.
        find: for each a function of the local and the global scope that returns it.
        planned: their values when the step was captured.
        compute: a function of the values, which returns the numbers of the program, then the outcomes that the program relies on.
        count: how many numbers the program has.
        results: what it returned when the step was captured.
        free: those of the names whose values may be any.
        writes: for numbers that the step changes, a function of the new value and both scopes, the position of the value, and
            the value when the step was captured.
    """

    names: tuple[str, ...]
    find: tuple[Callable[[Scope, Scope], Any], ...]
    planned: tuple[Any, ...]
    compute: Callable[..., tuple[Any, ...]]
    count: int
    results: tuple[Any, ...]
    free: frozenset[str]
    writes: tuple[tuple[Callable[[object, Scope, Scope], None], int, object], ...]

    def write(self, numbers: Sequence[object], local: Scope, scope: Scope) -> None:
        """Change the numbers that the step changes, which were computed with those that it reads."""
        for write, index, _ in self.writes:
            write(numbers[index], local, scope)

    def reset(self, local: Scope, scope: Scope) -> None:
        """Change the numbers that the step changes back to what they were when it was captured."""
        for write, _, before in self.writes:
            write(before, local, scope)

    def read(self, local: Scope, scope: Scope) -> tuple[Any, ...]:
        """Return the present numbers of the program.

        Raises:
            NumberMismatchError: the step does something else for them than what was captured.
        """
        values = tuple([find(local, scope) for find in self.find])
        try:
            results = self.compute(*values)
        except ArithmeticError:  # such as a division by zero, which eager PyTorch raises when the step is captured again
            results = ()
        if results[self.count :] != self.results[self.count :] or [*map(type, results)] != [*map(type, self.results)]:
            pairs = zip(self.names, self.planned, values, strict=True)
            name, planned, now = next(
                (each for each in pairs if each[1] is not each[2]), (self.names[0], self.planned[0], values[0])
            )
            raise NumberMismatchError(
                f"{name} was {planned!r} when the step was planned, and is {now!r} now", ": what the step does depends on it"
            )
        return results[: self.count]

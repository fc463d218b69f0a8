"""Parameters of the exact solver: they change how fast it finds schedules and proofs, not what is proved.

Durations are in the unit of the clock (``planner.solvers.clock``): seconds, or units of work. Shares of the step are of its time
without recomputation. The values were found on the graphs of ``make bench-solve``. Here are those that a user could have a reason
to set; the others are constants beside their use.
"""

import json
import math
import tomllib
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

from planner.graphs.errors import UsageError
from planner.solvers.eviction.rules import RULES, EvictionRule
from planner.solvers.registry import SOLVERS

# Methods that try most come last.
_IMITATED = ("checkpoint-blocks", "sac-attention", "sac-every-second", "chen-sqrt", "dtr", "memory-budget", "chen-greedy", "sac")

_WANTED = {bool: "true or false", int: "a whole number, 0 or more", float: "a number, 0 or more", str: "a string"}


@dataclass(frozen=True, slots=True)
class BoundParams:
    """Parameters of the relaxation, and of the end of the solve.

    Attributes:
        first_slice: duration of the relaxation in the first round;
        longer: factor to it in each further round, as a stopped model starts from scratch.
        arithmetic: relative error that HiGHS's arithmetic may have in a bound.
        most_bytes: growth of the process at which a model is given up.
        small_ops: graphs of at most so many ops are searched state by state before windows are refined further;
        max_states: most states of that search, about a kilobyte each.
    """

    first_slice: float = 2.0
    longer: float = 3.0
    arithmetic: float = 1e-5
    most_bytes: int = 2_500_000_000
    small_ops: int = 30
    max_states: int = 1_000_000


@dataclass(frozen=True, slots=True)
class FirstScheduleParams:
    """Parameters of methods that are tried before and in parallel with models.

    Attributes:
        imitated: baselines whose schedules are offered.
    """

    rules: tuple[EvictionRule, ...] = RULES
    imitated: tuple[str, ...] = _IMITATED


@dataclass(frozen=True, slots=True)
class NeighbourhoodParams:
    """Parameters of the restricted model.

    Attributes:
        windows: about so many at first, or more in small graphs, up to
        size: windows times ops.
        whole_limit: for a model with nothing fixed;
        part_limit: for each model in which all but a neighbourhood is fixed.
    """

    windows: int = 120
    size: int = 120_000
    whole_limit: float = 5.0
    part_limit: float = 3.0


@dataclass(frozen=True, slots=True)
class PartParams:
    """Parameters of searches of smaller sets of options in the background.

    Attributes:
        least_idle: such a search, if it is behind the whole, goes on at least so long without improvement;
        idle_share: and for this share of its time.
        between: time between the starts of two processes.
    """

    least_idle: float = 20.0
    idle_share: float = 0.5
    between: float = 3.0


@dataclass(frozen=True, slots=True)
class WindowsParams:
    """The parameters of the exact solver, grouped by strategy.

    Raises:
        UsageError: a value is of another type or negative, or a method to imitate is unknown.

    Examples:
        >>> params = WindowsParams(bound=BoundParams(most_bytes=1_000_000_000))
        >>> params.export()["bound"]["most_bytes"]
        1000000000
    """

    bound: BoundParams = field(default_factory=BoundParams)
    first_schedule: FirstScheduleParams = field(default_factory=FirstScheduleParams)
    neighbourhoods: NeighbourhoodParams = field(default_factory=NeighbourhoodParams)
    parts: PartParams = field(default_factory=PartParams)

    def __post_init__(self) -> None:
        _check(WindowsParams, self, "")
        if not self.bound.first_slice:
            raise UsageError("bound.first_slice is 0: must be above 0")
        if self.bound.longer < 1:
            raise UsageError(f"bound.longer is {self.bound.longer!r}: must be at least 1")
        methods = [name for name, entry in SOLVERS.items() if entry.module.startswith("planner.solvers.baselines.")]
        if unknown := [name for name in self.first_schedule.imitated if name not in methods]:
            raise UsageError(f"first_schedule.imitated has {unknown[0]!r}: choose from {', '.join(methods)}")

    @classmethod
    def from_toml(cls, path: Path | str) -> Self:
        """Return the parameters of a TOML file with a table for each group; missing ones have their defaults.

        Raises:
            UsageError: the file cannot be read, or has an unknown key or a wrong value.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}") from error
        try:
            made: Self = _convert(cls, table, "")
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        return made

    def export(self) -> dict[str, object]:
        """Return the parameters by group and name, as JSON values, as recorded in results."""
        recorded: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return recorded


def _check(kind: Any, value: Any, name: str) -> None:
    """Raise a UsageError unless `value`, called `name`, is of its `kind` with all that it holds; numbers are 0 or more."""
    if is_dataclass(kind):
        if type(value) is not kind:
            raise UsageError(f"{name} is {value!r}: must be {getattr(kind, '__name__', kind)}")
        hints = get_type_hints(kind)
        for part in fields(kind):
            _check(hints[part.name], getattr(value, part.name), f"{name}.{part.name}" if name else part.name)
    elif get_origin(kind) is tuple:
        if type(value) is not tuple:
            raise UsageError(f"{name} is {value!r}: must be a tuple")
        for i, item in enumerate(value):
            _check(get_args(kind)[0], item, f"{name}[{i}]")
    else:
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind in (int, float) and not (value >= 0 and math.isfinite(value))):
            raise UsageError(f"{name} is {value!r}: must be {_WANTED[kind]}")


def _convert(kind: Any, value: Any, name: str) -> Any:
    """Return a `value` of a file with its tables and arrays as dataclasses and tuples; missing values have their defaults."""
    if is_dataclass(kind):
        known = [part.name for part in fields(kind)]
        if not isinstance(value, dict):
            raise UsageError(f"{name} is {value!r}: must be a table with any of {', '.join(known)}")
        if unknown := [key for key in value if key not in known]:
            raise UsageError(
                f"there is no {unknown[0]!r} {f'in {name}' if name else 'at the top'}: choose from {', '.join(known)}"
            )
        hints, prefix = get_type_hints(kind), f"{name}." if name else ""
        make: Any = kind
        return make(**{key: _convert(hints[key], item, prefix + key) for key, item in value.items()})
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{name} is {value!r}: must be an array")
        return tuple(_convert(get_args(kind)[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    return float(value) if kind is float and type(value) is int else value

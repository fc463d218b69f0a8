"""Settings of tracing, solving and running a step, validated once when they are made. Never imports torch."""

import math
import os
import re
from dataclasses import dataclass

from graphs.errors import UsageError
from graphs.optimizers import OPTIMIZERS, MeasuredOptimizer
from graphs.options.option import Feature
from planner.capture.options import check_traced, parsed, traced_options
from planner.settings.compatibility import check_compatible
from planner.settings.counted_memory import CountedMemory
from planner.settings.devices import get_device
from planner.settings.option_settings import RECOMPUTATION, OptionSettings
from planner.settings.other_devices import parse_device
from solvers.clock import Clock, WallClock, WorkClock
from solvers.registry import check_params
from solvers.tolerance import WIDENING, Tolerance

KERNELS = ("eager", "inductor")
SWAPS = ("exact", "any", "never")

_WAIT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|s|m|work)")
_GAP, _SECONDS = 0.01, 3.0  # the default quality to wait for, whichever is reached first


def check_positive(what: str, value: object, unit: str) -> None:
    """Raise an error unless `value` is a finite number above 0.

    Raises:
        UsageError: it is not; the message has `what` it is for, and the `unit`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{what} is {value!r}: must be {unit}, above 0")


@dataclass(frozen=True, slots=True)
class Wait:
    """The quality that a plan must have before ``planner.compile`` returns; it fits in any case.

    Attributes:
        gap: required gap; None for any.
        seconds: time limit after which any gap is accepted; None for no limit.
        work: work limit (``solvers.clock.WorkClock``), in place of seconds.
    """

    gap: float | None = _GAP
    seconds: float | None = _SECONDS
    work: float | None = None

    @property
    def reproducible(self) -> bool:
        """True if the same costs lead to the same plan on every run: no clock is involved, and the plan is not replaced."""
        return self.seconds is None

    @staticmethod
    def of(value: "Wait | str | float | None") -> "Wait":
        """Return the quality from user input: seconds as a number or ``10s``; a gap as ``1%``; ``20 work``; None for the default.

        Raises:
            UsageError: it is none of these.
        """
        if value is None or isinstance(value, Wait):
            return value or Wait()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
            return Wait(gap=None, seconds=float(value))
        match = _WAIT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise UsageError(f"wait is {value!r}: must be seconds (10 or '10s'), a gap ('1%') or work ('20 work')")
        amount, unit = float(match[1]), match[2]
        if unit == "%":
            return Wait(gap=amount / 100, seconds=None)
        if unit == "work":
            return Wait(gap=None, seconds=None, work=amount)
        return Wait(gap=None, seconds=amount * (60 if unit == "m" else 1))


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of capture and measurement: arguments of ``planner.trace``.

    Attributes:
        name: name of the model, for messages.
        options: options to find in the step.
        numbers: names of numbers that stay inputs of the step, as Dynamo writes them.

    Raises:
        UsageError: there is no such option, optimizer or device, or a setting conflicts with a roofline.
    """

    optimizer: str | MeasuredOptimizer = "none"
    accumulate: bool = False
    roofline: str | None = None
    passes: int = 5
    measure_link: bool = False
    name: str = ""
    options: tuple[str, ...] = ()
    other_devices: tuple[str, ...] = ()
    numbers: frozenset[str] = frozenset()

    @property
    def reads_numbers(self) -> bool:
        """True if numbers may be inputs of the step: the calls of some options take none."""
        return self.options in ((), ("in-place",)) and not self.other_devices

    def __post_init__(self) -> None:
        check_traced(self.options)
        check_flags(accumulate=self.accumulate, measure_link=self.measure_link)
        if not isinstance(self.passes, int) or self.passes < 1:
            raise UsageError(f"passes is {self.passes!r}: must be at least 1")
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise UsageError(f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
        if self.roofline is not None:
            get_device(self.roofline)
        for device in self.other_devices:
            parse_device(device)
        given = {
            Feature.ROOFLINE: self.roofline is not None,
            Feature.MEASURED_LINK: self.measure_link,
            Feature.OTHER_DEVICES: bool(self.other_devices),
        }
        check_compatible([feature for feature, asked in given.items() if asked])


def check_flags(*others: object, **flags: object) -> None:
    """Raise unless each of `flags` is True or False, or one of `others`: any text would count as True.

    Raises:
        UsageError: one is neither.
    """
    for name, value in flags.items():
        if not isinstance(value, bool) and value not in others:
            allowed = ", ".join(map(repr, (True, False, *others)))
            raise UsageError(f"{name} is {value!r}: must be one of {allowed}")


@dataclass(frozen=True, slots=True)
class SolveSettings:
    """Settings of a solve: arguments of ``planner.solve``.

    Attributes:
        options: options of the graph and their settings.
        params: parameters of the solver, of its own class; None for its defaults.
        memory: kind of memory that the budget counts; None for the default of the device.
        arena: True if the buffers of the step must fit an arena, False if they lie where PyTorch's allocator puts them, None
            if a schedule may have an arena where it would otherwise reserve more than its budget.

    Raises:
        UsageError: no such solver, its parameters are of another class, or a limit is not above zero.
        PlannerError: the solver does not take these options.
    """

    solver: str = "windows"
    tolerance: Tolerance = WIDENING
    time_limit_s: float = 3600.0
    work_limit: float | None = None
    reorder: bool | None = None
    options: OptionSettings = RECOMPUTATION
    params: object = None
    memory: CountedMemory | None = None
    arena: bool | None = None

    def __post_init__(self) -> None:
        check_params(self.solver, self.params)
        self.clock()
        self.options.check_solver(self.solver)

    def clock(self) -> Clock:
        """Return a clock that starts now, for the work limit if there is one, else for the time limit."""
        what, limit, unit = "time", self.time_limit_s, "seconds"
        if self.work_limit is not None:
            what, limit, unit = "work", self.work_limit, "a number"
        check_positive(f"{what} limit", limit, unit)
        return WallClock(limit) if self.work_limit is None else WorkClock(limit)

    @property
    def traced_options(self) -> tuple[str, ...]:
        """The options that are found in the step when it is traced."""
        return traced_options(self.options.names)

    @property
    def features(self) -> set[str]:
        """The features in these settings that may exclude others (``planner.settings.compatibility``)."""
        given = {
            Feature.HOST_SHARE: self.options.shares_host,
            Feature.ARENA: self.arena,
            Feature.RESERVED: self.memory not in (None, CountedMemory.ALLOCATED),
        }
        return {name for name, _ in map(parsed, self.options.names)} | {feature for feature, asked in given.items() if asked}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of how a planned step runs, and when its plan is replaced: arguments of ``planner.compile``.

    Raises:
        UsageError: a setting has an invalid value, or two exclude each other.
    """

    kernels: str = "eager"
    cuda_graph: bool = False
    arena: bool | None = None
    dynamic: bool = False
    replan: bool | None = None
    max_plans: int = 32
    compare_eager: bool = True
    check_writes: bool = False
    cache: str | os.PathLike[str] | None = None
    wait: Wait = Wait()
    swap: str = "exact"

    def __post_init__(self) -> None:
        for name, value, known in (("kernels", self.kernels, KERNELS), ("swap", self.swap, SWAPS)):
            if value not in known:
                raise UsageError(f"{name} is {value!r}: choose from {', '.join(known)}")
        flags = ("cuda_graph", "dynamic", "compare_eager", "check_writes")
        check_flags(**{name: getattr(self, name) for name in flags})
        check_flags(None, arena=self.arena, replan=self.replan)
        if not isinstance(self.cache, str | os.PathLike | None):
            raise UsageError(f"cache is {self.cache!r}: must be the name of a folder")
        if not isinstance(self.max_plans, int) or self.max_plans < 1:
            raise UsageError(f"max_plans is {self.max_plans!r}: at least one plan must be kept")
        check_compatible(self.features)

    @property
    def features(self) -> set[str]:
        """The features in these settings that may exclude others (``planner.settings.compatibility``)."""
        given = {
            Feature.INDUCTOR: self.kernels == "inductor",
            Feature.CUDA_GRAPH: self.cuda_graph,
            Feature.ARENA: self.arena,
            Feature.VARYING_SIZES: self.dynamic,
            Feature.REPLAN: self.replan,
        }
        return {feature for feature, asked in given.items() if asked}

    @property
    def goes_on(self) -> bool:
        """True if the search for better plans continues while the step trains."""
        return self.swap != "never" and not self.wait.reproducible

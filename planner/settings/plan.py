"""The settings of a plan: what users may say of how a step is traced, solved and run. Never imports torch.

One object has them all. Every front end makes it from its keyword arguments (``PlanSettings.of``), and the command line, the
options of the backend and the key of cached plans are made from its fields. The signatures of public functions are written out
all the same: for ``**settings: Unpack[...]`` editors, ``help`` and the documentation show no defaults.

Before, settings were three classes, and their names were written out in eight places; ``cuda_graph`` was forgotten in the key of
cached plans, so that a wrong plan could come from the cache. Now the key has all fields but those that are named as not
mattering.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from planner.capture.options import check_names, list_step_option_names, parse_option
from planner.graphs.errors import UsageError
from planner.graphs.optimizers import OPTIMIZERS, MeasuredOptimizer
from planner.graphs.options.option import Feature
from planner.settings.compatibility import check_compatible
from planner.settings.counted_memory import CountedMemory
from planner.settings.devices import get_device
from planner.settings.option_settings import RECOMPUTATION, OptionSettings, build_option_settings
from planner.settings.other_devices import parse_device
from planner.solvers.clock import Clock, WallClock, WorkClock
from planner.solvers.registry import check_params
from planner.solvers.tolerance import WIDENING, Tolerance

KERNELS = ("eager", "inductor")
SWAPS = ("exact", "any", "never")

_WAIT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|s|m|work)")
_ABOUT_OPTIONS = ("link", "host_budget", "exact")  # arguments that become part of the options
_GAP, _SECONDS = 0.01, 3.0  # the default quality to wait for, whichever is reached first


def check_positive(what: str, value: object, unit: str) -> None:
    """Raise a UsageError unless `value`, which is for `what` and in this `unit`, is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{what} is {value!r}: must be {unit}, above 0")


def check_count(what: str, value: object, least: int) -> None:
    """Raise a UsageError unless `value`, which is for `what`, is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is {value!r}: must be at least {least}, a whole number")


@dataclass(frozen=True, slots=True)
class Wait:
    """The quality that a plan must have before ``planner.compile`` returns; it fits in any case.

    Attributes:
        gap: required gap; None for any.
        seconds: time limit after which any gap is accepted; None for no limit.
        work: work limit (``planner.solvers.clock.WorkClock``), in place of seconds.
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


def check_flags(*others: object, **flags: object) -> None:
    """Raise a UsageError unless each of `flags` is True or False, or one of `others`: any text would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool) and value not in others:
            allowed = ", ".join(map(repr, (True, False, *others)))
            raise UsageError(f"{name} is {value!r}: must be one of {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """All settings of a plan but its budget, as the arguments of ``planner.trace``, ``planner.solve`` and ``planner.compile``.

    Attributes:
        optimizer: the optimizer, measured or by name.
        name: name of the model, for messages.
        numbers: names of numbers that stay inputs of the step, as Dynamo writes them.
        options: options of the graph and their settings.
        params: parameters of the solver, of its own class; None for its defaults.
        memory: kind of memory that the budget counts; None for the default of the device.
        arena: True if the buffers of the step must fit an arena, False if they lie where PyTorch's allocator puts them, None
            if a schedule may have an arena where it would otherwise reserve more than its budget, and a step that is compiled
            on a CPU where memory is tight.
        no_arena: why `arena` is False although memory is tight, in words; "" if there is nothing to say.

    Raises:
        UsageError: a setting has an invalid value, or two exclude each other.
        PlannerError: the solver does not take these options.
    """

    optimizer: str | MeasuredOptimizer = "none"
    accumulate: bool = False
    roofline: str | None = None
    passes: int = 5
    measure_link: bool = False
    other_devices: tuple[str, ...] = ()
    name: str = ""
    numbers: frozenset[str] = frozenset()
    options: OptionSettings = RECOMPUTATION
    solver: str = "windows"
    tolerance: Tolerance = WIDENING
    time_limit_s: float = 3600.0
    work_limit: float | None = None
    reorder: bool | None = None
    params: object = None
    memory: CountedMemory | None = None
    arena: bool | None = None
    no_arena: str = ""
    kernels: str = "eager"
    cuda_graph: bool = False
    dynamic: bool = False
    replan: bool | None = None
    max_plans: int = 32
    compare_eager: bool = True
    check_writes: bool = False
    cache: str | os.PathLike[str] | None = None
    wait: Wait = Wait()
    swap: str = "exact"

    def __post_init__(self) -> None:
        check_count("passes", self.passes, 1)
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise UsageError(f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
        if self.roofline is not None:
            get_device(self.roofline)
        for device in self.other_devices:
            parse_device(device)
        check_params(self.solver, self.params)
        self.start_clock()
        self.options.check_solver(self.solver)
        for name, value, known in (("kernels", self.kernels, KERNELS), ("swap", self.swap, SWAPS)):
            if value not in known:
                raise UsageError(f"{name} is {value!r}: choose from {', '.join(known)}")
        flags = ("accumulate", "measure_link", "cuda_graph", "dynamic", "compare_eager", "check_writes")
        check_flags(**{name: getattr(self, name) for name in flags})
        check_flags(None, arena=self.arena, replan=self.replan, reorder=self.reorder)
        check_flags(exact=self.options.exact)
        if not isinstance(self.cache, str | os.PathLike | None):
            raise UsageError(f"cache is {self.cache!r}: must be the name of a folder")
        if not isinstance(self.max_plans, int) or self.max_plans < 1:
            raise UsageError(f"max_plans is {self.max_plans!r}: at least one plan must be kept")
        check_compatible(self.features)

    @classmethod
    def of(
        cls,
        *,
        options: Sequence[str] | OptionSettings = (),
        tolerance: float | Tolerance = WIDENING,
        memory: str | None = None,
        wait: Wait | str | float | None = None,
        other_devices: Sequence[str] = (),
        **given: Any,
    ) -> "PlanSettings":
        """Return the settings from arguments of users: those that are converted, and the others as they are.

        Raises:
            UsageError, BudgetError: as for the class, or an argument cannot be read.
        """
        check_names(other_devices=other_devices)
        about = {name: given.pop(name) for name in _ABOUT_OPTIONS if name in given}
        return cls(
            options=options if isinstance(options, OptionSettings) else build_option_settings(options, **about),
            tolerance=Tolerance.of(tolerance),
            memory=CountedMemory.of(memory),
            wait=Wait.of(wait),
            other_devices=tuple(other_devices),
            **given,
        )

    @property
    def features(self) -> set[str]:
        """The features in these settings that may exclude others (``planner.settings.compatibility``)."""
        given = {
            Feature.ROOFLINE: self.roofline is not None,
            Feature.MEASURED_LINK: self.measure_link,
            Feature.OTHER_DEVICES: bool(self.other_devices),
            Feature.HOST_SHARE: self.options.shares_host,
            Feature.RESERVED: self.memory not in (None, CountedMemory.ALLOCATED),
            Feature.ARENA: self.arena,
            Feature.INDUCTOR: self.kernels == "inductor",
            Feature.CUDA_GRAPH: self.cuda_graph,
            Feature.VARYING_SIZES: self.dynamic,
            Feature.REPLAN: self.replan,
        }
        return {name for name, _ in map(parse_option, self.options.names)} | {
            feature for feature, asked in given.items() if asked
        }

    @property
    def traced_options(self) -> tuple[str, ...]:
        """The options that are found in the step when it is traced."""
        return list_step_option_names(self.options.names)

    @property
    def reads_numbers(self) -> bool:
        """True if numbers may be inputs of the step: the calls of some options take none."""
        return self.traced_options in ((), ("in-place",)) and not self.other_devices

    @property
    def goes_on(self) -> bool:
        """True if the search for better plans continues while the step trains."""
        return self.swap != "never" and not self.wait.reproducible

    @property
    def at_once(self) -> "PlanSettings":
        """These settings for the first schedule that fits, timed once, if a better one may replace it while the step trains."""
        return replace(self, passes=1, wait=Wait(gap=None, seconds=0.0)) if self.goes_on else self

    @property
    def made_with(self) -> dict[str, object]:
        """The settings that a cached plan depends on: all but those that are known not to matter."""
        known = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in NOT_IN_PLANS}
        params = self.params
        said = asdict(params) if is_dataclass(params) and not isinstance(params, type) else repr(params)
        return known | {"tolerance": self.tolerance.steps, "options": self.options.key, "params": said}

    def leave_arena(self, why: str) -> "PlanSettings":
        """Return these settings for a step in no arena, for a reason that its plan names."""
        return replace(self, arena=False, no_arena=why)

    def start_clock(self) -> Clock:
        """Return a clock that starts now, for the work limit if there is one, else for the time limit."""
        what, limit, unit = "time", self.time_limit_s, "seconds"
        if self.work_limit is not None:
            what, limit, unit = "work", self.work_limit, "a number"
        check_positive(f"{what} limit", limit, unit)
        return WallClock(limit) if self.work_limit is None else WorkClock(limit)


# The graph, its static memory and its costs have the first ones; the others change how a step runs, and when plans are replaced.
NOT_IN_PLANS = {"optimizer", "accumulate", "passes", "measure_link", "name", "numbers"} | {
    *("no_arena", "dynamic", "replan", "max_plans", "compare_eager", "check_writes", "cache", "wait", "swap")
}
_KEYWORDS = {one.name for one in fields(PlanSettings)} - {"numbers"} | {*_ABOUT_OPTIONS}


def select_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values`, by name, that ``PlanSettings.of`` takes: of the arguments of a function or of a command."""
    return {name: values[name] for name in values if name in _KEYWORDS}

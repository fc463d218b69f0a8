"""The settings of ``torch.compile(backend="planner")``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch.distributed as dist

from graphs.errors import PlannerError
from graphs.options.option import Feature
from planner.progress import OnProgress, views_of
from planner.settings.budgets import read_budget
from planner.settings.compatibility import check_compatible
from planner.settings.counted_memory import CountedMemory
from planner.settings.devices import get_device
from planner.settings.option_settings import option_settings
from planner.settings.stages import RunSettings, SolveSettings, Wait
from solvers.tolerance import WIDENING, Tolerance


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The settings of one call of ``torch.compile``.

    Attributes:
        budget: budget for all its graphs, as ``read_budget`` returns it.
        solve: settings of the solve of each graph.
        run: settings of the run; `kernels`, `arena`, `wait` and `check_writes` are used.
        roofline: device for modelled times; None to measure each op on the model's device.
        on_progress: as in ``planner.compile``.

    Raises:
        UsageError: settings do not go together, or do not work with ``torch.compile``.
    """

    budget: str | int
    solve: SolveSettings
    run: RunSettings
    roofline: str | None = None
    on_progress: OnProgress = None

    def __post_init__(self) -> None:
        around = {
            Feature.TORCH_COMPILE: True,
            Feature.ROOFLINE: self.roofline is not None,
            Feature.SEVERAL_PROCESSES: dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1,
        }
        views_of(self.on_progress)  # raises if it is no view
        if self.roofline is not None:
            get_device(self.roofline)
        check_compatible(self.solve.features | self.run.features | {feature for feature, there in around.items() if there})


def settings_of(options: Mapping[str, Any] | None) -> BackendSettings:
    """Return the settings given by the backend's options.

    Raises:
        PlannerError: an option is unknown or invalid, options exclude each other, or there is no budget.
    """
    given = dict(options or {})
    known = signature(backend_settings).parameters
    for name, value in given.items():
        if name not in known:
            raise PlannerError(f"unknown option {name!r} of the backend planner: choose from {', '.join(sorted(known))}")
        if name in ("time_limit_s", "tolerance") and not (isinstance(value, int | float) and math.isfinite(value)):
            raise PlannerError(f"option {name!r} is {value!r}: must be a number")
    if not isinstance(given.get("budget"), str | int | float):
        raise PlannerError(
            'the backend planner needs a budget: torch.compile(model, backend="planner", options={"budget": "8GB"})'
        )
    return backend_settings(**given)


def backend_settings(
    *,
    arena: bool = False,
    budget: str | float,
    check_writes: bool = False,
    host_budget: str | int | None = None,
    kernels: str = "eager",
    link: str | float | None = None,
    memory: str | None = None,
    on_progress: OnProgress = None,
    options: Sequence[str] = (),
    params: object = None,
    roofline: str | None = None,
    time_limit_s: float = 60.0,
    tolerance: float | Tolerance = WIDENING,
    wait: Wait | str | float | None = None,
) -> BackendSettings:
    """Return the settings for the options of the backend; see ``backend.planner``."""
    solve = SolveSettings(
        tolerance=Tolerance.of(tolerance),
        time_limit_s=float(time_limit_s),
        options=option_settings(options, link, host_budget),
        params=params,
        memory=CountedMemory.of(memory),
    )
    run = RunSettings(kernels=kernels, arena=arena, check_writes=check_writes, wait=Wait.of(wait))
    return BackendSettings(read_budget(budget), solve, run, roofline, on_progress)

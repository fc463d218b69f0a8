"""The settings of ``torch.compile(backend="planner")``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from planner.graphs.errors import PlannerError, refuse_unknown_options
from planner.graphs.options.option import Feature
from planner.progress import OnProgress, list_views
from planner.settings.budget import Budget, read_budget
from planner.settings.compatibility import check_compatible
from planner.settings.plan import PlanSettings

# Those of ``planner.compile`` that the backend has, and their defaults where these differ.
OPTIONS_OF_COMPILE = {
    *("arena", "check_writes", "host_budget", "kernels", "link", "memory", "options", "params", "roofline", "time_limit_s"),
    *("tolerance", "wait"),
}
_DEFAULTS = {"time_limit_s": 60.0, "arena": False}


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The settings of one call of ``torch.compile``.

    Attributes:
        on_progress: as in ``planner.compile``.

    Raises:
        UsageError: settings do not go together, or do not work with ``torch.compile``.
    """

    budget: Budget
    plan: PlanSettings
    on_progress: OnProgress = None

    def __post_init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        list_views(self.on_progress)  # raises if it is no view
        check_compatible(self.plan.features | {Feature.TORCH_COMPILE} | ({Feature.SEVERAL_PROCESSES} if several else set()))


def parse_backend_options(options: Mapping[str, Any] | None) -> BackendSettings:
    """Return the settings given by the backend's options."""
    given = dict(options or {})
    known = OPTIONS_OF_COMPILE | {"budget", "on_progress"}
    refuse_unknown_options(given, known, "the backend planner")
    for name, value in given.items():
        if name in ("time_limit_s", "tolerance") and not (isinstance(value, int | float) and math.isfinite(value)):
            raise PlannerError(f"option {name!r} is {value!r}: must be a number")
    budget, on_progress = given.pop("budget", None), given.pop("on_progress", None)
    if not isinstance(budget, str | int | float):
        raise PlannerError(
            'the backend planner needs a budget: torch.compile(model, backend="planner", options={"budget": "8GB"})'
        )
    return BackendSettings(read_budget(budget), PlanSettings.of(**_DEFAULTS | given), on_progress)

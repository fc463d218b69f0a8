"""Optimal rematerialization for PyTorch: ``trace``, ``solve``, ``compile``, ``checkpoint``, ``rematerialize``, ``run``."""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from planner.errors import explain_missing_packages

if TYPE_CHECKING:
    __version__: str
    from planner.graphs.errors import BudgetError, LimitError, OutOfMemoryError, PlannerError, TraceError
    from planner.measure.run_plan import RunReport, run
    from planner.measure.tracing import trace
    from planner.plans.plan import Plan
    from planner.plans.solve import solve
    from planner.solvers.windows.params import WindowsParams
    from planner.studies.advise import advise, curve
    from planner.train.backend.checkpoint import checkpoint
    from planner.train.compile.compile import compile  # noqa: A004
    from planner.train.compile.dynamic import DynamicStep
    from planner.train.compile.step import PlannedStep
    from planner.train.eager.session import rematerialize

__all__ = [
    "BudgetError",
    "DynamicStep",
    "LimitError",
    "OutOfMemoryError",
    "Plan",
    "PlannedStep",
    "PlannerError",
    "RunReport",
    "TraceError",
    "WindowsParams",
    "__version__",
    "advise",
    "checkpoint",
    "compile",
    "curve",
    "rematerialize",
    "run",
    "solve",
    "trace",
]

_MODULES = {
    **dict.fromkeys(("BudgetError", "LimitError", "OutOfMemoryError", "PlannerError", "TraceError"), "planner.graphs.errors"),
    "DynamicStep": "planner.train.compile.dynamic",
    "PlannedStep": "planner.train.compile.step",
    "Plan": "planner.plans.plan",
    "RunReport": "planner.measure.run_plan",
    "WindowsParams": "planner.solvers.windows.params",
    "advise": "planner.studies.advise",
    "checkpoint": "planner.train.backend.checkpoint",
    "compile": "planner.train.compile.compile",
    "curve": "planner.studies.advise",
    "rematerialize": "planner.train.eager.session",
    "run": "planner.measure.run_plan",
    "solve": "planner.plans.solve",
    "trace": "planner.measure.tracing",
}


def __getattr__(name: str) -> object:
    # The command must answer before torch is imported.
    if name == "__version__":
        return version("remat-planner")
    if name not in _MODULES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    with explain_missing_packages():
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""A folder of plans, each found by all that it depends on."""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from planner.graphs.errors import BudgetError, FormatError, OutputError, PlannerError
from planner.graphs.io.files import check_writable
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.units import format_bytes
from planner.plans.document import write_plan
from planner.plans.plan import Plan, read_plan
from planner.settings.budget import Budget, Overhead


class PlanCache:
    """One JSON file per plan. Several processes may share the folder: files are replaced atomically.

    Args:
        folder: created if it does not exist; ``~`` is the user's home.

    Raises:
        OutputError: nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not os.fspath(folder):
            raise OutputError("cache is '': name a folder, as in '~/.cache/remat-planner', or leave it out")
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"plans cannot be stored in {self._folder}: {error.strerror or error}") from None
        check_writable(self._folder / "plan.json")

    def get_path(self, made_for: Mapping[str, object]) -> Path:
        """Return the file of the plan for `made_for`: graph, budget, device, options, and all else that a plan depends on."""
        text = json.dumps({**made_for, "remat-planner": version("remat-planner")}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, path: Path, budget: Budget) -> Plan | None:
        """Return the plan in `path`, made for `budget`; None if there is no usable plan. Warn if the file is unusable."""
        if not os.path.lexists(path):
            return None
        try:
            _check_is_file(path)
            plan = read_plan(path)
            _check_budget(plan, budget)
        except PlannerError as error:
            warn_unusable(path, error)
            return None
        return plan

    def store(self, plan: Plan, path: Path) -> None:
        """Store `plan`. Warn, and do not raise, if that fails."""
        try:
            if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
                path.unlink()  # the target of a link is not overwritten
            write_plan(plan, path)
        except (OSError, OutputError) as error:
            warn_caller(f"the plan was not stored in the cache: {error}")


def _check_is_file(path: Path) -> None:
    """Raise if `path` is no regular file, such as a symbolic link or a pipe."""
    if path.is_symlink():
        raise FormatError("it is a symbolic link")
    if not path.is_file():
        raise FormatError("it is no file")


def _check_budget(plan: Plan, budget: Budget) -> None:
    """Raise if the budget, or the measured peak, in the file does not match the requested budget."""
    if plan.measured_peak_bytes is not None and plan.compute_needed_bytes(plan.measured_peak_bytes) > plan.budget_bytes:
        raise BudgetError(
            f"its measured peak here is {format_bytes(plan.measured_peak_bytes)}, over its budget of "
            f"{format_bytes(plan.budget_bytes)}"
        )
    recorded_bytes = plan.graph.provenance.shares_of_bytes
    whole_bytes = plan.eager_bytes if recorded_bytes is None else recorded_bytes
    if whole_bytes < plan.graph.static_bytes:
        raise FormatError(f"its budget is a share of {whole_bytes} B, which is no peak of this step")
    if isinstance(budget, Overhead):
        return  # its budget was found, and its file is named after the requested overhead
    asked_bytes = budget.resolve(whole_bytes)
    if plan.budget_bytes != asked_bytes:
        raise BudgetError(f"its budget is {plan.budget_bytes} B, and {asked_bytes} B was asked for")


def warn_unusable(path: Path, why: object) -> None:
    """Warn that the plan in `path` is unusable, and will be replaced."""
    warn_caller(f"the cached plan {path} cannot be used, and the step is planned again: {why}")

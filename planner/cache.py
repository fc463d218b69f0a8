"""Plans that are kept in a folder, and found again by what they were made for."""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from graphs.errors import OutputError, PlannerError
from graphs.jsonfile import check_writable
from graphs.jsonio import read_plan, write_plan
from graphs.plan import Plan


class PlanCache:
    """One JSON file per plan. Several processes may use one folder: a file is replaced whole.

    Args:
        folder: made if it is not there; ``~`` is the user's home.

    Raises:
        OutputError: nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"plans cannot be kept in {self._folder}: {error.strerror or error}") from error
        check_writable(self._folder / "plan.json")

    def path(self, made_for: Mapping[str, object]) -> Path:
        """The file of the plan that is made for this: graph, budget, device, options; whatever a plan depends on."""
        text = json.dumps({**made_for, "remat-planner": version("remat-planner")}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, path: Path) -> Plan | None:
        """The plan in `path`; None where there is none, or none that can be read, which is said in a warning."""
        if not path.exists():
            return None
        try:
            return read_plan(path)
        except PlannerError as error:
            warn_unusable(path, error)
            return None

    def store(self, plan: Plan, path: Path) -> None:
        """Keep `plan`. Where that fails there is a warning only: the plan is good all the same."""
        try:
            write_plan(plan, path)
        except OutputError as error:
            warnings.warn(f"the plan is not kept: {error}", stacklevel=3)


def warn_unusable(path: Path, why: object) -> None:
    """Say that the plan in `path` is of no use, and will be replaced."""
    warnings.warn(f"the kept plan {path} cannot be used and is made again: {why}", stacklevel=3)

"""Run a script that plans, with the budget HALF_WAY: ``python -m tests.support.run_half_way script.py``."""

import runpy
import sys
from pathlib import Path

from tests.support.budgets import HALF_WAY, half_way_known

if __name__ == "__main__":
    sys.argv = [*sys.argv[1:], "--budget", HALF_WAY]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python has it for a script
    with half_way_known():
        runpy.run_path(sys.argv[0], run_name="__main__")

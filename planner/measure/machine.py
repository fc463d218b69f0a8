"""The machine and the commit that a result was made with."""

import platform
import subprocess
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> str:
    """Return the processor's name and its number of cores."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {psutil.cpu_count()} cores"


def commit() -> str:
    """Return the checked-out commit, with a note if the source code has changed since."""
    say = ("git", "-C", str(ROOT))
    try:
        head = subprocess.run((*say, "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)
        changed = subprocess.run((*say, "diff", "--quiet", "HEAD", "--", "graphs", "solvers", "planner"), check=False)
    except FileNotFoundError:  # no git
        return "unknown"
    return (head.stdout.strip() + (" with changes" if changed.returncode else "")) if not head.returncode else "unknown"

"""What the benchmarks of steps share: their command line, what their rows are made on and with, and what they write."""

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from graphs.io.files import write_text
from planner.runtime.machine import commit
from planner.runtime.measure import device_name
from planner.studies.rows import write_csv

PROVENANCE = ("machine", "commit", "torch")  # the last columns of every CSV


def command_line(description: str | None, *, models: Collection[str], out: str) -> argparse.ArgumentParser:
    """Which of `models` to measure, and the folder to write to."""

    def named(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in models]:
            raise argparse.ArgumentTypeError(f"there is no model {unknown[0]!r}: choose from {', '.join(models)}")
        return names

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=named, default=",".join(models), help="with commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of rows.csv and table.md (default: %(default)s)")
    return parser


def one_thread() -> None:
    """Compute with one thread: two that wait for each other double what other processes disturb."""
    torch.set_num_threads(1)


def provenance(device: torch.device | None = None) -> dict[str, str]:
    """The cells of PROVENANCE, of what runs on `device` (None: the CPU)."""
    return {"machine": device_name(device or torch.device("cpu")), "commit": commit(), "torch": torch.__version__}


def columns_of(kind: type) -> tuple[str, ...]:
    """Of a CSV whose rows are the dataclass `kind`."""
    return tuple(field.name for field in fields(kind))


def exit_code(failures: Sequence[str]) -> int:
    """What a benchmark ends with that found `failures` among its rows, which are said: 1, or 0 for none."""
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


def write(folder: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]], table: str) -> None:
    """Write rows and table into `folder`, and print the table."""
    write_csv(folder / "rows.csv", columns, rows)
    write_text(folder / "table.md", table)
    print(table, end="")

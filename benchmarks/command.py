"""Command-line arguments that all benchmarks share, and the execution of a study."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from planner.cli import argument_types
from planner.graphs.errors import PlannerError
from planner.studies.experiment import Study
from planner.studies.rows import Key

Case = TypeVar("Case")
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Setting:
    """A command-line argument, and the keyword argument of the function that runs a case."""

    default: object
    said: str
    form: Callable[[str], Any] = argument_types.count


@dataclass(frozen=True, slots=True)
class Main:
    """The ``main`` of a benchmark whose cases are models.

    Attributes:
        study: of cases that are names of `models`. Rows of ``source/model`` have these two as the first parts of their keys. The
            docstring of the module of its `run` is the description.
        models: the names, or a function that returns them.
        out: as for ``build_parser``; None: the folder in ``results`` that is named like the module.
        chosen: those that are measured by default; None: all.
        settings: arguments of the command line that ``study.run`` takes by the same names.
    """

    study: Study[str, Any]
    models: Collection[str] | Callable[[], Collection[str]]
    out: str | None = None
    chosen: Iterable[str] | None = None
    say: Callable[[Any], str] | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __call__(self, words: Sequence[str] | None = None) -> int:
        """Run the models that `words` ask for; return the exit code."""
        module = self.study.run.__module__
        out = self.out or f"results/{module.rpartition('.')[2]}"
        parser = build_parser(sys.modules[module].__doc__, self.study.row, out=out)
        names = self.models() if callable(self.models) else self.models
        add_names(parser, "--models", names, None if self.chosen is None else ",".join(self.chosen))
        add_settings(parser, self.settings)
        arguments = parser.parse_args(words)
        limit_threads()
        run = partial(self.study.run, **{name: getattr(arguments, name) for name in self.settings})
        cases = {tuple(name.split("/")): name for name in arguments.models}
        return carry_out(replace(self.study, run=run), arguments, cases, say=self.say)


def add_settings(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Add an argument for each of `settings`."""
    for name, setting in settings.items():
        said = f"{setting.said} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=setting.form, default=setting.default, help=said)


def build_parser(description: str | None, row: Any, *, models: Collection[str] = (), out: str) -> argparse.ArgumentParser:
    """Return the parser of the arguments that all benchmarks share.

    Args:
        row: the dataclass of its rows, whose columns ``--help`` explains.
        models: the names to choose from, if there are any.
        out: the folder of its files by default.
    """
    columns = (f"  {column.name}: {said}" for column in fields(row) if (said := column.metadata.get("said")))
    parser = argparse.ArgumentParser(
        description=description,
        epilog="\n".join(("columns of the CSV, where a cell is empty if it is not known:", *columns)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if models:
        add_names(parser, "--models", models)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of rows and tables (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="make these rows anew; otherwise those in the CSV are kept")
    parser.add_argument("--tables-only", action="store_true", help="make tables and figures of the CSV, and no rows")
    return parser


def add_names(parser: argparse.ArgumentParser, flag: str, names: Collection[str], default: str | None = None) -> None:
    """Add an argument for some of `names`, separated by commas; by default for all of them."""
    every = ",".join(names)
    parser.add_argument(
        flag,
        type=make_names_reader(flag[2:-1], names),
        default=default or every,
        help=f"with commas, of {every} (default: %(default)s)",
    )


def make_names_reader(kind: str, names: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the function that reads some of `names`, of a `kind`, separated by commas."""

    def read_names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(f"there is no {kind} {unknown[0]!r}: choose from {', '.join(names)}")
        return found

    return read_names


def carry_out(
    study: Study[Case, Any],
    arguments: argparse.Namespace,
    cases: Mapping[Key, Case],
    *,
    say: Callable[[Any], str] | None = None,
    cluster: str | None = None,
) -> int:
    """Run the missing cases, and print the pages of all rows. Pages are written after every row, figures at the end.

    Args:
        arguments: of ``build_parser``.
        cases: by the first parts of the keys of their rows.
        say: returns the text to print for a new row.
        cluster: the address of a Dask scheduler, whose workers run the cases.

    Returns:
        The exit code: 1 if there are failures, 2 if the CSV or the cluster is unusable.
    """
    try:
        kept = study.read_kept(arguments.out)
        if not arguments.tables_only:
            if arguments.fresh:
                kept.drop([row for key in cases for row in kept.of(*key)])
            for rows in study.fill(kept, cases, cluster=cluster):
                for row in rows if say is not None else ():
                    print(say(row), flush=True)
                study.write_pages(list(kept), arguments.out)
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = tuple(kept)
    print(*study.write_pages(rows, arguments.out), sep="", end="")
    study.draw_figures(rows, arguments.out)
    failures = list(study.failures(rows)) if study.failures is not None else []
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


def limit_threads() -> None:
    """Set the number of threads to one: two that wait for each other double the noise of other processes."""
    torch.set_num_threads(1)

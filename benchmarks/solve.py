"""How fast the windows solver is and how near to optimal: ``make bench-solve`` writes results/solve/.

Every row is one solve in a process of its own, so that its peak memory is its own. Rows that are in
the CSV are not solved again; the table and the plots are made from the CSV alone.
"""

import argparse
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.solve_case import Case, Outcome, make_graph, solve_case
from benchmarks.solve_suites import PUBLISHED, SUITES, Instance, Landmarks
from graphs.errors import OutputError, PlannerError
from graphs.io.files import write_text
from graphs.io.formats import read_graph
from planner.studies.jobs import run
from planner.studies.rows import read_csv, write_csv

T = TypeVar("T")
KEY = ("suite", "graph", "budget", "solver", "run")
COLUMNS = (*(field.name for field in fields(Case)), *(field.name for field in fields(Outcome)))


class Book:
    """The rows of the CSV: what was solved so far. The file is whole after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_csv(path, COLUMNS)

    def drop(self, suites: list[str]) -> None:
        """Forget the rows of `suites`."""
        self.rows = [row for row in self.rows if row["suite"] not in suites]

    def add(self, case: Case, outcome: Outcome) -> None:
        """Write a row more."""
        row = {**asdict(case), **asdict(outcome)}
        self.rows.append({name: "" if value is None else str(value) for name, value in row.items()})
        write_csv(self.path, COLUMNS, self.rows)

    def find(self, *key: str | int) -> list[dict[str, str]]:
        """The rows whose first columns, as in KEY, are `key`."""
        return [row for row in self.rows if all(row[name] == str(value) for name, value in zip(KEY, key, strict=False))]


def solve_instance(instance: Instance, book: Book) -> Iterator[tuple[Case, Outcome]]:
    """The rows of `instance` that are not in `book` yet.

    Times are worth comparing only of solves that end: what a solver did not end within the limit is not run again.
    Later runs are at the budget of the first, though the least budget may be found otherwise the next time.
    """
    made: Path | None = None
    marks: Landmarks | None = None
    with tempfile.TemporaryDirectory() as folder:
        for budget in instance.budgets:
            at = (instance.suite, instance.graph, budget.label)
            for run, solver in [(run, solver) for run in range(1, instance.runs + 1) for solver in instance.solvers]:
                if book.find(*at, solver, run) or (run > 1 and not all_solved(book, at, instance.solvers)):
                    continue
                if made is None or marks is None:
                    made = Path(folder, "graph.json")
                    in_process(make_graph, instance.make, made)
                    marks = Landmarks(read_graph(made))
                known = book.find(*at)
                case = Case(
                    *at,
                    solver,
                    run,
                    int(known[0]["budget_bytes"]) if known else budget.bytes_at(marks),
                    instance.time_limit_s,
                    budget.reference_time_s,
                    budget.reference_seconds,
                )
                outcome = in_process(solve_case, case, made)
                book.add(case, outcome)
                yield case, outcome


def all_solved(book: Book, at: tuple[str, str, str], solvers: tuple[str, ...]) -> bool:
    """Whether each of `solvers` ended its first run by itself."""
    return all(row["status"] in ("optimal", "infeasible") for solver in solvers for row in book.find(*at, solver, 1))


def in_process(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` in a new process, which ends with the call. Workers of a cluster may start one, unlike a pool.

    Raises:
        SystemExit: the process failed, or was killed, say for want of memory.
    """
    # What is printed there goes to the standard error, so that the answer is alone.
    child = "import os, pickle, sys; out = os.fdopen(os.dup(1), 'wb'); os.dup2(2, 1); call, given = pickle.load(sys.stdin.buffer)"
    child += "; pickle.dump(call(*given), out)"
    done = subprocess.run([sys.executable, "-c", child], input=pickle.dumps((function, arguments)), stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"the process of {function.__name__}{arguments} ended with {done.returncode}: is there memory enough?")
    returned: T = pickle.loads(done.stdout)
    return returned


def solve_apart(instance: Instance, should_stop: Callable[[], bool], *, rows: list[dict[str, str]]) -> list[tuple[Case, Outcome]]:
    """The rows of `instance` that are not in `rows` yet, on a worker of a cluster."""
    with tempfile.TemporaryDirectory() as folder:
        book = Book(Path(folder, "rows.csv"))
        book.rows = list(rows)
        return list(solve_instance(instance, book))


def solve_instances(instances: Iterable[Instance], book: Book, cluster: str | None) -> Iterator[tuple[Case, Outcome]]:
    """Add the rows that are not in `book` yet, one after the other here, or on a `cluster` if one is named.

    Raises:
        PlannerError: the cluster cannot be reached, or was lost.
    """
    if cluster is None:
        for instance in instances:
            yield from solve_instance(instance, book)
        return
    waiting = iter(instances)
    job = partial(solve_apart, rows=book.rows)
    for done in run(job, lambda: next(waiting, None), lambda: False, cluster=cluster):
        for case, outcome in done:
            book.add(case, outcome)
            yield case, outcome


def main(words: Sequence[str] | None = None) -> None:
    """Solve what is not in the CSV yet, then make the table and the plots."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.solve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=Path, default=Path("../shared/instances"), help="folder of public instances")
    parser.add_argument("--suites", default=",".join(SUITES), help="which to solve, with commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/solve"), help="where CSV, table and plots are written")
    parser.add_argument("--fresh", action="store_true", help="solve all of these suites anew")
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, whose workers solve: one thread each")
    arguments = parser.parse_args(words)
    suites = arguments.suites.split(",")
    if unknown := set(suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}: choose from {', '.join(SUITES)}")
    if not arguments.instances.is_dir():
        print(
            f"there is no folder {arguments.instances}: {', '.join(PUBLISHED)} and parts of reference are left out",
            file=sys.stderr,
        )
        suites = [suite for suite in suites if suite not in PUBLISHED]
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        book = Book(arguments.out / "rows.csv")
    except OutputError as error:
        parser.error(str(error))
    if arguments.fresh:
        book.drop(suites)
    try:
        instances = (instance for suite in suites for instance in SUITES[suite](arguments.instances))
        for case, outcome in solve_instances(instances, book, arguments.cluster):
            key = ", ".join(str(getattr(case, name)) for name in KEY)
            print(f"{key}: {outcome.status}, {outcome.seconds:.2f} s", flush=True)
    except PlannerError as error:
        parser.error(str(error))
    finally:
        write_report(book, arguments.out)


def write_report(book: Book, folder: Path) -> None:
    """Table and plots of what is in `book`, in `folder`; nothing if that is nothing."""
    from benchmarks.solve_table import growth_plot, read_rows, solves_plot, table_text  # heavy: the solving processes go without

    if book.rows:
        rows = read_rows(book.path)
        write_text(folder / "table.md", table_text(rows))
        if book.find("growth"):
            growth_plot(rows, folder / "growth.png")
        solves_plot(rows, folder / "solves.png")


if __name__ == "__main__":
    main()

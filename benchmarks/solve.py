"""Speed and gaps of the exact solver: ``make bench-solve`` writes results/solve/.

Every row is one solve in its own process, so that its peak memory is its own. Rows that are in the CSV are not solved again; the
table and the plots depend on the CSV alone.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.command import add_names, build_parser, carry_out
from benchmarks.solve_case import SolverRow, make_graph, solve_case
from benchmarks.solve_suites import PUBLISHED, SUITES, Instance, Landmarks
from benchmarks.solve_table import draw_growth, draw_solves, format_table
from planner.graphs.io.formats import read_graph
from planner.plans.select_attributes import select_attributes
from planner.solvers.result import SOLVED, Status
from planner.studies.experiment import Study
from planner.studies.processes import iterate_results
from planner.studies.rows import find_missing_keys


def solve_instance(instance: Instance, known: Sequence[SolverRow]) -> Iterator[SolverRow]:
    """Yield the rows of `instance` that are not `known`.

    Only times of solves that end are comparable: a solver that did not end within the limit is not run again. Later runs are at
    the budget of the first, though the search for the least budget may have another result the next time.
    """
    marks: Landmarks | None = None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "graph.json")
        for budget in instance.budgets:
            there = [row for row in known if row.budget == budget.label]
            asked = product(range(1, instance.runs + 1), instance.solvers)
            for run, solver in find_missing_keys(asked, there, "run", "solver"):
                if run > 1 and not is_all_solved(there, instance.solvers):
                    continue
                if marks is None:
                    list(iterate_results(make_graph, instance.make, made))
                    marks = Landmarks(read_graph(made))
                case = SolverRow(
                    **select_attributes(instance, "suite", "graph", "time_limit_s"),
                    **select_attributes(budget, "reference_time_s", "reference_seconds"),
                    budget=budget.label,
                    solver=solver,
                    run=run,
                    budget_bytes=there[0].budget_bytes if there else budget.bytes_at(marks),
                )
                for row in iterate_results(solve_case, case, made):
                    there.append(row)
                    yield row


def is_all_solved(rows: Iterable[SolverRow], solvers: Sequence[str]) -> bool:
    """Return True if each of `solvers` ended its first run by itself, of the `rows` at one budget."""
    ended = (*SOLVED, Status.INFEASIBLE)
    return all(row.status in ended for row in rows if row.run == 1 and row.solver in solvers)


STUDY = Study(
    SolverRow,
    solve_instance,
    whole=False,
    pages={"table.md": format_table},
    figures={"growth.png": draw_growth, "solves.png": draw_solves},
)


def main(words: Sequence[str] | None = None) -> int:
    """Solve the missing cases, then make the table and the plots."""
    parser = build_parser(__doc__, SolverRow, out="results/solve")
    parser.add_argument("--instances", type=Path, default=Path("../shared/instances"), help="folder of public instances")
    add_names(parser, "--suites", SUITES)
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, whose workers solve: one thread each")
    arguments = parser.parse_args(words)
    suites = arguments.suites
    if not arguments.tables_only and not arguments.instances.is_dir():
        print(
            f"there is no folder {arguments.instances}: {', '.join(PUBLISHED)} and parts of reference are left out "
            "(name the folder of public instances with --instances)",
            file=sys.stderr,
        )
        suites = [suite for suite in suites if suite not in PUBLISHED]
    instances = (instance for suite in suites for instance in SUITES[suite](arguments.instances))
    cases = {(instance.suite, instance.graph): instance for instance in instances}
    return carry_out(STUDY, arguments, cases, say=_format_line, cluster=arguments.cluster)


def _format_line(row: SolverRow) -> str:
    return f"{row.suite}, {row.graph}, {row.budget}, {row.solver}, {row.run}: {row.status}, {row.seconds:.2f} s"

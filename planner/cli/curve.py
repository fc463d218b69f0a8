"""``planner curve``: compute overhead against budget for a graph."""

import argparse
import math
from pathlib import Path

from planner.cli import argument_types, arguments as shared

_TOTAL_S = 30.0


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "curve",
        "solve a graph at several budgets: overhead against memory",
        "A schedule for one budget serves all larger ones, a bound at one holds at all smaller ones. With --options the\n"
        "same budgets are solved without them, too.\n"
        "Ctrl-C ends the solves with what has been found so far; a second one quits at once.\n"
        "exit codes: 0 a schedule for some budget, 2 usage, 3 proved: none fits any in the order of the ops that was tried,\n"
        "4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner curve model.json -o curve.csv --plot curve.png\n"
        "  planner curve model.json --budgets 90%,8GB,7.5GiB --time-limit 2m\n"
        "  planner curve model.json --options offload --link 50GB/s --host-budget 64GB -o curve.csv",
    )
    parser.add_argument("graph", metavar="GRAPH", type=argument_types.parse_graph, help="what planner trace wrote")
    parser.add_argument(
        "--budgets",
        type=argument_types.parse_budgets,
        default=10,
        metavar="N|LIST",
        help="how many, from the least feasible to what plain eager PyTorch takes, or a list of amounts and shares of the "
        "latter (default: 10)",
    )
    parser.add_argument("-o", "--output", type=argument_types.parse_output, metavar="FILE", help="CSV to write")
    parser.add_argument("--plot", metavar="FILE", help="figure to write (.png, .pdf, .svg)")
    shared.add_solver(parser)
    shared.add_study(
        parser,
        jobs="budgets solved",
        each="for each budget: 90, 90s, 10m (default: what the whole curve may take)",
        total="for the whole curve: every budget is solved for a short time first, and those with a gap again while time is left",
        total_time_limit_s=_TOTAL_S,
    )
    shared.add_reorder(parser, default=None, said="with --solver windows, if one lowers the peak")
    shared.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Solve at every budget, and write and plot the curve if requested; return the exit code."""
    from planner.cli.interrupt import StopOnInterrupt
    from planner.graphs.io.files import check_writable
    from planner.graphs.io.formats import read_graph
    from planner.progress import LineView
    from planner.show.views.figures import check_plot, save_figure
    from planner.solvers.result import Status
    from planner.studies.curve import CurveRow
    from planner.studies.curve_table import build_curve_data
    from planner.studies.rows import write_rows
    from planner.studies.solve_curve import solve_curve

    graph = read_graph(arguments.graph)
    if arguments.output is not None:
        check_writable(arguments.output, arguments.graph, suffix=".csv")
    if arguments.plot is not None:
        check_plot(Path(arguments.plot))
    with LineView(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        found = solve_curve(
            graph,
            arguments.budgets,
            shared.build_study_settings(arguments, time_limit_s=math.inf, total_time_limit_s=_TOTAL_S),
            solver=arguments.solver,
            reorder=arguments.reorder,
            on_activity=progress.show_activity,
            should_stop=interrupt,
        )
    if arguments.output is not None:
        write_rows(Path(arguments.output), CurveRow, found.all_rows)
    if arguments.plot is not None:
        save_figure(found.plot(), Path(arguments.plot))
    shared.print_result(arguments, build_curve_data, str, found, written=(arguments.output, arguments.plot))
    if any(point.schedule for point in found.points):
        return shared.DONE
    return shared.INFEASIBLE if all(point.status is Status.INFEASIBLE for point in found.points) else shared.LIMIT

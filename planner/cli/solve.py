"""``planner solve``: solve a graph for a budget.

The plan is always kept, beside the graph unless another file is named: without ``-o`` it was lost before. What would refuse the
file is checked before the search. Known weakness: nothing is written before the end, so that a second Ctrl-C leaves no plan.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import argument_types, arguments as shared
from planner.graphs.errors import UsageError
from planner.settings.plan import select_settings
from planner.solvers.tolerance import WIDENING

if TYPE_CHECKING:
    from planner.graphs.ir import Graph
    from planner.solvers.windows.params import WindowsParams


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "solve",
        "find the fastest schedule of a graph that fits a memory budget",
        "Ctrl-C ends the solve with the best schedule found so far; a second one quits at once.\n"
        "exit codes: 0 a schedule, 2 usage, 3 proved: none fits in the orders of the ops that were tried, 4 none found in time,\n"
        "1 anything else\n\n"
        "examples:\n"
        "  planner solve model.json --budget 8GB -o plan.json\n"
        "  planner solve model.json --budget 60% --time-limit 10m --tolerance 0.5%\n"
        "  planner solve model.json --max-overhead 10% -o plan.json\n"
        "  planner solve model.json --budget 40% --options chunks\n"
        "  planner solve model.json --budget 60% --options offload --link 50GB/s --host-budget 64GB\n",
    )
    parser.add_argument("graph", metavar="GRAPH", type=argument_types.parse_graph, help="what planner trace wrote")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--budget",
        type=argument_types.check_budget,
        help="memory of the whole step, parameters and optimizer state included: 8GB (10^9), 7.5GiB (2^30), "
        "or 60%% of the predicted peak of plain eager PyTorch",
    )
    wanted.add_argument(
        "--max-overhead",
        type=argument_types.parse_fraction_argument,
        metavar="SHARE",
        help="find the least memory at which the step takes at most this much longer: 10%% or 0.1",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=argument_types.parse_output,
        metavar="FILE",
        help="the plan to write (default: beside the graph, model.plan.json)",
    )
    shared.add_solver(parser)
    _add_limits(parser)
    parser.add_argument(
        "--write-model",
        metavar="FILE",
        help="with --solver checkmate: write its program as well, for other solvers (.lp or .mps)",
    )
    parser.add_argument(
        "--params",
        metavar="FILE",
        help="parameters of the solver windows, a TOML file with the fields of WindowsParams: changes how soon a proof is "
        "found, never what is proved",
    )
    shared.add_memory(parser)
    parser.add_argument(
        "--arena",
        action=argparse.BooleanOptionalAction,
        help="plan for a step in an arena (default: if it would not fit without)",
    )
    shared.add_graph_options(parser)
    shared.add_reorder(parser, default=None, said="with --solver windows, after program order, if it can gain")
    shared.add_quiet(parser)


def _add_limits(parser: shared.Parser) -> None:
    """Add the options that limit a solve: time or work, and the tolerance."""
    limits = parser.add_mutually_exclusive_group()
    shared.add_time_limit(
        limits, said="stop after this time with the best schedule so far: 90, 90s, 10m or 1.5h (default: 1h)", default=3600.0
    )
    shared.add_work_limit(limits, said="the same plan on every run, and on slower machines; one thread works at a time")
    shared.add_tolerance(
        parser,
        said="stop at a schedule that is this close to the bound, such as 0.1%% or 0.001 "
        "(default: 0.1%%, 0.5%% after 20 s, 2%% after 2 minutes)",
        default=WIDENING,
    )


def run(arguments: argparse.Namespace) -> int:
    """Solve, and write the plan if requested; return the exit code."""
    from planner.cli.interrupt import StopOnInterrupt
    from planner.graphs.io.formats import read_graph
    from planner.plans.document import write_plan
    from planner.plans.plan import name_graph
    from planner.plans.solve import solve
    from planner.progress import LineView
    from planner.show.report.describe import plan_data, plan_text

    graph = read_graph(arguments.graph)
    output = _choose_output(arguments)
    if arguments.write_model is not None:
        _write_model(graph, arguments)
    params = _build_params(arguments)
    with LineView(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        plan = solve(
            graph,
            arguments.budget,
            max_overhead=arguments.max_overhead,
            **select_settings(vars(arguments)) | {"params": params},
            on_progress=progress,
            should_stop=interrupt,
        )
    write_plan(name_graph(plan, output, arguments.graph), output)
    shared.print_result(
        arguments,
        lambda: {"output": output, **plan_data(plan)},
        lambda: f"{plan_text(plan)}\nwritten to {output}",
        written=(output, arguments.write_model),
    )
    return shared.DONE


def _choose_output(arguments: argparse.Namespace) -> str:
    """Return the file for the plan: the one that was asked for, or one beside the graph.

    Raises:
        OutputError, UsageError: it cannot be written, or what is there already is no plan.
    """
    from planner.graphs.errors import FormatError
    from planner.graphs.io.files import check_writable
    from planner.plans.plan import read_plan

    graph = Path(arguments.graph)
    if arguments.output is None and not graph.is_file():
        raise UsageError(f"{graph} is no regular file that a plan could be kept beside: name the plan's file with -o")
    output = str(graph.with_name(f"{graph.stem}.plan.json") if arguments.output is None else arguments.output)
    check_writable(output, graph, suffix=".json")
    if arguments.output is None and Path(output).exists():
        try:
            read_plan(output)
        except FormatError as error:
            raise UsageError(f"the plan would be kept in {output}, which holds something else: name a file with -o") from error
    return output


def _build_params(arguments: argparse.Namespace) -> "WindowsParams | None":
    if arguments.params is None:
        return None
    if arguments.solver != "windows":
        raise UsageError("--params holds parameters of the solver windows: leave it out, or use --solver windows")
    from planner.solvers.windows.params import WindowsParams

    return WindowsParams.from_toml(arguments.params)


def _write_model(graph: "Graph", arguments: argparse.Namespace) -> None:
    if arguments.solver != "checkmate":
        raise UsageError("--write-model writes the program of the solver checkmate: add --solver checkmate")
    if arguments.budget is None:
        raise UsageError("--write-model writes the program of one budget: give --budget in place of --max-overhead")
    from planner.capture.options import apply_options
    from planner.plans.solve import order_for
    from planner.plans.summary import summarize
    from planner.settings.budget import read_budget
    from planner.solvers.baselines.checkmate import write_model

    graph = apply_options(graph, ())
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    ordered = order_for(graph, arguments.solver, reorder=arguments.reorder).graph
    write_model(ordered, read_budget(arguments.budget).resolve(peak_bytes), arguments.write_model)

"""``planner compare``: compare all methods on a model or a graph.

The table of all columns is in a file: 23 columns and 300 characters broke on every terminal. The screen has the eight best
methods, sorted. Figures are drawn where matplotlib is installed; before, the command refused to run without it.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import argument_types, arguments as shared
from planner.graphs.errors import UsageError
from planner.settings.counted_memory import CountedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from planner.graphs.ir import Graph
    from planner.progress import LineView
    from planner.settings.option_settings import OptionSettings
    from planner.studies.comparison_rows import ComparisonRow
    from planner.studies.settings import StudySettings

_ROW_S, _TOTAL_S, _REPEATS = 60.0, 40.0, 5


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "compare",
        "compare the optimal schedule with other methods at several budgets",
        "Prints the eight best methods, and writes rows.csv, table.md and, if matplotlib is installed, overhead.png and\n"
        "memory.png of all. Rows that are already in rows.csv are kept.\n"
        "With --measure also measured.png, and graph.json with the times that a continued comparison uses.\n"
        "Ctrl-C ends it with the rows that are done; the same command continues with the others. A second one quits at once.\n"
        "exit codes: 0 a schedule in some row, 2 usage, 4 none in any, 130 interrupted, 1 anything else\n\n"
        "examples:\n"
        "  planner compare model.json --budgets 90%,70%,50%,30% -o results/mine\n"
        "  planner compare zoo:resnet50,batch=64 --roofline h200 --methods windows,dtr,chen-sqrt -o results/resnet50\n"
        "  planner compare model.json --options offload --link 50GB/s --host-budget 64GB -o results/offload\n"
        "  planner compare zoo:resnet18,batch=8,size=64 --measure --methods windows,dtr -o results/resnet18",
    )
    parser.add_argument("model", metavar="MODEL|GRAPH", help=f"a graph that planner trace wrote (.json), or {shared.MODEL_HELP}")
    budgets = ("90%", "70%", "50%", "30%")
    parser.add_argument(
        "--budgets",
        type=argument_types.parse_budget_list,
        default=budgets,
        metavar="LIST",
        help="amounts, or shares of what plain eager PyTorch takes (default: 90%%,70%%,50%%,30%%)",
    )
    parser.add_argument(
        "--methods",
        default="all",
        metavar="all|LIST",
        help="names as for planner solve --solver; with --measure PyTorch's own methods of these names too (default: all)",
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="where rows, table and figures are written")
    parser.add_argument(
        "--measure", action="store_true", help="run the schedules of MODEL, and PyTorch's own methods, and measure all of them"
    )
    parser.add_argument(
        "--repeats", type=argument_types.count, metavar="N", help=f"steps timed with --measure (default: {_REPEATS})"
    )
    shared.add_study(
        parser,
        jobs="rows computed",
        each=f"for each row: 90, 90s, 10m (default: {_ROW_S:.0f}s)",
        total="for solving all rows, without --measure: methods that solve large programs come last and share what is left",
        total_time_limit_s=_TOTAL_S,
    )
    shared.add_how_to_trace(parser)
    shared.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compute the missing rows, then write table and figures; return the exit code."""
    from planner.cli.interrupt import StopOnInterrupt
    from planner.graphs.io.files import check_folder
    from planner.progress import LineView
    from planner.show.views.figures import can_plot
    from planner.studies.compare import parse_methods
    from planner.studies.comparison_rows import ComparisonRow
    from planner.studies.comparison_screen import format_screen
    from planner.studies.comparisons import write_report
    from planner.studies.rows import read_rows

    if arguments.model.endswith(".json"):
        shared.refuse_how_to_trace(arguments, arguments.model)
        if arguments.measure:
            raise UsageError(f"--measure runs the model, and {arguments.model} is a graph: name zoo:NAME or file.py:function")
    if arguments.repeats is not None and not arguments.measure:
        raise UsageError("--repeats is for steps that are run: add --measure")
    if arguments.measure and arguments.roofline is not None:
        raise UsageError("--measure runs the model, and with --roofline nothing is run: leave one of them out")
    if arguments.measure and arguments.total_time_limit is not None:
        raise UsageError(
            "--total-time-limit is for rows that are solved and not run, and --measure runs them: give --time-limit, for each row"
        )
    if arguments.measure and arguments.memory not in (None, CountedMemory.ALLOCATED):
        raise UsageError(
            "--measure compares steps by their peaks in allocated bytes, and --memory is "
            f"{arguments.memory}: leave one of them out"
        )
    if arguments.measure and arguments.cluster is not None:
        raise UsageError("--measure measures on this machine, and --cluster would use others: leave one of them out")
    settings = shared.build_study_settings(arguments, time_limit_s=_ROW_S, total_time_limit_s=_TOTAL_S)
    methods = parse_methods(arguments.methods, offload=settings.options.offloads)
    folder = Path(arguments.output)
    check_folder(folder)
    with (
        LineView(quiet=arguments.quiet) as progress,
        StopOnInterrupt(progress, ending="with the rows that are done, to go on with the others next time") as interrupt,
    ):
        rows = (_measure if arguments.measure else _simulate)(arguments, methods, settings, progress, interrupt)
    known = read_rows(folder / "rows.csv", ComparisonRow)
    figures = can_plot()
    written = ", ".join(path.name for path in (write_report(known, folder, figures=figures) if known else ()))
    missing = "" if figures else " (figures need matplotlib: pip install 'remat-planner[plots]')"
    more = _describe_time_limits(rows, measured=arguments.measure)
    if arguments.methods != "all":
        more = f"{_explain_inapplicable(rows)}{more}"
    if arguments.json or known:
        data = {"holds": "comparison", "rows": [asdict(row) for row in rows]}
        said = f"\nwritten to {folder}: rows.csv, {written}{missing}"
        shared.print_result(arguments, lambda: data, lambda: f"{format_screen(known)}{_name_least(known)}{more}{said}")
    if interrupt():
        return shared.INTERRUPTED
    return shared.DONE if any(row.time_s is not None for row in rows) else shared.LIMIT


def _name_least(rows: "Sequence[ComparisonRow]") -> str:
    """Return a line with the least feasible budget where some budgets are below it; "" if none is."""
    from planner.solvers.result import Status
    from planner.studies.comparison_rows import OPTIMUM

    refused = [row for row in rows if row.method == OPTIMUM and row.status == Status.INFEASIBLE]
    return f"\n{OPTIMUM}: {max(refused, key=lambda row: row.budget_bytes or 0).message}" if refused else ""


def _explain_inapplicable(rows: "Sequence[ComparisonRow]") -> str:
    """Return a line for each method that does not apply to the graph; "" if all do."""
    from planner.solvers.result import Reason

    why = {row.method: row.message for row in rows if row.reason == Reason.INAPPLICABLE}
    return "".join(f"\n{method}: {message}" for method, message in why.items())


def _describe_time_limits(rows: "Sequence[ComparisonRow]", *, measured: bool) -> str:
    """Return lines about the rows whose time limits were too short; "" if there are none."""
    from planner.studies.compare import cut_short, is_not_begun
    from planner.studies.tables import group_by

    short = group_by((row for row in rows if cut_short(row)), "method")
    budgets = {method: f"{method} ({', '.join(row.budget for row in own)})" for method, own in short.items()}
    refused = [method for method, own in short.items() if is_not_begun(own[0])]
    lines = [f"not begun: {budgets[method]}: {short[method][0].message}" for method in refused]
    if ended := ", ".join(said for method, said in budgets.items() if method not in refused):
        lines.append(f"ended by their time limit: {ended}")
    if lines:
        limits = "--time-limit" if measured else "--total-time-limit, or --time-limit for each row,"
        lines.append(f"for more, raise {limits} and name a new folder")
    return "".join(f"\n{line}" for line in lines)


def _simulate(
    arguments: argparse.Namespace,
    methods: "Sequence[str]",
    settings: "StudySettings",
    progress: "LineView",
    should_stop: "Callable[[], bool]",
) -> "list[ComparisonRow]":
    from planner.studies.compare import compare

    graph, name = _get_graph(arguments, settings.options, progress)
    progress.show_activity(f"comparing {len(methods)} methods")
    return compare(
        graph,
        arguments.budgets,
        methods,
        Path(arguments.output),
        replace(settings, model=name),
        on_row=lambda row, done, count: progress.show_activity(f"{done} of {count} rows, last {row.method} at {row.budget}"),
        should_stop=should_stop,
    )


def _measure(
    arguments: argparse.Namespace,
    methods: "Sequence[str]",
    settings: "StudySettings",
    progress: "LineView",
    should_stop: "Callable[[], bool]",
) -> "list[ComparisonRow]":
    from planner.capture.workload.workload import parse_spec

    spec = parse_spec(arguments.model)
    progress.show_activity(f"building {spec}")
    from planner.capture.options import list_step_option_names
    from planner.runtime.transfers.channels import HostChannels
    from planner.settings.option_settings import OptionSettings
    from planner.studies.baselines import list_baseline_methods, select_policies
    from planner.studies.compare_measured import compare_measured, load_or_profile
    from planner.studies.offloading import list_offloading_methods

    folder = Path(arguments.output)
    traced = list_step_option_names(settings.options.names)
    how = shared.build_tracing(
        arguments, options=OptionSettings(traced), measure_link=settings.options.measures_link, name=str(spec)
    )
    built = how.load(spec)
    progress.show_activity(f"tracing {spec}")
    captured = load_or_profile(built, folder, how.settings)
    stock = list_baseline_methods(built.model, targets=[op.target for op in captured.graph.ops if op.phase == "forward"])
    channels = None
    if settings.options.host_bytes is not None:
        channels = HostChannels(next(built.model.parameters()).device, settings.options.host_bytes)
        stock += list_offloading_methods(channels)
    return compare_measured(
        built,
        captured,
        arguments.budgets,
        methods,
        stock if arguments.methods == "all" else select_policies(stock, methods),
        folder,
        replace(settings, model=str(spec), repeats=arguments.repeats or _REPEATS, seed=arguments.seed),
        channels=channels,
        on_activity=progress.show_activity,
        should_stop=should_stop,
    )


def _get_graph(arguments: argparse.Namespace, options: "OptionSettings", progress: "LineView") -> "tuple[Graph, str]":
    from planner.graphs.io.formats import read_graph

    if arguments.model.endswith(".json"):
        graph = read_graph(arguments.model)
        return graph, graph.provenance.model or Path(arguments.model).stem
    from planner.capture.workload.workload import parse_spec

    spec = parse_spec(arguments.model)
    shared.build_counted_memory(arguments)  # which raises before anything is traced
    measure_link = options.measures_link and arguments.roofline is None
    return shared.trace_model(spec, arguments, progress, measure_link=measure_link), str(spec)

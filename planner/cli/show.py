"""``planner show``: write the report page of a plan."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import argument_types
from planner.cli.arguments import DONE, Commands, add_command, print_result
from planner.graphs.errors import UsageError

if TYPE_CHECKING:
    from planner.plans.plan import Plan


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "show",
        "write a page that shows what a plan does: memory over the step by module and tensor, recomputation, transfers, and the "
        "tensors at the peak",
        "The page is one file that loads nothing from elsewhere. The trace opens in ui.perfetto.dev or chrome://tracing.\n\n"
        "examples:\n"
        "  planner show plan.json -o report.html\n"
        "  planner curve model.json -o curve.csv && planner show plan.json --curve curve.csv -o report.html\n"
        "  planner show plan.json --graph elsewhere/model.json --trace trace.json",
    )
    parser.add_argument("plan", metavar="PLAN", help="what planner solve wrote")
    parser.add_argument("--graph", metavar="GRAPH", help="what it was solved for (default: the file that the plan names)")
    parser.add_argument("-o", "--output", type=argument_types.parse_output, metavar="FILE", help="the page to write (.html)")
    parser.add_argument("--curve", metavar="FILE", help="what planner curve -o wrote: the page shows it with the plan's budget")
    parser.add_argument("--trace", type=argument_types.parse_output, metavar="FILE", help="the Chrome trace to write (.json)")


def run(arguments: argparse.Namespace) -> int:
    """Write the requested files; return the exit code."""
    from planner.graphs.io.files import check_writable
    from planner.graphs.io.formats import read_graph
    from planner.plans.plan import read_plan
    from planner.plans.plan_check import apply_plan_options
    from planner.show.facts.timeline import Timeline
    from planner.show.report.page import write_pages
    from planner.studies.curve import read_curve

    curve = () if arguments.curve is None else read_curve(Path(arguments.curve))
    wanted = [path for path in (arguments.output, arguments.trace) if path is not None]
    if not wanted:
        raise UsageError("nothing to write: name a page (-o report.html), a trace (--trace trace.json), or both")
    plan = read_plan(arguments.plan)
    if others := {row.memory for row in curve} - {str(plan.memory)}:
        raise UsageError(
            f"budgets in {arguments.curve} count {' and '.join(sorted(others))} memory, and that of the plan {plan.memory}: make "
            f"the curve with planner curve --memory {plan.memory}"
        )
    graph_path = _find_graph(plan, arguments.plan) if arguments.graph is None else Path(arguments.graph)
    read = [source for source in (arguments.plan, graph_path, arguments.curve) if source is not None]
    for path, suffix in ((arguments.output, ".html"), (arguments.trace, ".json")):
        if path is not None:
            check_writable(path, *read, suffix=suffix)
    graph = read_graph(graph_path)
    timeline = Timeline(apply_plan_options(graph, plan), plan)
    write_pages(timeline, arguments.output, arguments.trace, curve)
    print_result(
        arguments,
        lambda: {"output": arguments.output, "trace": arguments.trace},
        lambda: "\n".join((str(plan), *(f"written to {path}" for path in wanted))),
        written=(arguments.output, arguments.trace),
    )
    return DONE


def _find_graph(plan: "Plan", plan_path: str) -> Path:
    """Return the file of the graph that `plan` was solved for."""
    from planner.plans.plan_check import find_graph_path

    path = find_graph_path(plan, plan_path)
    if path is None:
        raise UsageError(f"{plan_path} does not say where its graph is: name what it was solved for (--graph model.json)")
    if not path.is_file():
        raise UsageError(
            f"the graph of {plan_path} was in {path}, where there is no file now: say where it is (--graph model.json), "
            "or trace and solve again"
        )
    return path

"""``planner info``: describe a graph or a plan."""

import argparse

from planner.cli import argument_types
from planner.cli.arguments import DONE, Commands, add_command, add_time_limit, print_result
from planner.graphs.errors import UsageError


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "info",
        "show what a graph or a plan holds",
        "Of a graph: memory by kind, the peak, the least budget and the op that sets it, the largest ops and tensors.\n\n"
        "examples:\n  planner info model.json\n  planner info plan.json --json",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="count only optional ops, and ops on other devices, whose results are bit-identical",
    )
    add_time_limit(parser, said="for all searches for least budgets: 90, 90s, 10m (default: 60s)", default=60.0)
    parser.add_argument("file", metavar="FILE", type=argument_types.parse_graph, help="what planner trace or planner solve wrote")


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of the file; return the exit code."""
    from planner.plans.plan import Plan, read_graph_or_plan
    from planner.show.facts.graph import collect_graph_facts
    from planner.show.report.describe import plan_data, plan_info_text
    from planner.show.report.graph_text import build_graph_data, describe_graph

    content = read_graph_or_plan(arguments.file)
    if isinstance(content, Plan):
        if arguments.exact:
            raise UsageError("--exact selects optional ops of a graph, and this file is a plan: leave it out")
        from planner.plans.plan_check import check_with_its_graph

        check_with_its_graph(content, arguments.file)
        print_result(arguments, plan_data, plan_info_text, content)
    else:
        facts = collect_graph_facts(content, exact=arguments.exact, time_limit_s=arguments.time_limit_s)
        print_result(arguments, build_graph_data, describe_graph, facts)
    return DONE

"""``planner import``: convert another planner's graph."""

import argparse

from planner.cli import argument_types
from planner.cli.arguments import DONE, Commands, add_command, add_quiet, print_written


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "import",
        "turn a training graph of another planner into one of this",
        "formats, recognised by content (docs/formats.md says how each is read):\n"
        "  operator logs of DTR's simulator, plain or gzipped\n"
        "  node-link graphs of networkx as published with Moccasin\n"
        "  profiled Checkmate instances with reference results\n\n"
        "example:\n  planner import resnet32.log.gz -o model.json",
    )
    parser.add_argument("file", metavar="FILE", help="the graph to read")
    parser.add_argument(
        "-o", "--output", type=argument_types.parse_output, metavar="FILE", required=True, help="the graph to write"
    )
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the file, and write it as a graph; return the exit code."""
    from planner.graphs.importers import import_graph
    from planner.graphs.io.files import check_writable
    from planner.graphs.io.formats import write_graph
    from planner.progress import LineView

    check_writable(arguments.output, arguments.file, suffix=".json")
    with LineView(quiet=arguments.quiet) as progress:
        progress.show_activity(f"reading {arguments.file}")
        graph = import_graph(arguments.file)
        write_graph(graph, arguments.output)
    print_written(graph, arguments)
    return DONE

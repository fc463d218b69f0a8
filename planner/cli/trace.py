"""``planner trace``: trace a model on a batch to a graph."""

import argparse

from planner.capture.workload.models import ZOO
from planner.cli import argument_types, arguments as shared
from planner.plans.select_attributes import select_attributes


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    models = "\n".join(f"  zoo:{name:<13} {entry.description}" for name, entry in ZOO.items())
    parser = shared.add_command(
        commands,
        "trace",
        "turn a model and a batch into a training graph with the time and memory of every op",
        f"models:\n{models}\n\nexamples:\n"
        "  planner trace zoo:gpt2,layers=4,batch=8,seq=128 --optimizer adamw -o model.json\n"
        "  planner trace examples/own_model.py:build,batch=64 -o model.json\n"
        "  planner trace examples/own_model.py:build --device cuda --measure-link -o model.json\n"
        "  planner trace zoo:llama --roofline h200 -o model.json\n"
        "  planner trace zoo:mlp --other-devices cpu:1 -o model.json\n"
        "  planner trace zoo:gpt2 --options chunks -o model.json",
    )
    parser.add_argument("model", metavar="MODEL", type=argument_types.model, help=shared.MODEL_HELP)
    parser.add_argument(
        "-o", "--output", type=argument_types.parse_output, metavar="FILE", required=True, help="the graph to write"
    )
    shared.add_how_to_trace(parser)
    parser.add_argument(
        "--measure-link",
        action="store_true",
        help="also measure transfers to host memory and back, for planner solve --options offload",
    )
    parser.add_argument(
        "--other-devices",
        type=argument_types.parse_names,
        default=(),
        metavar="NAMES",
        help="also measure the ops on cpu:2 (two threads of the CPU), cuda, cuda:1, for planner solve --options placement",
    )
    shared.add_traced_options(parser)
    shared.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trace, and write the graph; return the exit code."""
    from planner.capture.options import check_traced
    from planner.graphs.io.files import check_writable
    from planner.graphs.io.formats import write_graph
    from planner.progress import LineView

    check_traced(arguments.options)
    check_writable(arguments.output, arguments.model.source, suffix=".json")
    with LineView(quiet=arguments.quiet) as progress:
        graph = shared.trace_model(
            arguments.model, arguments, progress, **select_attributes(arguments, "measure_link", "other_devices")
        )
        write_graph(graph, arguments.output)
    shared.print_written(graph, arguments)
    return shared.DONE

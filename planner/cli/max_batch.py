"""``planner max-batch``: a model and a budget in, the largest batches out."""

import argparse

from planner import options
from planner.cli.arguments import (
    DONE,
    MODEL_HELP,
    Commands,
    add_command,
    add_how_to_trace,
    add_quiet,
    add_reorder,
    print_json,
    print_text,
    tracing,
)


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "max-batch",
        "find the largest batch whose step fits a memory budget",
        "The optimal schedule beside keeping everything and checkpointing every block.\n"
        "Ctrl-C ends the search with what has been found so far; a second one quits at once.\n"
        "exit codes: 0 a batch, 2 usage, 3 not even a batch of 1 fits, 4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner max-batch zoo:gpt2,layers=24 --budget 80GB --max-overhead 20% --roofline h200 --optimizer adamw\n"
        "  planner max-batch examples/own_model.py:build --budget 100MB",
    )
    parser.add_argument("model", metavar="MODEL", type=options.model, help=MODEL_HELP)
    parser.add_argument(
        "--budget",
        type=options.size,
        required=True,
        help="memory of the whole step, parameters and optimizer state included: 80GB (10^9) or 79GiB (2^30)",
    )
    parser.add_argument("--max-overhead", type=options.fraction, metavar="PART", help="20%% or 0.2 (default: any)")
    parser.add_argument(
        "--batch-option", default="batch", metavar="NAME", help="the option of MODEL that is the batch size (default: batch)"
    )
    parser.add_argument("--limit", type=options.count, default=4096, metavar="N", help="largest batch to try (default: 4096)")
    add_how_to_trace(parser)
    parser.add_argument(
        "--time-limit", type=options.duration, default=60.0, metavar="TIME", help="for each solve: 90, 90s, 10m (default: 1m)"
    )
    parser.add_argument("--tolerance", type=options.fraction, default=1e-3, metavar="GAP", help="0.1%% or 0.001 (default: 0.1%%)")
    add_reorder(parser, default=True, said="yes")
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search, and print an answer for each method. Returns the exit code."""
    from planner.cli.interrupt import StopOnInterrupt
    from planner.cli.progress import ProgressLine
    from planner.report.curves import max_batch_data, max_batch_text
    from planner.studies.max_batch import Wanted, max_batch

    with ProgressLine(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        progress.say(f"building {arguments.model}")
        from planner.models.batches import Batches

        batches = Batches(arguments.model, arguments.batch_option, tracing(arguments))
        wanted = Wanted(
            budget_bytes=arguments.budget,
            max_overhead=arguments.max_overhead,
            limit=arguments.limit,
            first=batches.first,
            tolerance=arguments.tolerance,
            time_limit_s=arguments.time_limit,
            reorder=arguments.reorder,
        )
        answers = max_batch(batches.graph, wanted, on_activity=progress.say, should_stop=interrupt)
    if arguments.json:
        print_json(max_batch_data(answers, wanted))
    else:
        print_text(max_batch_text(answers, wanted))
    return DONE

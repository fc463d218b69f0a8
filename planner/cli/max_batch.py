"""``planner max-batch``: find the largest batch, or another size, that fits a budget."""

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.cli import argument_types, arguments as shared
from planner.graphs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from planner.progress import LineView
    from planner.studies.sizes import LargestSize, Wanted
    from planner.studies.workload_tracing import Tracing

_LIMIT = 4096  # in multiples of --multiple-of


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "max-batch",
        "find the largest batch whose step fits a memory budget",
        "Compares the optimal schedule with keeping everything and checkpointing blocks; with --options one more row has the\n"
        "optimal schedule with these. --vary seq finds the largest sequence instead, or any other option of MODEL.\n"
        "On the CPU the sizes are found with modelled times first, within seconds, and then measured, which may take minutes.\n"
        "Ctrl-C ends the search with what has been found so far; a second one quits at once.\n"
        "exit codes: 0 a batch, 2 usage, 3 not even the least fits, 4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner max-batch zoo:gpt2,layers=24 --budget 80GB --max-overhead 20% --roofline h200 --optimizer adamw\n"
        "  planner max-batch zoo:llama,seq=16384 --vary seq --multiple-of 1024 --budget 80GB --max-overhead 10% \\\n"
        "      --roofline h200 --options offload --link 50GB/s --host-budget 256GB\n"
        "  planner max-batch examples/own_model.py:build --budget 100MB",
    )
    parser.add_argument("model", metavar="MODEL", type=argument_types.model, help=shared.MODEL_HELP)
    parser.add_argument(
        "--budget",
        type=argument_types.parse_size,
        required=True,
        help="memory of the whole step, parameters and optimizer state included: 80GB (10^9) or 79GiB (2^30)",
    )
    parser.add_argument(
        "--max-overhead", type=argument_types.parse_fraction_argument, metavar="PART", help="20%% or 0.2 (default: any)"
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--batch-option", default="batch", metavar="NAME", help="the option of MODEL that is the batch size (default: batch)"
    )
    sizes.add_argument(
        "--vary",
        metavar="NAME",
        help="another option of MODEL to find the largest value of, such as a sequence length; the search begins at its value "
        "in MODEL",
    )
    parser.add_argument(
        "--multiple-of", type=argument_types.count, default=1, metavar="N", help="try multiples of N only (default: 1)"
    )
    parser.add_argument(
        "--limit", type=argument_types.count, metavar="N", help="largest to try (default: 4096 times --multiple-of)"
    )
    shared.add_memory(parser)
    shared.add_how_to_trace(parser)
    shared.add_time_limit(parser, said="for each solve: 90, 90s, 10m (default: 15s)", default=15.0)
    shared.add_tolerance(parser)
    shared.add_graph_options(parser)
    shared.add_reorder(parser, default=True, said="if one lowers the peak")
    shared.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search, and print an answer for each method; return the exit code."""
    from planner.cli.interrupt import StopOnInterrupt
    from planner.progress import LineView
    from planner.studies.curve_table import build_max_batch_data, describe_max_batch
    from planner.studies.sizes import BATCH, Wanted

    unit = arguments.multiple_of
    if arguments.limit is not None and arguments.limit < unit:
        raise UsageError(f"--limit {arguments.limit} is below --multiple-of {unit}, the least that is tried: raise it")
    wanted = Wanted(
        budget_bytes=arguments.budget,
        max_overhead=arguments.max_overhead,
        limit=_LIMIT if arguments.limit is None else arguments.limit // unit,
        tolerance=arguments.tolerance,
        time_limit_s=arguments.time_limit_s,
        reorder=arguments.reorder,
        varies=arguments.vary or BATCH,
        unit=unit,
        options=shared.parse_option_settings(arguments),
        memory=shared.build_counted_memory(arguments),
    )
    how = shared.build_tracing(arguments)
    with LineView(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        if arguments.roofline is None and arguments.device == "cpu":
            answers = _search_modelled_then_measured(arguments, wanted, how, progress, interrupt)
        else:
            answers = _search(arguments, wanted, how, progress, interrupt)
    shared.print_result(arguments, build_max_batch_data, describe_max_batch, answers, wanted)
    return shared.DONE


def _search(
    arguments: argparse.Namespace,
    wanted: "Wanted",
    how: "Tracing",
    progress: "LineView",
    should_stop: "Callable[[], bool]",
) -> "tuple[LargestSize, ...]":
    """Search among graphs that are traced with the settings `how`."""
    from planner.studies.max_batch import find_max_batch
    from planner.studies.sizes import BATCH, list_samples

    progress.show_activity(f"building {arguments.model}")
    from planner.studies.workload_sizes import SizedModel

    sizes = SizedModel(
        arguments.model,
        arguments.vary or arguments.batch_option,
        how,
        unit=wanted.unit,
        way_out="name another with --vary" if arguments.vary else "name the one that is the batch size with --batch-option",
    )
    wanted = replace(wanted, first=sizes.first, samples=list_samples(arguments.vary or BATCH, sizes.first))
    return find_max_batch(sizes.trace_graph, wanted, on_activity=progress.show_activity, should_stop=should_stop)


def _search_modelled_then_measured(
    arguments: argparse.Namespace,
    wanted: "Wanted",
    how: "Tracing",
    progress: "LineView",
    should_stop: "Callable[[], bool]",
) -> "tuple[LargestSize, ...]":
    """Search with modelled times first, which takes seconds; then measure at the sizes that were found, and near them.

    Measuring a step that fills the memory of a CPU takes minutes. After an interrupt the modelled result is returned.
    """
    from planner.graphs.errors import InfeasibleError, LimitError

    modelled: tuple[LargestSize, ...] = ()
    with suppress(InfeasibleError, LimitError):
        modelled = _search(arguments, wanted, replace(how, settings=replace(how.settings, roofline="cpu")), progress, should_stop)
    if should_stop() and modelled:
        return modelled
    if modelled:
        found = ", ".join(f"{answer.method} {answer.size or 'none'}" for answer in modelled)
        progress.note(f"with modelled times, the largest {wanted.varies} is: {found}; measuring at these now")
    units = {answer.method: (answer.size or wanted.unit) // wanted.unit for answer in modelled}
    guesses = {method.name: units.get(method.name, 1) for method in wanted.methods}
    try:
        measured = _search(arguments, replace(wanted, guesses=guesses), how, progress, should_stop)
    except LimitError:
        if not (should_stop() and modelled):
            raise
        measured = ()
    if should_stop() and modelled:
        progress.note("interrupted while measuring: the times below are modelled")
        return modelled
    return measured

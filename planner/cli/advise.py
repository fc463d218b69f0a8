"""``planner advise``: advise which budget to choose for a model."""

import argparse

from planner.cli import argument_types, arguments as shared
from planner.settings.option_settings import RECOMPUTATION
from planner.settings.plan import select_settings


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "advise",
        "say what a model's step needs, what less memory costs, and which budget to take",
        "Traces the step and solves it for a short while at several budgets, and once with each option: a minute in all.\n"
        "Nothing is trained. Ctrl-C ends it with what is known so far; a second one quits at once.\n\n"
        "examples:\n"
        "  planner advise zoo:gpt2,batch=8 --roofline h100 --optimizer adamw\n"
        "  planner advise examples/own_model.py:build,batch=64 --device cuda --optimizer adamw\n"
        "  planner advise zoo:gpt2,batch=8 --roofline h100 --options offload,chunks --link 50GB/s --host-budget 64GB",
    )
    parser.add_argument("model", metavar="MODEL", type=argument_types.model, help=shared.MODEL_HELP)
    shared.add_how_to_trace(parser)
    parser.add_argument(
        "--options",
        type=argument_types.parse_names,
        metavar="NAMES",
        help="options to try, each alone (default: offload and all that are found in the step; compress with --roofline only)",
    )
    shared.add_memory(parser)
    shared.add_copying(parser)
    shared.add_time_limit(parser, said="for all of it: 90, 90s, 10m (default: 55s)", default=55.0)
    shared.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trace, solve, and print the advice; return the exit code."""
    from dataclasses import asdict

    from planner.cli.interrupt import StopOnInterrupt
    from planner.progress import LineView

    with LineView(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        progress.show_activity(f"building {arguments.model}")
        from planner.studies.advise import advise

        model, loss_fn, batch = shared.build_tracing(arguments, options=RECOMPUTATION).load(arguments.model)
        advice = advise(
            model,
            loss_fn,
            batch,
            **select_settings(vars(arguments)),
            name=str(arguments.model),
            on_progress=progress,
            should_stop=interrupt,
        )
    shared.print_result(
        arguments,
        lambda: {"holds": "advice", "eager_peak_bytes": advice.eager_peak_bytes, **asdict(advice)},
        lambda: str(advice),
    )
    return shared.DONE

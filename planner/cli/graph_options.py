"""``planner options``: list the options that a schedule may use in addition to recomputation."""

import argparse

from planner.capture.options import OPTIONS, list_step_option_names
from planner.cli.arguments import DONE, Commands, add_command, format_table, print_result
from planner.settings.compatibility import build_table


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    add_command(
        commands,
        "options",
        "list what --options may name: what a schedule may do besides recomputing",
        f"Graphs must be traced with {', '.join(list_step_option_names(tuple(OPTIONS)))} to be solved with them.\n\n"
        "examples:\n"
        "  planner trace zoo:gpt2 --options chunks,pack -o model.json\n"
        "  planner solve model.json --budget 40% --options chunks,pack,offload",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list of options, and which of them exclude each other; return the exit code."""
    described = {name: option.description for name, option in OPTIONS.items()}
    refused = "\n".join(f"  {things} with {other}: {reason}" for things, other, reason in build_table())
    print_result(arguments, lambda: described, lambda: f"{format_table(described)}\n\ncombinations that are refused:\n{refused}")
    return DONE

"""``planner solvers``: list all solvers and baselines by name."""

import argparse

from planner.cli.arguments import DONE, Commands, add_command, print_json, print_text, table_of
from solvers.registry import SOLVERS, Entry


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    add_command(
        commands,
        "solvers",
        "list the methods for --solver and --methods",
        "All but windows are baselines: what other tools do, or reference programs for small graphs.\n\n"
        "example:\n  planner solve model.json --budget 60% --solver dtr",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list; return the exit code."""
    if arguments.json:
        print_json({name: {"description": entry.description, "kind": _kind(entry)} for name, entry in SOLVERS.items()})
        return DONE
    kinds = dict.fromkeys(map(_kind, SOLVERS.values()))
    for kind in kinds:
        listed = {name: entry.description for name, entry in SOLVERS.items() if _kind(entry) == kind}
        print_text(f"{kind}:\n{table_of(listed)}\n")
    return DONE


def _kind(entry: Entry) -> str:
    """Return what the method plans: recomputation, transfers or placement."""
    if entry.only_places:
        return "devices"
    if entry.offloads:
        return "offload"
    return "all of it, with a proof" if entry.choices and entry.copies else "recomputation"

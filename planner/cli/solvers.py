"""``planner solvers``: list all solvers and baselines by name."""

import argparse

from planner.cli.arguments import DONE, Commands, add_command, format_table, print_result
from planner.solvers.registry import SOLVERS, Entry


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
    print_result(arguments, _build_data, _describe_solvers)
    return DONE


def _build_data() -> dict[str, object]:
    return {name: {"description": entry.description, "kind": _get_kind(entry)} for name, entry in SOLVERS.items()}


def _describe_solvers() -> str:
    kinds: dict[str, dict[str, str]] = {}
    for name, entry in SOLVERS.items():
        kinds.setdefault(_get_kind(entry), {})[name] = entry.description
    return "\n".join(f"{kind}:\n{format_table(listed)}\n" for kind, listed in kinds.items())


def _get_kind(entry: Entry) -> str:
    """Return the group of a method in the list, by the decisions that it plans."""
    if entry.only_devices:
        return "devices"
    if entry.only_transfers:
        return "offload"
    return "all of it, with a proof" if entry.alternatives and entry.transfers else "recomputation"

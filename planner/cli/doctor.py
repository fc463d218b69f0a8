"""``planner doctor``: check whether planning can work on this machine, and for a model."""

import argparse
from dataclasses import asdict

from planner.cli import argument_types
from planner.cli.arguments import DONE, FAILED, MODEL_HELP, Commands, add_command, print_result


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "doctor",
        "check versions, packages, devices, memory and the link, and whether a model can be captured",
        "exit codes: 0 nothing is wrong, 1 something is\n\nexamples:\n  planner doctor\n  planner doctor my_model.py:build",
    )
    parser.add_argument("model", metavar="MODEL", type=argument_types.model, nargs="?", help=MODEL_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return the exit code."""
    from planner.cli.installation import iterate_facts
    from planner.studies.tables import group_by

    found = list(iterate_facts(arguments.model))
    problems = [fact.problem for fact in found if fact.problem]
    width = max(len(fact.name) for fact in found)
    lines = []
    for topic, facts_of_topic in group_by(found, "topic").items():
        lines += [topic, *(f"  {fact.name:<{width}}  {fact.value}" for fact in facts_of_topic)]
    lines += ["", *(f"problem: {problem}" for problem in problems)] if problems else ["", "no problem found"]
    data = {"facts": [asdict(fact) for fact in found], "problems": problems}
    print_result(arguments, lambda: data, lambda: "\n".join(lines))
    return FAILED if problems else DONE

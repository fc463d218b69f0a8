"""``planner doctor``: check whether planning can work on this machine, and for a model."""

import argparse
from dataclasses import asdict

from planner import options
from planner.cli.arguments import DONE, FAILED, MODEL_HELP, Commands, add_command, print_json, print_text


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "doctor",
        "check versions, packages, devices, memory and the link, and whether a model can be captured",
        "exit codes: 0 nothing is wrong, 1 something is\n\nexamples:\n  planner doctor\n  planner doctor my_model.py:build",
    )
    parser.add_argument("model", metavar="MODEL", type=options.model, nargs="?", help=MODEL_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return the exit code."""
    from planner.doctor import facts

    found = list(facts(arguments.model))
    problems = [fact.problem for fact in found if fact.problem]
    if arguments.json:
        print_json({"facts": [asdict(fact) for fact in found], "problems": problems})
        return FAILED if problems else DONE
    width = max(len(fact.name) for fact in found)
    for topic in dict.fromkeys(fact.topic for fact in found):
        lines = (f"  {fact.name:<{width}}  {fact.value}" for fact in found if fact.topic == topic)
        print_text("\n".join((topic, *lines)))
    print_text("\n".join(("", *(f"problem: {problem}" for problem in problems))) if problems else "\nno problem found")
    return FAILED if problems else DONE

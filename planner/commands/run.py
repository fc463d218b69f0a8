"""``planner run``: a plan and its model in, what was measured out."""

import argparse

from planner import options
from planner.commands.common import DONE, FAILED, MODEL_HELP, Commands, add_command, add_quiet, print_json


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "run",
        "run a plan with real tensors and set what is measured beside what was predicted",
        "exit code 1 if the loss or a gradient differs from that of keeping everything\n\n"
        "example:\n  planner run plan.json --model zoo:gpt2,layers=4,batch=8,seq=128",
    )
    parser.add_argument("plan", metavar="PLAN", help="what planner solve wrote")
    parser.add_argument("--model", metavar="MODEL", type=options.model, required=True, help=MODEL_HELP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--repeats", type=options.count, default=5, metavar="N", help="steps to measure (default: 5)")
    parser.add_argument("--seed", type=options.seed, default=0, metavar="N", help="for weights, batch and dropout (default: 0)")
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run and measure, and print both beside what was predicted. Returns the exit code."""
    from graphs.jsonio import read_plan
    from planner.describe import run_data, run_text
    from planner.progress import ProgressLine

    plan = read_plan(arguments.plan)
    with ProgressLine(quiet=arguments.quiet) as progress:
        progress.say(f"building {arguments.model}")
        from planner import api, workload

        built = workload.load(arguments.model, device=arguments.device, seed=arguments.seed)
        progress.say("running the plan, and keeping everything beside it")
        report = api.run(plan, *built, repeats=arguments.repeats, seed=arguments.seed)
    if arguments.json:
        print_json(run_data(report))
    else:
        print(run_text(report))
    return DONE if report.identical else FAILED

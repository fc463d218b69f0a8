"""``planner run``: a plan and its model in, what was measured out."""

import argparse
from typing import TYPE_CHECKING

from planner import options
from planner.cli.arguments import (
    DIFFERENT,
    DONE,
    MODEL_HELP,
    OVER_BUDGET,
    Commands,
    add_command,
    add_quiet,
    print_json,
    print_text,
)

if TYPE_CHECKING:
    from planner.running import RunReport


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "run",
        "run a plan with real tensors and set what is measured beside what was predicted",
        "The report is printed in any case.\n"
        "exit codes: 0 within its budget and with the results of plain PyTorch, 2 usage, 5 measured peak over its budget,\n"
        "6 loss, gradients, buffers or random state different from keeping everything or from plain PyTorch "
        "(over its budget\nor not), though the plan may not differ, 1 anything else. Where keeping everything does not fit into "
        "what is free,\nresults are not compared, and the report says so\n\n"
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
    from graphs.io.formats import read_plan
    from planner.plan_check import check_with_its_graph
    from planner.progress import LineView
    from planner.report.describe import run_data, run_text

    plan = read_plan(arguments.plan)
    check_with_its_graph(plan, arguments.plan)
    with LineView(quiet=arguments.quiet) as progress:
        progress.say(f"building {arguments.model}")
        from planner import running
        from planner.models import workload

        built = workload.load(arguments.model, device=arguments.device, seed=arguments.seed)
        report = running.run(plan, *built, repeats=arguments.repeats, seed=arguments.seed, on_progress=progress)
    if arguments.json:
        print_json(run_data(report))
    else:
        print_text(run_text(report))
    return _verdict(report)


def _verdict(report: "RunReport") -> int:
    """Wrong results weigh more than too much memory; what the plan says that differs is not wrong."""
    if not report.differs and report.is_exact is False:
        return DIFFERENT
    return OVER_BUDGET if report.measured_peak_bytes > report.budget_bytes else DONE

"""``planner run``: run a plan on its model, and measure it."""

import argparse
from typing import TYPE_CHECKING

from planner.capture.workload.workload import ModelSpec, parse_spec
from planner.cli import argument_types, arguments as shared
from planner.graphs.errors import ModelError, UsageError

if TYPE_CHECKING:
    from planner.measure.run_plan import RunReport
    from planner.plans.plan import Plan


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "run",
        "run a plan with real tensors, and compare what is measured with what was predicted",
        "The report is printed in any case.\n"
        "exit codes: 0 within its budget and with the results of plain PyTorch, 2 usage, 5 measured peak over its budget,\n"
        "6 loss, gradients, buffers or random state different from keeping everything or from plain PyTorch "
        "(over its budget\nor not), though the plan may not differ, 1 anything else. Where keeping everything does not fit into "
        "what is free,\nresults are not compared, and the report says so\n\n"
        "examples:\n  planner run plan.json\n  planner run plan.json --model my_model.py:build,batch=64 --device cuda",
    )
    parser.add_argument("plan", metavar="PLAN", help="what planner solve wrote")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=argument_types.model,
        help=f"{shared.MODEL_HELP} (default: the model that the plan was traced from)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--repeats", type=argument_types.count, default=5, metavar="N", help="steps to measure (default: 5)")
    parser.add_argument(
        "--seed", type=argument_types.parse_seed, default=0, metavar="N", help="for weights, batch and dropout (default: 0)"
    )
    parser.add_argument(
        "--arena",
        action=argparse.BooleanOptionalAction,
        help="run the plan in one block of memory, at planned addresses (default: if it was made for that)",
    )
    shared.add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run and measure; print predictions and measurements; return the exit code."""
    from planner.plans.plan import read_plan
    from planner.plans.plan_check import check_with_its_graph
    from planner.progress import LineView
    from planner.show.report.describe import run_data, run_text

    plan = read_plan(arguments.plan)
    check_with_its_graph(plan, arguments.plan)
    with LineView(quiet=arguments.quiet) as progress:
        model = arguments.model or _model_of(plan)
        progress.show_activity(f"building {model}")
        from planner.capture.workload import workload
        from planner.measure import run_plan

        built = workload.load(model, device=arguments.device, seed=arguments.seed)
        report = run_plan.run(
            plan, *built, repeats=arguments.repeats, seed=arguments.seed, arena=arguments.arena, on_progress=progress
        )
    shared.print_result(arguments, run_data, run_text, report)
    return _get_exit_code(report)


def _model_of(plan: "Plan") -> ModelSpec:
    """Return the model that the graph of `plan` was traced from; raise a UsageError if the plan does not say which."""
    try:
        return parse_spec(plan.graph.provenance.model)
    except ModelError:
        raise UsageError("the plan does not name a model that can be built: add --model") from None


def _get_exit_code(report: "RunReport") -> int:
    """Return the exit code: wrong results take precedence over excess memory; differences stated in the plan are not wrong."""
    if not report.differs and report.is_exact is False:
        return shared.DIFFERENT
    return shared.OVER_BUDGET if report.needed_bytes > report.budget_bytes else shared.DONE

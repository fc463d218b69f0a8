"""The command: arguments in, results on stdout, progress and errors on stderr.

What a command needs is imported when it runs: ``--help`` answers at once, and only ``trace`` and
``run`` load torch.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from graphs.devices import DEVICES
from graphs.errors import InfeasibleError, LimitError, PlannerError
from graphs.zoo import ZOO
from planner import options
from solvers.registry import SOLVERS

if TYPE_CHECKING:
    from graphs.ir import Graph

DONE, FAILED, USAGE, INFEASIBLE, LIMIT, INTERRUPTED = 0, 1, 2, 3, 4, 130  # exit codes

_MODEL_HELP = (
    "zoo:NAME or path/to/file.py:function, options after commas; the function returns (model, loss_fn, batch), "
    "trained on loss_fn(model(*inputs), target) with the last of the batch as target"
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all errors of the command."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is, and exit."""
        _complain(f"{message} (see {self.prog} --help)")
        raise SystemExit(USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; `argv` without the program's name. Returns the exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has read enough.
        code = FAILED
        _close_stdout()
    except InfeasibleError as error:
        code = INFEASIBLE
        _complain(error)
    except LimitError as error:
        code = LIMIT
        _complain(error)
    except PlannerError as error:
        code = FAILED
        _complain(error)
    except OSError as error:
        code = FAILED
        _complain(f"{error.filename or 'the output'}: {error.strerror or error}")
        _close_stdout()
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
        if arguments.version:
            _show_version()
            return DONE
        if arguments.command is None:
            parser.error(f"name a command: {', '.join(_COMMANDS)}")
    except SystemExit as end:
        # Where argparse has answered already: --help, a usage error.
        return end.code if isinstance(end.code, int) else DONE
    return _COMMANDS[arguments.command](arguments)


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="planner",
        description="Find the fastest training step that fits a memory budget, with a proof of how far from optimal it can be.",
        epilog="example:\n"
        "  planner trace zoo:gpt2,layers=4,batch=8,seq=128 -o model.json\n"
        "  planner solve model.json --budget 60% -o plan.json\n"
        "  planner run plan.json --model zoo:gpt2,layers=4,batch=8,seq=128",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_trace(commands)
    _add_solve(commands)
    _add_curve(commands)
    _add_max_batch(commands)
    _add_run(commands)
    _add_info(commands)
    _add_import(commands)
    return parser


def _add_command(commands: "argparse._SubParsersAction[Parser]", name: str, summary: str, epilog: str) -> Parser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_quiet(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_how_to_trace(parser: Parser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run and measure the ops (default: cpu)")
    where.add_argument("--roofline", choices=tuple(DEVICES), help="model this device instead: nothing is run, nothing allocated")
    parser.add_argument(
        "--optimizer",
        choices=("none", "sgd", "momentum", "adamw"),
        default="none",
        help="count its state as memory (default: none)",
    )
    parser.add_argument("--accumulate", action="store_true", help="gradients of earlier batches are in memory too")
    parser.add_argument("--passes", type=options.count, default=5, metavar="N", help="times each op is measured (default: 5)")
    parser.add_argument("--seed", type=options.seed, default=0, metavar="N", help="for weights and batch (default: 0)")


def _add_trace(commands: "argparse._SubParsersAction[Parser]") -> None:
    models = "\n".join(f"  zoo:{name:<13} {entry.description}" for name, entry in ZOO.items())
    parser = _add_command(
        commands,
        "trace",
        "turn a model and a batch into a training graph with the time and memory of every op",
        f"models:\n{models}\n\nexamples:\n"
        "  planner trace zoo:gpt2,layers=4,batch=8,seq=128 --optimizer adamw -o model.json\n"
        "  planner trace examples/own_model.py:build,batch=64 -o model.json\n"
        "  planner trace zoo:llama --roofline h200 -o model.json",
    )
    parser.add_argument("model", metavar="MODEL", type=options.model, help=_MODEL_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the graph to write")
    _add_how_to_trace(parser)
    _add_quiet(parser)


def _add_solve(commands: "argparse._SubParsersAction[Parser]") -> None:
    solvers = "\n".join(f"  {name:<13} {entry.description}" for name, entry in SOLVERS.items())
    parser = _add_command(
        commands,
        "solve",
        "find the fastest schedule of a graph that fits a memory budget",
        f"solvers:\n{solvers}\n\n"
        "Ctrl-C ends the solve with the best schedule found so far; a second one quits at once.\n"
        "exit codes: 0 a schedule, 2 usage, 3 no schedule fits, 4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner solve model.json --budget 8GB -o plan.json\n"
        "  planner solve model.json --budget 60% --time-limit 10m --tolerance 0.5%",
    )
    parser.add_argument("graph", metavar="GRAPH", help="what planner trace wrote")
    parser.add_argument(
        "--budget",
        type=options.budget,
        required=True,
        help="memory of the whole step, parameters and optimizer state included: 8GB (10^9), 7.5GiB (2^30), "
        "or 60%% of the peak without recomputation",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the plan to write (default: only print what is found)")
    parser.add_argument("--solver", choices=tuple(SOLVERS), default="windows", help="how to solve (default: windows)")
    parser.add_argument(
        "--time-limit", type=options.duration, default=3600.0, metavar="TIME", help="90, 90s, 10m or 1.5h (default: 1h)"
    )
    parser.add_argument("--tolerance", type=options.fraction, default=1e-3, metavar="GAP", help="0.1%% or 0.001 (default: 0.1%%)")
    parser.add_argument(
        "--write-model",
        metavar="FILE",
        help="with --solver checkmate: write its program as well, for other solvers (.lp or .mps)",
    )
    _add_quiet(parser)


def _add_curve(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_command(
        commands,
        "curve",
        "solve a graph at several budgets: overhead against memory",
        "A schedule for one budget serves all larger ones, a bound at one holds at all smaller ones.\n"
        "Ctrl-C ends the solves with what has been found so far; a second one quits at once.\n"
        "exit codes: 0 a schedule for some budget, 2 usage, 3 no schedule fits any, 4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner curve model.json -o curve.csv --plot curve.png\n"
        "  planner curve model.json --budgets 90%,8GB,7.5GiB --time-limit 2m",
    )
    parser.add_argument("graph", metavar="GRAPH", help="what planner trace wrote")
    parser.add_argument(
        "--budgets",
        type=options.budgets,
        default=10,
        metavar="N|LIST",
        help="how many, from the least feasible to the peak without recomputation, or a list (default: 10)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="CSV to write")
    parser.add_argument("--plot", metavar="FILE", help="figure to write (.png, .pdf, .svg)")
    parser.add_argument("--jobs", type=options.count, default=2, metavar="N", help="budgets solved at a time (default: 2)")
    parser.add_argument("--solver", choices=tuple(SOLVERS), default="windows", help="how to solve (default: windows)")
    parser.add_argument(
        "--time-limit", type=options.duration, default=60.0, metavar="TIME", help="for each budget: 90, 90s, 10m (default: 1m)"
    )
    parser.add_argument("--tolerance", type=options.fraction, default=1e-3, metavar="GAP", help="0.1%% or 0.001 (default: 0.1%%)")
    _add_quiet(parser)


def _add_max_batch(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_command(
        commands,
        "max-batch",
        "find the largest batch whose step fits a memory budget",
        "The optimal schedule beside keeping everything and checkpointing every block.\n"
        "Ctrl-C ends the search with what has been found so far; a second one quits at once.\n"
        "exit codes: 0 a batch, 2 usage, 3 not even a batch of 1 fits, 4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner max-batch zoo:gpt2,layers=24 --budget 80GB --max-overhead 20% --roofline h200 --optimizer adamw\n"
        "  planner max-batch examples/own_model.py:build --budget 100MB",
    )
    parser.add_argument("model", metavar="MODEL", type=options.model, help=_MODEL_HELP)
    parser.add_argument(
        "--budget",
        type=options.size,
        required=True,
        help="memory of the whole step, parameters and optimizer state included: 80GB (10^9) or 79GiB (2^30)",
    )
    parser.add_argument("--max-overhead", type=options.fraction, metavar="PART", help="20%% or 0.2 (default: any)")
    parser.add_argument(
        "--batch-option", default="batch", metavar="NAME", help="the option of MODEL that is the batch size (default: batch)"
    )
    parser.add_argument("--limit", type=options.count, default=4096, metavar="N", help="largest batch to try (default: 4096)")
    _add_how_to_trace(parser)
    parser.add_argument(
        "--time-limit", type=options.duration, default=60.0, metavar="TIME", help="for each solve: 90, 90s, 10m (default: 1m)"
    )
    parser.add_argument("--tolerance", type=options.fraction, default=1e-3, metavar="GAP", help="0.1%% or 0.001 (default: 0.1%%)")
    _add_quiet(parser)


def _add_run(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_command(
        commands,
        "run",
        "run a plan with real tensors and set what is measured beside what was predicted",
        "exit code 1 if the loss or a gradient differs from that of keeping everything\n\n"
        "example:\n  planner run plan.json --model zoo:gpt2,layers=4,batch=8,seq=128",
    )
    parser.add_argument("plan", metavar="PLAN", help="what planner solve wrote")
    parser.add_argument("--model", metavar="MODEL", type=options.model, required=True, help=_MODEL_HELP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--repeats", type=options.count, default=5, metavar="N", help="steps to measure (default: 5)")
    parser.add_argument("--seed", type=options.seed, default=0, metavar="N", help="for weights, batch and dropout (default: 0)")
    _add_quiet(parser)


def _add_info(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_command(
        commands,
        "info",
        "show what a graph or a plan holds",
        "Of a graph: memory by kind, the peak, the least budget and the op that sets it, the largest ops and tensors.\n\n"
        "examples:\n  planner info model.json\n  planner info plan.json --json",
    )
    parser.add_argument("file", metavar="FILE", help="what planner trace or planner solve wrote")


def _add_import(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_command(
        commands,
        "import",
        "turn a training graph of another planner into one of this",
        "formats, recognised by content (docs/formats.md says how each is read):\n"
        "  operator logs of DTR's simulator, plain or gzipped\n"
        "  node-link graphs of networkx as published with Moccasin\n"
        "  profiled Checkmate instances with reference results\n\n"
        "example:\n  planner import resnet32.log.gz -o model.json",
    )
    parser.add_argument("file", metavar="FILE", help="the graph to read")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the graph to write")
    _add_quiet(parser)


def _trace(arguments: argparse.Namespace) -> int:
    from graphs.jsonfile import check_writable
    from graphs.jsonio import write_graph
    from planner.progress import ProgressLine

    check_writable(arguments.output)
    with ProgressLine(quiet=arguments.quiet) as progress:
        progress.say(f"building {arguments.model}")
        from planner import api, workload

        built = workload.load(arguments.model, device=arguments.device, seed=arguments.seed, fake=arguments.roofline is not None)
        progress.say(f"tracing {arguments.model}")
        graph = api.trace(
            *built,
            optimizer=arguments.optimizer,
            accumulate=arguments.accumulate,
            roofline=arguments.roofline,
            passes=arguments.passes,
            name=str(arguments.model),
        )
        write_graph(graph, arguments.output)
    _print_written(graph, arguments)
    return DONE


def _import(arguments: argparse.Namespace) -> int:
    from graphs.importers import import_graph
    from graphs.jsonfile import check_writable
    from graphs.jsonio import write_graph
    from planner.progress import ProgressLine

    check_writable(arguments.output)
    if Path(arguments.output).exists() and Path(arguments.file).exists() and Path(arguments.output).samefile(arguments.file):
        raise PlannerError(f"{arguments.output} is the file to import itself: name another for the graph")
    with ProgressLine(quiet=arguments.quiet) as progress:
        progress.say(f"reading {arguments.file}")
        graph = import_graph(arguments.file)
        write_graph(graph, arguments.output)
    _print_written(graph, arguments)
    return DONE


def _solve(arguments: argparse.Namespace) -> int:
    from graphs.jsonfile import check_writable
    from graphs.jsonio import read_graph, write_plan
    from planner.describe import plan_data, plan_text
    from planner.interrupt import StopOnInterrupt
    from planner.progress import ProgressLine
    from planner.solving import solve

    graph = read_graph(arguments.graph)
    if arguments.output is not None:
        check_writable(arguments.output)
        if Path(arguments.output).exists() and Path(arguments.output).samefile(arguments.graph):
            raise PlannerError(f"{arguments.output} is the graph itself: name another file for the plan")
    if arguments.write_model is not None:
        _write_model(graph, arguments)
    with ProgressLine(quiet=arguments.quiet, base_s=graph.time_s) as progress, StopOnInterrupt(progress) as interrupt:
        plan = solve(
            graph,
            arguments.budget,
            solver=arguments.solver,
            tolerance=arguments.tolerance,
            time_limit_s=arguments.time_limit,
            on_progress=progress,
            should_stop=interrupt,
        )
    if arguments.output is not None:
        write_plan(plan, arguments.output)
    if arguments.json:
        _print_json({"output": arguments.output, **plan_data(plan)})
    else:
        print(plan_text(plan))
        if arguments.output is not None:
            print(f"written to {arguments.output}")
    return DONE


def _curve(arguments: argparse.Namespace) -> int:
    from graphs.jsonfile import check_writable, write_text
    from graphs.jsonio import read_graph
    from planner.curve import curve
    from planner.interrupt import StopOnInterrupt
    from planner.plots import check_plot, plot_curve
    from planner.progress import ProgressLine
    from planner.reports import curve_data, curve_frame, curve_text
    from solvers.result import Status

    graph = read_graph(arguments.graph)
    if arguments.output is not None:
        check_writable(arguments.output)
    if arguments.plot is not None:
        check_plot(Path(arguments.plot))
    with ProgressLine(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        progress.say("looking for the least feasible budget")
        found = curve(
            graph,
            arguments.budgets,
            jobs=arguments.jobs,
            solver=arguments.solver,
            tolerance=arguments.tolerance,
            time_limit_s=arguments.time_limit,
            on_point=lambda done, count: progress.say(f"{done} of {count} budgets done"),
            should_stop=interrupt,
        )
    if arguments.output is not None:
        write_text(arguments.output, curve_frame(found).to_csv(index=False))
    if arguments.plot is not None:
        plot_curve(found, Path(arguments.plot), title=str(graph.provenance.get("model", "")))
    if arguments.json:
        _print_json(curve_data(found))
    else:
        print(curve_text(found))
    if any(point.schedule for point in found.points):
        return DONE
    return INFEASIBLE if all(point.status is Status.INFEASIBLE for point in found.points) else LIMIT


def _write_model(graph: "Graph", arguments: argparse.Namespace) -> None:
    if arguments.solver != "checkmate":
        raise PlannerError("--write-model writes the program of the solver checkmate: add --solver checkmate")
    from graphs.units import parse_budget
    from planner.solving import summarize
    from solvers.checkmate import write_model

    peak_bytes = summarize(graph).store_all_peak_bytes
    write_model(graph, parse_budget(arguments.budget, peak_bytes=peak_bytes), arguments.write_model)


def _max_batch(arguments: argparse.Namespace) -> int:
    from planner.interrupt import StopOnInterrupt
    from planner.max_batch import Wanted, max_batch
    from planner.progress import ProgressLine
    from planner.reports import max_batch_data, max_batch_text

    with ProgressLine(quiet=arguments.quiet) as progress, StopOnInterrupt(progress) as interrupt:
        progress.say(f"building {arguments.model}")
        from planner.batches import Batches

        batches = Batches(
            arguments.model,
            arguments.batch_option,
            device=arguments.device,
            roofline=arguments.roofline,
            optimizer=arguments.optimizer,
            accumulate=arguments.accumulate,
            passes=arguments.passes,
            seed=arguments.seed,
        )
        wanted = Wanted(
            budget_bytes=arguments.budget,
            max_overhead=arguments.max_overhead,
            limit=arguments.limit,
            first=batches.first,
            tolerance=arguments.tolerance,
            time_limit_s=arguments.time_limit,
        )
        answers = max_batch(batches.graph, wanted, on_activity=progress.say, should_stop=interrupt)
    if arguments.json:
        _print_json(max_batch_data(answers, wanted))
    else:
        print(max_batch_text(answers, wanted))
    return DONE


def _run_plan(arguments: argparse.Namespace) -> int:
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
        _print_json(run_data(report))
    else:
        print(run_text(report))
    return DONE if report.identical else FAILED


def _info(arguments: argparse.Namespace) -> int:
    from graphs.jsonio import read_graph_or_plan
    from graphs.plan import Plan
    from planner.describe import graph_data, graph_facts, graph_text, plan_data, plan_info_text

    content = read_graph_or_plan(arguments.file)
    if isinstance(content, Plan):
        if arguments.json:
            _print_json(plan_data(content))
        else:
            print(plan_info_text(content))
    else:
        facts = graph_facts(content)
        if arguments.json:
            _print_json(graph_data(facts))
        else:
            print(graph_text(facts))
    return DONE


_COMMANDS = {
    "trace": _trace,
    "solve": _solve,
    "curve": _curve,
    "max-batch": _max_batch,
    "run": _run_plan,
    "info": _info,
    "import": _import,
}


def _print_written(graph: "Graph", arguments: argparse.Namespace) -> None:
    from graphs.units import format_bytes, format_seconds
    from planner.solving import summarize

    summary = summarize(graph)
    if arguments.json:
        _print_json(
            {
                "output": arguments.output,
                "fingerprint": summary.fingerprint,
                "ops": summary.ops,
                "tensors": summary.tensors,
                "static_bytes": summary.static_bytes,
                "store_all_peak_bytes": summary.store_all_peak_bytes,
                "time_s": summary.time_s,
            }
        )
    else:
        print(
            f"{arguments.output}: {summary.ops:,} ops, {summary.tensors:,} tensors, step time {format_seconds(summary.time_s)}, "
            f"peak without recomputation {format_bytes(summary.store_all_peak_bytes)}, "
            f"of it {format_bytes(summary.static_bytes)} throughout"
        )


def _show_version() -> None:
    from importlib.metadata import version

    print(f"planner {version('remat-planner')}")


def _print_json(data: dict[str, object]) -> None:
    print(json.dumps(data, indent=2))


def _complain(error: object) -> None:
    message = " ".join(str(error).split("\n"))
    print(f"planner: error: {message}", file=sys.stderr, flush=True)


def _close_stdout() -> None:
    """Keep what is still buffered from being written, and complained about, on the way out."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)

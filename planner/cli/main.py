"""The command line: arguments in, results on stdout, progress and errors on stderr.

Commands import their needs when they run: ``--help`` answers at once, and only ``trace``, ``advise``, ``run`` and ``max-batch``
load torch.

Known weakness: what is not imported is not missed until a command runs. A class that was imported for type checkers only once
made a measured comparison fail.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import shtab

from planner.capture.workload.workload import ModelSpec, find_file
from planner.cli import (
    addresses,
    advise,
    compare,
    curve,
    doctor,
    graph_options,
    import_graph,
    info,
    max_batch,
    run,
    show,
    snapshot,
    solve,
    solvers,
    trace,
)
from planner.cli.arguments import DONE, FAILED, INFEASIBLE, INTERRUPTED, LIMIT, USAGE, Command, Parser, print_error
from planner.errors import how_to_install
from planner.graphs.errors import InfeasibleError, LimitError, PlannerError, UsageError
from planner.runtime.allocator_failure import find_allocator_failure

# In the order of the help.
_COMMANDS: dict[str, Command] = {
    "trace": trace,
    "advise": advise,
    "solve": solve,
    "curve": curve,
    "max-batch": max_batch,
    "compare": compare,
    "run": run,
    "show": show,
    "snapshot": snapshot,
    "info": info,
    "import": import_graph,
    "addresses": addresses,
    "solvers": solvers,
    "options": graph_options,
    "doctor": doctor,
}

_CODES = {InfeasibleError: INFEASIBLE, LimitError: LIMIT, UsageError: USAGE}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; `argv` excludes the program's name. Return the exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed the pipe.
        code = FAILED
        _close_stdout()
    except PlannerError as error:
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), FAILED)
        print_error(f"{error} (planner info shows the largest ops of a graph)" if code == INFEASIBLE else error)
    except OSError as error:
        code = FAILED
        print_error(f"{error.filename or 'the output'}: {error.strerror or error}")
        _close_stdout()
    except ModuleNotFoundError as error:
        if (way := how_to_install(error)) is None:
            raise
        code = FAILED
        print_error(way)
    except Exception as error:
        if (failure := find_allocator_failure(error)) is None:
            raise
        code = FAILED
        print_error(f"out of memory: the command {failure.describe()}; free memory, or lower the batch size ({failure.message})")
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
        if arguments.version:
            from planner import __version__

            print(f"planner {__version__}")
            return DONE
        if arguments.command is None:
            parser.print_help()
            return DONE
    except SystemExit as end:
        # argparse has answered already: --help, or a usage error.
        return end.code if isinstance(end.code, int) else DONE
    if isinstance(model := getattr(arguments, "model", None), ModelSpec):
        find_file(model)  # before torch is imported, which takes seconds
    return _COMMANDS[arguments.command].run(arguments)


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="planner",
        description="Find the fastest training step that fits a memory budget, with a proof of how far from optimal it can be.",
        epilog="example:\n"
        "  planner trace zoo:gpt2,layers=4,batch=8,seq=128 -o model.json\n"
        "  planner solve model.json --budget 60% -o plan.json\n"
        "  planner run plan.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    shtab.add_argument_to(parser, "--print-completion", help="print completion code for a shell and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in _COMMANDS.values():
        module.add(commands)
    return parser


def _close_stdout() -> None:
    """Redirect stdout to the null device, so that buffered output raises no error at exit."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is no file
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)

"""Arguments, output and exit codes that the commands share.

Commands import their needs when they run, so that ``--help`` answers at once.

Budgets, files and limits are read here, so that a wrong one has the same message, of one line, in every command. An unknown
option is answered by one of its command only if they are close: ``--budget`` was answered by ``--host-budget``, and is now by the
commands that take it.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from textwrap import indent
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from planner.capture.options import OPTIONS, list_step_option_names
from planner.cli import argument_types
from planner.graphs.errors import UsageError, suggest
from planner.graphs.escape import escape_lines, escape_text
from planner.graphs.optimizers import OPTIMIZERS
from planner.plans.select_attributes import select_attributes
from planner.settings.counted_memory import CountedMemory
from planner.settings.devices import DEVICES
from planner.settings.option_settings import LINK, OptionSettings, build_option_settings
from planner.settings.plan import PlanSettings
from planner.show.views.text import format_aligned
from planner.solvers.tolerance import Tolerance
from planner.studies.workload_tracing import Tracing

if TYPE_CHECKING:
    from planner.capture.workload.workload import ModelSpec
    from planner.graphs.ir import Graph
    from planner.progress import LineView
    from planner.studies.settings import StudySettings

# Exit codes.
DONE, FAILED, USAGE, INFEASIBLE, LIMIT = 0, 1, 2, 3, 4
OVER_BUDGET, DIFFERENT = 5, 6  # of a plan that was run
INTERRUPTED = 130

# How close an unknown name is to the one that was probably meant, and if it is an option of another command.
_CLOSE, _SAME = 0.7, 0.85

JOBS = 2  # default number of parallel solves

MODEL_HELP = (
    "zoo:NAME or path/to/file.py:function, arguments after commas; the function returns (model, loss_fn, batch), and the step "
    "is loss_fn(model(*inputs), target), the target being the last of the batch; a batch that is a dict is passed by name"
)


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, as all commands do, with the names that are close to an unknown one."""

    _given: Sequence[str] = ()
    _others: Mapping[str, "Parser"] = {}  # the parsers of all commands, for one of them
    _commands: "argparse._SubParsersAction[Any] | None" = None

    def add_subparsers(self, **settings: Any) -> Any:
        """Add commands as argparse does, and remember them."""
        self._commands = super().add_subparsers(**settings)
        return self._commands

    def join(self, commands: "Commands") -> None:
        """Let errors name the other `commands` that take an option."""
        self._others = commands.choices

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as argparse does; unknown options of a command are an error of that command, which knows its own."""
        self._given = sys.argv[1:] if args is None else list(args)
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        """Print the error, the names that were probably meant, and a pointer to the help, and exit."""
        meant = self._close_names()
        said = f": did you mean {' and '.join(meant)}?" if meant else ""
        elsewhere = "" if meant else "".join(map(self._name_takers, self._find_unknown()))
        if invalid := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            said = said or suggest(invalid[1], re.findall(r"[\w-]+", invalid[2]))
        if message.endswith("expected one argument") and (negative := re.search(r"(?<= )-[\d.]\S*", f" {' '.join(self._given)}")):
            said = f": {negative[0]!r} is not above 0"
        print_error(f"{message}{said} (see {self.prog} --help){elsewhere}")
        raise SystemExit(USAGE)

    def _close_names(self) -> list[str]:
        """Return names of commands and options that are close to the unknown ones among the arguments."""
        known, unknown = self._list_known(), self._find_unknown()
        cutoffs = {word: _SAME if self._name_takers(word) else _CLOSE for word in unknown}
        close = (get_close_matches(word, known, n=1, cutoff=cutoff) for word, cutoff in cutoffs.items())
        return list(dict.fromkeys(name for names in close for name in names))

    def _name_takers(self, word: str) -> str:
        """Return in words which other commands take an option `word`; "" if none does."""
        takers = [f"planner {name}" for name, parser in self._others.items() if word in parser._list_known()]
        return f"; {word} is an option of {', '.join(takers)}" if takers else ""

    def _list_known(self) -> list[str]:
        """Return the names of the options, after those of the commands."""
        commands = [] if self._commands is None else self._commands.choices
        return [*commands, "--help", *re.findall(r"--[a-z][a-z-]*", self.format_usage())]

    def _find_unknown(self) -> list[str]:
        """Return the options among the arguments that are not known, or the first argument if that is to be a command."""
        known, abbreviated = self._list_known(), self._commands is None
        words = [word.partition("=")[0] for word in self._given if word.startswith("--")] if abbreviated else self._given[:1]
        return [word for word in words if not any(name == word or (abbreviated and name.startswith(word)) for name in known)]


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Command(Protocol):
    """A module of this package that holds one command."""

    def add(self, commands: Commands) -> None:
        """Add the command to the command line."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command; return the exit code."""
        ...


def add_command(commands: Commands, name: str, summary: str, epilog: str) -> Parser:
    """Add and return the parser of a command called `name`; `epilog` has its examples."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.join(commands)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def add_quiet(parser: Parser) -> None:
    """Add the option that turns progress off."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_solver(parser: Parser) -> None:
    """Add the option for the solver."""
    parser.add_argument(
        "--solver",
        type=argument_types.parse_solver,
        default="windows",
        metavar="NAME",
        help="windows (the fastest schedule, with a proof), or a baseline: keep-everything, checkpoint-blocks, sac, "
        "memory-budget, dtr, ...; planner solvers lists all (default: windows)",
    )


def add_time_limit(parser: "argparse._ActionsContainer", *, said: str, default: float | None = None) -> None:
    """Add a time limit; `said` is the help on it."""
    parser.add_argument(
        "--time-limit", dest="time_limit_s", type=argument_types.parse_duration, default=default, metavar="TIME", help=said
    )


def add_study(parser: Parser, *, jobs: str, each: str, total: str, total_time_limit_s: float) -> None:
    """Add the options of ``build_study_settings``: `jobs` are the solves, `each` and `total` the help on their time limits."""
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument("--jobs", type=argument_types.count, metavar="N", help=f"{jobs} at a time (default: {JOBS})")
    workers.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help=f"have the workers of a Dask scheduler do it (tcp://HOST:8786): {jobs} at all of them",
    )
    add_time_limit(parser, said=each)
    parser.add_argument(
        "--total-time-limit",
        type=argument_types.parse_duration,
        metavar="TIME",
        help=f"{total} (default: {total_time_limit_s:.0f}s, and none with --time-limit)",
    )
    add_tolerance(parser)
    add_memory(parser)
    add_graph_options(parser)


def build_study_settings(arguments: argparse.Namespace, *, time_limit_s: float, total_time_limit_s: float) -> "StudySettings":
    """Return the settings of a study from the options of ``add_study``.

    Args:
        time_limit_s: limit of each solve by default.
        total_time_limit_s: limit of all of them by default, which holds if none is given for each.
    """
    from planner.studies.settings import StudySettings

    return StudySettings(
        tolerance=arguments.tolerance,
        time_limit_s=arguments.time_limit_s or time_limit_s,
        total_time_limit_s=arguments.total_time_limit or (total_time_limit_s if arguments.time_limit_s is None else math.inf),
        options=parse_option_settings(arguments),
        memory=CountedMemory.of(arguments.memory),
        jobs=arguments.jobs or JOBS,
        cluster=arguments.cluster,
    )


def add_work_limit(parser: "argparse._ActionsContainer", *, said: str) -> None:
    """Add a limit of work in place of time; `said` is the help on what it is for."""
    help_text = f"count work instead of time, about a second each: {said}"
    parser.add_argument("--work-limit", type=argument_types.parse_work, metavar="WORK", help=help_text)


def add_memory(parser: Parser) -> None:
    """Add the kind of memory that the budget counts."""
    parser.add_argument(
        "--memory",
        choices=[kind.value for kind in CountedMemory],
        metavar="KIND",
        help="what the budget counts: allocated, reserved (the default on CUDA), device (the whole card); or "
        "reserved-expandable, device-expandable",
    )


def build_counted_memory(arguments: argparse.Namespace) -> CountedMemory:
    """Return the kind of memory that a budget counts, from the options of ``add_memory`` and ``add_how_to_trace``.

    Raises:
        UsageError: reserved memory is asked for on the CPU.
    """
    from planner.memory.reserved import choose_memory_on

    device = arguments.device if arguments.roofline is None else "cpu" if arguments.roofline == "cpu" else "cuda"
    return choose_memory_on(device, CountedMemory.of(arguments.memory))


def add_tolerance(parser: Parser, *, said: str = "0.1%% or 0.001 (default: 0.1%%)", default: float | Tolerance = 1e-3) -> None:
    """Add the tolerance on the gap of a schedule; `said` is the help on it."""
    parser.add_argument("--tolerance", type=argument_types.parse_fraction_argument, default=default, metavar="GAP", help=said)


def add_reorder(parser: Parser, *, default: bool | None, said: str) -> None:
    """Add the option for reordering ops; `said` is the help on its default."""
    parser.add_argument(
        "--reorder",
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"search for an order of the ops that needs less memory (default: {said})",
    )


def add_traced_options(parser: Parser) -> None:
    """Add the choice among options that are found when a step is traced."""
    _add_options(parser, list_step_option_names(tuple(OPTIONS)), "what to look for besides recomputation, and add to the graph")


def add_graph_options(parser: Parser) -> None:
    """Add the choice of options, and the description of the machine for them."""
    _add_options(parser, tuple(OPTIONS), "what the schedule may do besides recomputing")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="of these options, use only what was verified to give the same bits",
    )
    add_copying(parser)


def parse_option_settings(arguments: argparse.Namespace) -> OptionSettings:
    """Return the settings from the options of ``add_graph_options``."""
    return build_option_settings(arguments.options, arguments.link, arguments.host_budget, exact=arguments.exact)


def _add_options(parser: Parser, offered: Sequence[str], said: str) -> None:
    parser.add_argument(
        "--options",
        type=argument_types.parse_names,
        default=(),
        metavar="NAMES",
        help=f"{said}: {', '.join(offered)}; planner options describes each",
    )


def format_table(described: Mapping[str, str]) -> str:
    """Return names and their descriptions as text in two columns."""
    return indent(format_aligned(described.items()), "  ")


def add_copying(parser: Parser) -> None:
    """Add the options that describe the machine for transfers."""
    parser.add_argument(
        "--link",
        type=argument_types.parse_rate_argument,
        metavar="RATE",
        help=f"bytes a second to host memory, and at the same time back (default: measured, or published, else {LINK})",
    )
    parser.add_argument(
        "--host-budget",
        type=argument_types.check_budget,
        metavar="SIZE",
        help="host memory for offloaded tensors: 64GB, or 50%% of what is free (default: 50%%)",
    )


_HOW_TO_TRACE: Mapping[str, object] = {
    "device": "cpu",
    "roofline": None,
    "optimizer": "none",
    "accumulate": False,
    "passes": 5,
    "seed": 0,
}


def add_how_to_trace(parser: Parser) -> None:
    """Add the options on how a step is traced: device, optimizer and so on."""
    parser.set_defaults(**_HOW_TO_TRACE)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", choices=("cpu", "cuda"), help="where to measure the ops (default: cpu)")
    where.add_argument("--roofline", choices=tuple(DEVICES), help="model this device instead: nothing is run or allocated")
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="count its state in memory (default: none)",
    )
    parser.add_argument("--accumulate", action="store_true", help="count gradients of earlier batches too")
    parser.add_argument("--passes", type=argument_types.count, metavar="N", help="times each op is measured (default: 5)")
    parser.add_argument("--seed", type=argument_types.parse_seed, metavar="N", help="for weights and batch (default: 0)")


def refuse_how_to_trace(arguments: argparse.Namespace, graph: str) -> None:
    """Raise a UsageError if an option of ``add_how_to_trace`` is given for a graph, which was traced already."""
    given = [f"--{name}" for name, default in _HOW_TO_TRACE.items() if getattr(arguments, name) != default]
    if given:
        raise UsageError(
            f"{given[0]} says how to trace a model, and {graph} is a graph: give it to planner trace, or name zoo:NAME or "
            "file.py:function"
        )


def build_tracing(arguments: argparse.Namespace, **changes: Any) -> Tracing:
    """Return the settings from the options of ``add_how_to_trace``, with `changes` to those of the trace.

    Raises:
        UsageError: ops are to be timed on a device that is modelled.
    """
    options = OptionSettings(tuple(getattr(arguments, "options", None) or ()))  # for commands that have them
    if arguments.roofline is not None and arguments.passes != _HOW_TO_TRACE["passes"]:
        raise UsageError("--passes says how often ops are timed, and with --roofline none is run: leave one of them out")
    given = select_attributes(arguments, "roofline", "optimizer", "accumulate", "passes")
    return Tracing(PlanSettings(**given | {"options": options} | changes), device=arguments.device, seed=arguments.seed)


def trace_model(model: "ModelSpec", arguments: argparse.Namespace, progress: "LineView", **changes: Any) -> "Graph":
    """Build and trace `model` with the settings of ``build_tracing``."""
    progress.show_activity(f"building {model}")
    return build_tracing(arguments, **changes).trace_graph(model, on_progress=progress)


def print_written(graph: "Graph", arguments: argparse.Namespace) -> None:
    """Print the file that `graph` was written to, and its sizes, step time and peak without recomputation."""
    from planner.graphs.units import format_bytes, format_seconds
    from planner.plans.summary import summarize

    summary = summarize(graph)
    optional = f" and {summary.optional_ops:,} optional ones" if getattr(arguments, "options", ()) else ""
    sizes = ("static_bytes", "keep_everything_peak_bytes", "time_s")
    found = select_attributes(summary, "fingerprint", "ops", "tensors", "optional_ops", *sizes)
    text = (
        f"{arguments.output}: {summary.ops:,} ops{optional}, {summary.tensors:,} tensors, "
        f"step time {format_seconds(summary.time_s)}, "
        f"peak without recomputation {format_bytes(summary.keep_everything_peak_bytes)}, "
        f"of it {format_bytes(summary.static_bytes)} static"
    )
    print_result(arguments, lambda: {"output": arguments.output, **found}, lambda: text, written=(arguments.output,))


def print_result(
    arguments: argparse.Namespace,
    data: Callable[..., Mapping[str, object]],
    text: Callable[..., str],
    *given: object,
    written: Sequence[str | None] = (),
) -> None:
    """Print ``data(*given)`` as JSON if ``--json`` asks for it, else ``text(*given)``.

    Args:
        written: the written files. If one of them is the standard output, nothing else is printed there.
    """
    from planner.graphs.io.files import is_stdout

    out = sys.stderr if any(path is not None and is_stdout(path) for path in written) else sys.stdout
    print(json.dumps(data(*given), indent=2) if arguments.json else escape_lines(text(*given)), file=out)


def print_error(error: object) -> None:
    """Print an error to stderr in one line."""
    message = escape_text(" ".join(str(error).split("\n")))
    print(f"planner: error: {message}", file=sys.stderr, flush=True)

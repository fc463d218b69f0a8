"""``planner addresses``: buffers with lifetimes in, their addresses in one arena out."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.cli import argument_types, arguments as shared
from planner.graphs.errors import BudgetError
from planner.graphs.units import format_bytes, format_ratio, format_seconds, parse_budget
from planner.plans.select_attributes import select_attributes

if TYPE_CHECKING:
    from planner.graphs.addresses import Buffer
    from planner.solvers.addresses.solve import AddressResult

_COLUMNS = ("status", "capacity_bytes", "height_bytes", "bound_bytes", "gap", "seconds")


def add(commands: shared.Commands) -> None:
    """Add the command to the command line."""
    parser = shared.add_command(
        commands,
        "addresses",
        "find addresses for buffers of known lifetimes in one arena, the smallest or one of a given capacity, with a proof",
        "The file is CSV with the columns id, lower, upper and size, in any order: a buffer of size bytes is in use from lower\n"
        "until before upper. It may have the columns alignment and pool. What is written has a column offset.\n"
        "exit codes: 0 addresses, 2 usage, 3 proved: they do not fit, 4 none found in time, 1 anything else\n\n"
        "examples:\n"
        "  planner addresses buffers.csv -o offsets.csv\n"
        "  planner addresses buffers.csv --capacity 1048576 -o offsets.csv\n"
        "  planner addresses buffers.csv --capacity 8GB --time-limit 5m --json",
    )
    parser.add_argument("buffers", metavar="BUFFERS", help="the buffers (.csv)")
    parser.add_argument(
        "--capacity",
        type=_parse_capacity,
        metavar="SIZE",
        help="bytes of the arena: 1048576, 8GB (10^9) or 7.5GiB (2^30) (default: find the smallest)",
    )
    parser.add_argument("-o", "--output", type=argument_types.parse_output, metavar="FILE", help="the addresses to write (.csv)")
    limits = parser.add_mutually_exclusive_group()
    shared.add_time_limit(
        limits, said="stop after this time with the best found so far: 90, 90s, 10m or 1.5h (default: 1m)", default=60.0
    )
    shared.add_work_limit(limits, said="the same addresses on every run and machine")
    parser.add_argument(
        "--seed", type=argument_types.parse_seed, default=0, metavar="N", help="seed of random choices (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Find addresses, and write them if asked to. Returns the exit code."""
    from planner.graphs.io.buffers import read_buffers, write_offsets
    from planner.graphs.io.files import check_writable
    from planner.solvers.addresses.solve import solve

    table = read_buffers(arguments.buffers)
    if arguments.output is not None:
        check_writable(arguments.output, arguments.buffers, suffix=".csv")
    result = solve(
        table.buffers,
        arguments.capacity,
        time_limit_s=arguments.time_limit_s,
        work_limit=arguments.work_limit,
        seed=arguments.seed,
    )
    written = arguments.output if result.offsets is not None else None
    if written is not None and result.offsets is not None:
        write_offsets(written, table, result.offsets)
    said = _describe_result(result, table.buffers)
    if result.offsets is None and not arguments.json:
        shared.print_error(said)
    else:
        data = {"output": written, "buffers": len(table.buffers), **select_attributes(result, *_COLUMNS)}
        shared.print_result(
            arguments, lambda: data, lambda: said + (f"\nwritten to {written}" if written else ""), written=(written,)
        )
    if result.offsets is not None:
        return shared.DONE
    return shared.INFEASIBLE if result.status == "infeasible" else shared.LIMIT


def _parse_capacity(text: str) -> int:
    """Bytes above 0, from ``1048576`` or ``8GB``."""
    if text.strip().isdecimal():
        text = f"{text.strip()}B"
    try:
        if text.rstrip().endswith("%"):
            raise BudgetError(f"capacity {text!r} is a share: write bytes, 8GB or 7.5GiB")
        return parse_budget(text, peak_bytes=0)
    except BudgetError as error:
        raise argparse.ArgumentTypeError(str(error).replace("budget", "capacity")) from None


def _describe_result(result: "AddressResult", buffers: Sequence["Buffer"]) -> str:
    count = len(buffers)
    best = f"the smallest arena found has {result.height_bytes:,} bytes ({format_bytes(result.height_bytes)})"
    bound = f"no arena has fewer than {result.bound_bytes:,}"
    if result.status == "infeasible":
        largest = max(buffers, key=lambda buffer: buffer.size)
        if result.capacity_bytes is not None and largest.size > result.capacity_bytes:
            bound = f"buffer {largest.id!r} alone takes {largest.size:,}"
        return f"proved: {count:,} buffers do not fit {result.capacity_bytes:,} bytes, {bound}; {best}"
    if result.status == "limit":
        return (
            f"no addresses within {result.capacity_bytes:,} bytes were found in {format_seconds(result.seconds)}, and it is not "
            f"proved that there are none: {best}, {bound}; give more time (--time-limit) or a larger --capacity"
        )
    proof = "the smallest" if result.status == "optimal" else f"{bound}, a gap of {format_ratio(result.gap)}"
    fits = "" if result.capacity_bytes is None else f" of {result.capacity_bytes:,}"
    return (
        f"{count:,} buffers in an arena of {result.height_bytes:,}{fits} bytes ({format_bytes(result.height_bytes)}): {proof}; "
        f"{format_seconds(result.seconds)}"
    )

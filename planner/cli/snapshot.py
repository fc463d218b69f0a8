"""``planner snapshot``: show what held memory at the peak of a PyTorch memory snapshot."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from planner.cli import argument_types
from planner.cli.arguments import DONE, Commands, add_command, print_result

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from planner.show.report.snapshot import DevicePeak

_LISTED = 15


def add(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = add_command(
        commands,
        "snapshot",
        "read a memory snapshot of PyTorch: who held what at the peak, and what a plan would save",
        "FILE is what torch.cuda.memory._dump_snapshot wrote after torch.cuda.memory._record_memory_history(). It is read\n"
        "without running anything in it: plain lists, dicts, numbers and text alone.\n\n"
        "examples:\n"
        "  planner snapshot snapshot.pickle\n"
        "  planner snapshot snapshot.pickle --plan plan.json",
    )
    parser.add_argument("file", metavar="FILE", help="the snapshot")
    parser.add_argument("--plan", metavar="PLAN", help="what planner solve wrote, to compare the peak with")
    parser.add_argument(
        "--top", type=argument_types.count, default=_LISTED, metavar="N", help=f"lines listed (default: {_LISTED})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of the snapshot; return the exit code."""
    from planner.plans.plan import read_plan
    from planner.show.report.snapshot import read_snapshot

    peaks = read_snapshot(arguments.file)
    plan = None if arguments.plan is None else read_plan(arguments.plan)
    data: dict[str, object] = {"holds": "snapshot", "devices": [asdict(peak) for peak in peaks]}
    if plan is not None:
        data["plan"] = {
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_reserved_bytes": plan.reserved_bytes,
            "keep_everything_peak_bytes": plan.graph.keep_everything_peak_bytes,
            "saved_bytes": [peak.peak_bytes - plan.peak_bytes for peak in peaks],
        }
    text = "\n\n".join(_describe_device(peak, plan, arguments.top) for peak in peaks)
    print_result(arguments, lambda: data, lambda: text or "nothing is in the snapshot")
    return DONE


def _describe_device(peak: "DevicePeak", plan: "Plan | None", listed: int) -> str:
    from planner.graphs.units import format_bytes, format_ratio
    from planner.show.views.text import format_aligned, format_table

    where = "before the first" if peak.at_action is None else f"at action {peak.at_action + 1:,}"
    lines = [
        ("device", str(peak.device)),
        ("peak", f"{format_bytes(peak.peak_bytes)}, {where} of {peak.actions:,} recorded actions"),
        ("when taken", f"{format_bytes(peak.end_bytes)} allocated, {format_bytes(peak.reserved_bytes)} reserved"),
        *(() if (asked := peak.out_of_memory_bytes) is None else [("out of memory", f"asked for {format_bytes(asked)}")]),
    ]
    if plan is not None:
        saved, whole = peak.peak_bytes - plan.peak_bytes, plan.graph.keep_everything_peak_bytes
        share = format_ratio(saved / peak.peak_bytes) if peak.peak_bytes else "0%"
        change = f"saves {format_bytes(saved)} ({share})" if saved > 0 else "saves nothing"
        reserves = "" if plan.reserved_bytes is None else f", {format_bytes(plan.reserved_bytes)} reserved"
        predicted = f"peak {format_bytes(plan.peak_bytes)} predicted{reserves}"
        lines += [
            ("plan", f"{predicted}, {format_ratio(plan.overhead)} more time: {change}"),
            ("keep everything", f"{format_bytes(whole)} predicted; the snapshot has {format_bytes(peak.peak_bytes)}"),
        ]
    rows = [(format_bytes(one.size_bytes), f"{one.blocks:,}", one.name) for one in peak.holders[:listed]]
    more = len(peak.holders) - len(rows)
    return "\n".join(
        (
            format_aligned(lines),
            "",
            format_table(("at the peak", "blocks", "allocated in"), rows, numbers=2),
            *([f"{more:,} more lines of code (--top {len(peak.holders)} lists all)"] if more > 0 else ()),
        )
    )

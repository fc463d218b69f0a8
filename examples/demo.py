"""Plan and run a small GPT with dropout at several memory budgets: predicted beside measured.

Prints a table and writes results/demo/memory.png. Takes about two minutes on two CPU cores.
"""

import sys
import time
from pathlib import Path

import torch

import planner
from planner.capture.workload.models import build
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.plans.summary import summarize
from planner.show.views.figures import choose_size_unit, draw_figure, pick_shades
from planner.show.views.text import format_table
from planner.solvers.clock import WallClock
from planner.solvers.least import bracket_least_budget

OPTIONS = {"layers": 4, "width": 192, "heads": 6, "vocab": 2000, "seq": 192, "batch": 4}
COLUMNS = (
    *("budget", "of peak", "predicted peak", "measured peak", "predicted time", "measured time"),
    *("predicted", "measured", "bound", "gap", "identical"),
)


def row(plan: planner.Plan, report: planner.RunReport) -> tuple[str, ...]:
    """Return the cells of COLUMNS for one run: times in seconds, then as multiples of keeping everything."""
    same = "yes" if not report.eager_differences else "to keeping all" if report.identical else "NO"
    return (
        format_bytes(report.budget_bytes),
        f"{report.budget_bytes / plan.eager_bytes:.0%}",
        format_bytes(report.predicted_peak_bytes),
        format_bytes(report.measured_peak_bytes),
        format_seconds(report.predicted_time_s),
        format_seconds(report.measured_time_s),
        f"{report.predicted_ratio:.3f}x",
        "not run" if report.measured_ratio is None else f"{report.measured_ratio:.3f}x",
        "none" if plan.bound_s is None else f"{plan.bound_s / plan.graph.time_s:.3f}x",
        "none" if plan.gap is None else format_ratio(plan.gap),
        "not compared" if report.identical is None else same,
    )


def plot_memory(reports: list[planner.RunReport], path: Path) -> None:
    """Plot measured memory over the step as a part of its time, with the budgets as dashed lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draw_figure(path, "Memory over one training step, measured") as axes:
        scale, unit = choose_size_unit(max(report.budget_bytes for report in reports))
        for report, color in zip(reports, pick_shades(len(reports)), strict=True):
            end = report.timeline[-1][0]
            ratio = report.measured_ratio
            took = format_seconds(report.measured_time_s) if ratio is None else f"{ratio:.2f}x"
            label = f"budget {format_bytes(report.budget_bytes)}, step time {took}"
            xs, ys = [t / end for t, _ in report.timeline], [size / scale for _, size in report.timeline]
            axes.step(xs, ys, where="post", color=color, linewidth=0.8, label=label)
            axes.axhline(report.budget_bytes / scale, color=color, linestyle="--", linewidth=1)
        axes.set(xlabel="part of the step", ylabel=f"memory in {unit}", xlim=(0, 1))
        axes.set_ylim(bottom=0)


def is_kept(report: planner.RunReport) -> bool:
    """Return True if the run stayed within its budget and, if results were compared, matched them bit by bit."""
    return report.needed_bytes <= report.budget_bytes and report.is_exact is not False


def main() -> int:
    """Run the demonstration; 1 if a budget was broken or a result differed."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # two threads that wait for each other double what other processes disturb
    torch.manual_seed(0)
    workload = build("gpt2", **OPTIONS)
    graph = planner.trace(*workload, name="gpt2", passes=5)
    summary = summarize(graph)
    peak = summary.keep_everything_peak_bytes
    print(f"GPT-2 with dropout, {', '.join(f'{k} {v}' for k, v in OPTIONS.items())}: {summary.ops} ops, ", end="")
    print(f"{format_bytes(peak)} without recomputation, of it {format_bytes(summary.static_bytes)} throughout")
    least = bracket_least_budget(graph, clock=WallClock(15.0))
    print(f"least budget: a schedule meets {format_bytes(least.found_bytes)}, none less than {format_bytes(least.proved_bytes)}")

    rows, reports = [], []
    tight = least.found_bytes + (peak - least.found_bytes) // 10
    for budget in (int(0.9 * peak), int(0.7 * peak), int(0.5 * peak), tight, int(1.02 * least.found_bytes)):
        plan = planner.solve(graph, budget, time_limit_s=15.0)
        report = planner.run(plan, *workload, repeats=5)
        reports.append(report)
        rows.append(row(plan, report))
    print("\n" + format_table(COLUMNS, rows, numbers=len(COLUMNS)))
    print("\nMultiples are of keeping everything. Identical: to eager PyTorch, in loss, gradients and random state.")
    path = Path("results/demo/memory.png")
    plot_memory(reports, path)
    print(f"{path} shows memory over the step; {time.perf_counter() - began:.0f} s in all, one thread")
    return 0 if all(map(is_kept, reports)) else 1


if __name__ == "__main__":
    sys.exit(main())

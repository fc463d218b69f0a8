"""Plan and run a small GPT with dropout at several memory budgets: predicted beside measured.

Prints a table and writes results/demo/memory.png. Takes about two minutes on two CPU cores.
"""

import sys
import time
from pathlib import Path

import torch

import planner
from graphs.units import format_bytes
from planner.models import build
from planner.plans.summary import summarize
from planner.report.plots import plot_memory
from planner.report.tables import COLUMNS, kept, run_row
from planner.views.text import table
from solvers.clock import WallClock
from solvers.least import least_budget

OPTIONS = {"layers": 4, "width": 192, "heads": 6, "vocab": 2000, "seq": 192, "batch": 4}


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
    least = least_budget(graph, clock=WallClock(15.0))
    print(f"least budget: a schedule meets {format_bytes(least.found_bytes)}, none less than {format_bytes(least.proved_bytes)}")

    rows, reports = [], []
    tight = least.found_bytes + (peak - least.found_bytes) // 10
    for budget in (int(0.9 * peak), int(0.7 * peak), int(0.5 * peak), tight, int(1.02 * least.found_bytes)):
        plan = planner.solve(graph, budget, time_limit_s=15.0)
        report = planner.run(plan, *workload, repeats=5)
        reports.append(report)
        rows.append(run_row(plan, report))
    print("\n" + table(COLUMNS, rows, numbers=len(COLUMNS)))
    print("\nMultiples are of keeping everything. Identical: to eager PyTorch, in loss, gradients and random state.")
    path = Path("results/demo/memory.png")
    plot_memory(reports, path, title="Memory over one training step, measured")
    print(f"{path} shows memory over the step; {time.perf_counter() - began:.0f} s in all, one thread")
    return 0 if all(map(kept, reports)) else 1


if __name__ == "__main__":
    sys.exit(main())

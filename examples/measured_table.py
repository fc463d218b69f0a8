"""GPT-2 medium and ResNet-50 at four budgets on one device: what was predicted beside what was measured.

On a GPU, `make results-gpu` writes results/gpu/. With `--device cpu --small` the same code runs small models anywhere.
"""

import argparse
import platform
import sys
from pathlib import Path

import torch

import planner
from graphs.units import format_bytes
from graphs.zoo import build
from planner.describe import table
from planner.solving import summarize
from planner.tables import COLUMNS, kept, run_row, write_report
from solvers.least import least_budget

MODELS = {
    "gpt2": {"layers": 24, "width": 1024, "heads": 16, "seq": 1024, "batch": 8, "dtype": "bfloat16"},
    "resnet50": {"batch": 128},
}
SMALL = {
    "gpt2": {"layers": 4, "width": 128, "heads": 4, "vocab": 1000, "seq": 128, "batch": 4},
    "resnet50": {"batch": 4, "size": 64, "width": 16, "classes": 10},
}


def main() -> int:
    """Measure and write the table; 1 if a budget was broken or a result differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="models that run on a laptop")
    parser.add_argument("--out", type=Path, default=Path("results/gpu/table.md"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: try --device cpu --small")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU"
    rows, whole = [("model", *COLUMNS, "reserved")], True
    for model, options in (SMALL if arguments.small else MODELS).items():
        torch.manual_seed(0)
        workload = build(model, **options, device=arguments.device)
        graph = planner.trace(*workload, name=model)
        peak = summarize(graph).store_all_peak_bytes
        least = least_budget(graph, time_limit_s=15.0).found_bytes
        for budget in (int(0.9 * peak), int(0.7 * peak), int(0.5 * peak), int(1.02 * least)):
            plan = planner.solve(graph, max(budget, least), time_limit_s=30.0)
            report = planner.run(plan, *workload, repeats=10)
            reserved = "" if report.reserved_bytes is None else format_bytes(report.reserved_bytes)
            rows.append((model, *run_row(plan, report), reserved))
            whole = whole and kept(report)
            print(table(rows[0], rows[-1:], numbers=len(rows[0])), flush=True)
    notes = [
        f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads. Made by examples/measured_table.py.",
        "predicted and measured (x): step time as a multiple of keeping everything. identical: yes, to eager PyTorch.",
    ]
    write_report(arguments.out, f"Predicted and measured on {name}", notes, rows)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())

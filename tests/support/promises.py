"""What rows of benchmarks promise: those that are committed, and those of a run on a tiny case."""

import re
from typing import Any

import pandas as pd

WITHIN, NO_BETTER = "peak_bytes <= budget_bytes", "bound_s <= time_s * (1 + 1e-9)"
OURS, EXACT = "not method.str.startswith('planner inductor')", "bits.str.startswith('exact')"
UNLIMITED = "share.str.startswith('nothing')"
# What holds for every row in which the columns are known, as expressions of pandas.
PROMISES: dict[str, tuple[str, ...]] = {
    "addresses": ("bound_bytes <= arena_bytes <= best_fit_bytes", "(status == 'optimal') == (bound_bytes == arena_bytes)"),
    "arena_training": (
        "identical",
        "0 <= slab_bytes + given_bytes - predicted_bytes <= 16",
        "slab_bytes + given_bytes < beside_bytes",
        "evaluation_bytes > 0 and resident_bytes + evaluation_bytes <= slab_bytes",
    ),
    "compiled": (
        f"{OURS} or measured_peak_bytes <= budget_bytes",
        f"{OURS} or abs(predicted_peak_bytes / measured_peak_bytes - 1) <= 0.01",
        f"{OURS} or bits == 'identical'",
        "least_bytes > budget_bytes and time_s != time_s",
        "0 < compile_s < plan_s",
    ),
    "compression": (
        f"{EXACT} or (step == 0) == (loss == exact_loss)",
        f"{EXACT} or predicted_error / 2 < error < 2 * predicted_error and peak_bytes < exact_peak_bytes",
        f"not {EXACT} or loss != exact_loss and error == 0",
        "0 <= predicted_peak_bytes - peak_bytes <= 4",  # autograd lets the gradient of the loss go
    ),
    "eager": (
        *(WITHIN, "exact == True", "plan_ratio >= bound_ratio * (1 - 1e-9) and bound_ratio >= 1"),
        f"{UNLIMITED} or peak_bytes < eager_peak_bytes and (heuristic == 'planned' or evictions > 0 and recomputed_ops > 0)",
        f"not {UNLIMITED} or evictions == 0",
    ),
    "first_step": (
        *("way != 'eager' or status == 'out of memory'", "way != 'planned' or status == 'ran'"),
        "static_bytes < measured_peak_bytes <= budget_bytes",
        "budget_bytes - static_bytes < room_bytes < eager_growth_bytes",
        "static_bytes < interpreter_bytes and interpreter_bytes < training_rss_bytes < ready_rss_bytes + room_bytes",
        *("0 < capture_s < compile_s < first_step_s", "0 < passes_s < step_s", "predicted_s > 0 and first_overhead > 0"),
    ),
    "gpu/plans": ("requested_bytes <= allocated_bytes <= reserved_bytes", "requested_bytes <= budget_bytes"),
    "offload": (
        *(WITHIN, NO_BETTER, "method != 'offload only' or recomputed == 0"),
        "method != 'recompute only' or copied == 0 and host_bytes == 0",
    ),
    "options": (WITHIN, NO_BETTER, "proved_bytes <= budget_bytes"),
    "placement": (
        *(WITHIN, NO_BETTER, "executed_peak_bytes <= budget_bytes", "executed_other_bytes == predicted_other_bytes"),
        "method in ('overlapped', 'windows') or time_s <= serial_s * (1 + 1e-9)",
    ),
    "reserved": (
        # Blocks in use are those of the default settings, which split less than expandable segments.
        "peak_bytes <= in_use_bytes <= least_device_bytes and peak_bytes <= bound_bytes <= arena_bytes",
        "peak_bytes <= reserved_bytes and peak_bytes <= expandable_bytes and in_use_bytes <= pool_bytes",
        "counts == 'reserved, in an arena' or least_device_bytes <= reserved_bytes",
        "counts != 'allocated' or peak_bytes <= budget_bytes",
        "counts != 'reserved-expandable' or expandable_bytes <= budget_bytes",
        "counts in ('allocated', 'reserved-expandable') or reserved_bytes <= budget_bytes",
    ),
    "resident": (WITHIN, "100e6 < interpreter_bytes < highest_bytes"),
    "sharded": ("identical", "planned_peak_bytes == measured_peak_bytes", "measured_peak_bytes <= peak_bytes"),
    "solve": (NO_BETTER, "20 < resident_mb", "solver != 'checkmate' or writing_s > 0"),
}


def find_broken(rows: pd.DataFrame, promise: str) -> tuple[int, list[dict[Any, Any]]]:
    """Return in how many rows all columns of a promise are known, and the rows that break it."""
    unknown = [name for name in rows.columns if re.search(rf"\b{name}\b", promise) and f"{name} != {name}" not in promise]
    known = rows.dropna(subset=unknown)
    return len(known), known[~known.eval(promise).astype(bool)].to_dict("records")

"""PyTorch's allocator on a CUDA device beside its model: training is recorded, action by action, and played on the model.

Each model of the zoo is trained by plans and by plain eager PyTorch with the default settings and with expandable segments. The
recorded actions are written too: as CSV, in units that ``benchmarks.gpu.recorded`` reads.
"""

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.command import add_names
from benchmarks.gpu.plans import MODELS
from benchmarks.gpu.recorded import compare_with_model, format_lines, read_actions
from planner.capture.signature import call
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.allocators.caching import DEFAULT, EXPANDABLE, Rules
from planner.graphs.errors import typed_line
from planner.measure.steps import get_loss
from planner.torch_private.core import clear_cublas_workspaces
from planner.torch_private.cuda import record_memory, set_allocator_settings

_STEPS = 3
_SETTINGS: dict[str, tuple[str, Rules]] = {
    "default": ("expandable_segments:False", DEFAULT),
    "expandable": ("expandable_segments:True", EXPANDABLE),
}
_SMALL = "gpt2-tiny"  # whose trace is small enough for a test


def build_workload(name: str) -> Workload:
    """Return a model on the device."""
    if name == _SMALL:
        return build("gpt2", device="cuda", layers=2, width=256, heads=4, vocab=2000, batch=4, seq=256)
    return MODELS[name](device="cuda")


def record(name: str, share: str) -> list[dict[str, Any]]:
    """Record the actions of the allocator in some steps of training on an empty device; `share` is "" for eager PyTorch."""
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    if left := torch.cuda.memory_allocated():
        raise RuntimeError(f"{left} B are allocated already, which are in no recording")
    with record_memory(torch.device("cuda")) as trace:
        workload = build_workload(name)
        optimizer = torch.optim.AdamW(workload.model.parameters(), fused=True)
        step: Callable[..., Any] = TrainingStep(workload.model, workload.loss_fn)
        if share:
            step = planner.compile(*workload, budget=share, memory="allocated", time_limit_s=5, wait=5, swap="never")
        for _ in range(_STEPS):
            get_loss(call(step, workload.batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    return trace


def record_all(out: Path, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Write the recordings; yield a line for each, and True if the model agrees with it."""
    for setting, (asked, rules) in _SETTINGS.items():
        set_allocator_settings(asked)
        for name in names:
            for share in ("", "70%"):
                label = f"{name} {share or 'eager'}, {setting}"
                try:
                    actions = read_actions(record(name, share))
                    found = compare_with_model(actions, rules)
                except Exception as error:  # noqa: BLE001  # the others are recorded all the same
                    yield f"{label}: FAILED, {typed_line(error)}", False
                    continue
                path = out / f"{name}-{share.rstrip('%') or 'eager'}-{setting}.csv"
                path.write_text("\n".join(format_lines(actions)) + "\n")
                placed = f"{found.requests} requests, {found.same_place} at the modelled place"
                reserved = f"reserved {found.reserved_bytes} B, {found.modelled_bytes} B by the model"
                differ = f"{len(found.differences)} differences {'; '.join(found.differences[:2])}"
                yield f"{label}: {placed}; {reserved}; {differ}", not found.differences


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each recording; return 1 if one failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu/allocator"), help="folder (default: %(default)s)")
    add_names(parser, "--models", (_SMALL, *MODELS))
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for line, is_same in record_all(options.out, options.models):
        print(line, flush=True)
        failed |= not is_same
    return int(failed)

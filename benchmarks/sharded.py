"""Plans of FSDP2's units beside FSDP2: ``make bench-sharded`` writes results/sharded/.

A model is trained on two processes with gloo by FSDP2, with and without ``checkpoint_wrapper`` around every unit, and by plans
at the measured peak of each: with collectives between the ops, and beside them. All take turns, so that noise affects all;
ratios are medians within a turn.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import planner
from benchmarks.command import Main, Setting
from planner.capture.workload.models import build
from planner.graphs.options.gather import GATHER
from planner.graphs.units import format_bytes
from planner.measure.steps import compute_ratio, measure_memory
from planner.memory.least_budget import find_least_budget
from planner.studies.experiment import Study
from planner.studies.processes import iterate_results
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, order_by
from planner.studies.tables import Column
from planner.torch_private.fsdp import checkpoint_wrapper

# Of GPT-2, without dropout, so that checkpoints draw no numbers again.
MODELS = {
    "gpt2-192": partial(build, "gpt2", layers=6, width=192, heads=4, vocab=500, batch=8, seq=64, dropout=0),
    "gpt2-256": partial(build, "gpt2", layers=8, width=256, heads=4, vocab=500, batch=8, seq=64, dropout=0),
}
METHODS = ("FSDP2", "FSDP2 with checkpoints")
OPTIONS = ("in-place", "in-place+overlap")
_PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRow(Made):
    """A plan at the measured peak of FSDP2, with or without checkpoints."""

    model: str = declare_key()
    method: str = declare_key("the reference")
    options: str = declare_key("of the plan")
    peak_bytes: int = declare_column("measured of the reference, the budget of the plan")
    planned_peak_bytes: int = declare_column("of the plan, predicted")
    measured_peak_bytes: int = declare_column("of the plan, measured: the largest of all processes")
    least_bytes: int = declare_column("the least budget that a plan is known for")
    time_s: float = declare_column("a step of the reference")
    ratio: float = declare_column("a step of the plan, as a multiple of the reference's")
    spread: float = declare_column("of the ratio: half of its interquartile range")
    gathers: int = declare_column("in a step of the plan")
    units: int = declare_column("that are gathered at least once")
    identical: bool = declare_column("True if loss and shards of gradients are bit-identical")
    repeats: int = declare_column("steps that are timed of each")


def measure(name: str, known: Sequence[ShardedRow], *, repeats: int) -> Iterator[ShardedRow]:
    """Yield the rows of a model."""
    for method in METHODS:
        for measured in iterate_results(_run_processes, name, method, repeats):
            yield ShardedRow(model=name, method=method, repeats=repeats, **measured, **collect_provenance())


def _run_processes(name: str, method: str, repeats: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        torch.multiprocessing.spawn(_train, (name, method, repeats, path), nprocs=_PROCESSES)
        yield from torch.load(path / "measured", weights_only=True)


def _train(rank: int, name: str, method: str, repeats: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=_PROCESSES)
    reference = _build(name, checkpointed=method != METHODS[0])
    _, loss_fn, batch = MODELS[name]()
    batch = tuple(part.roll(rank, 0) for part in batch)

    def run_reference(*given: Any) -> Any:
        return loss_fn(reference(*given[:-1]), given[-1])

    adamw = [3 * p.to_local().untyped_storage().nbytes() + 4 for p in reference.parameters()]  # the state, and the shard itself
    static_bytes = sum(adamw) + sum(part.nbytes for part in batch)
    peak_bytes = _share(_measure_peak(run_reference, reference, batch, static_bytes))
    models = {options: _build(name, checkpointed=False) for options in OPTIONS}
    settings = {"budget": f"{peak_bytes}B", "optimizer": "adamw", "swap": "never", "wait": "1%"}
    steps = {
        options: planner.compile(model, loss_fn, batch, options=options.split("+"), **settings)
        for options, model in models.items()
    }
    times = _time({"reference": (run_reference, reference), **{o: (steps[o], models[o]) for o in OPTIONS}}, batch, repeats)
    found = []
    for options, step in steps.items():
        ratio, spread = compute_ratio(times[options], times["reference"])
        same = _share(int(_is_identical(run_reference, step, reference, models[options], batch)), least=True)
        found.append(
            {
                "options": options,
                "peak_bytes": peak_bytes,
                "measured_peak_bytes": _share(step.plan.measured_peak_bytes or 0),
                "time_s": median(times["reference"]),
                "ratio": ratio,
                "spread": spread,
                "identical": bool(same),
                **_describe(step, least=rank == 0),
            }
        )
    if rank == 0:
        torch.save(found, folder / "measured")
    dist.barrier()
    steps.clear()
    del step
    dist.destroy_process_group()


def _describe(step: planner.PlannedStep, *, least: bool) -> dict[str, int]:
    """Return what is known of the plan of a step, and its least budget if `least`."""
    graph = step.measured
    assert graph is not None
    gathered = [op for op in step.plan.schedule.computed if graph.ops[op].target == GATHER]
    return {
        "planned_peak_bytes": step.plan.peak_bytes,
        "least_bytes": find_least_budget(graph).found_bytes if least else 0,
        "gathers": len(gathered),
        "units": len(set(gathered)),
    }


def _build(name: str, *, checkpointed: bool) -> nn.Module:
    """Return a model whose blocks are sharded, each time with the same parameters."""
    torch.manual_seed(0)
    model = MODELS[name]()[0]
    _shard(model, checkpointed=checkpointed)
    return model


def _shard(model: nn.Module, *, checkpointed: bool) -> None:
    """Shard each block of a model, and the model."""
    mesh = init_device_mesh("cpu", (_PROCESSES,))
    (blocks,) = (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 4)
    for i, block in enumerate(blocks):
        blocks[i] = fully_shard(checkpoint_wrapper(block) if checkpointed else block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _share(value: int, *, least: bool = False) -> int:
    """Return the largest of the values of all processes, or the least."""
    values: list[Any] = [None] * _PROCESSES
    dist.all_gather_object(values, value)
    return min(values) if least else max(values)


def _measure_peak(run: Callable[..., Any], model: Any, batch: Any, static_bytes: int) -> int:
    """Return the least peak of some steps: gloo's threads let go of what they have sent only a while later."""
    peaks = []
    for _ in range(4):
        model.zero_grad()
        model.reshard()
        peaks.append(measure_memory(run, batch, static_bytes=static_bytes, device=torch.device("cpu")).peak_bytes)
    model.zero_grad()
    return min(peaks)


def _time(steps: dict[str, tuple[Callable[..., Any], nn.Module]], batch: Any, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step, which trains its model; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, (step, trained) in steps.items():
            trained.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            step(*batch).backward()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return times


def _is_identical(run: Callable[..., Any], step: Callable[..., Any], reference: nn.Module, model: nn.Module, batch: Any) -> bool:
    losses = []
    for each, trained in ((run, reference), (step, model)):
        trained.zero_grad()
        losses.append(each(*batch))
        losses[-1].backward()
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    return torch.equal(*losses) and all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)  # type: ignore[union-attr]


TABLE = (
    *("model", "method", "options"),
    Column("its peak, the budget", "peak_bytes", format_bytes),
    Column("planned peak", "planned_peak_bytes", format_bytes),
    Column("measured", "measured_peak_bytes", format_bytes),
    Column("least budget", "least_bytes", format_bytes),
    Column("its step", "time_s"),
    Column("planned step", "ratio"),
    Column("±", "spread", "{:.2f}"),
    Column("gathers", lambda row: f"{row.gathers} of {row.units} units"),
    Column("bits", lambda row: "identical" if row.identical else "differ"),
)


STUDY = Study(ShardedRow, measure, order=order_by(model=MODELS, method=METHODS, options=OPTIONS), pages={"table.md": TABLE})
main = Main(STUDY, MODELS, settings={"repeats": Setting(20, "steps timed of each")})

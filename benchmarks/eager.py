"""The eager runtime (``planner.rematerialize``): ``make bench-eager`` writes results/eager/.

For each model the runtime with a budget that is never reached, far or near, and at shares of eager PyTorch's peak each heuristic
and the plan that steps turn into, with its bound. Steps of eager PyTorch and of a heuristic take turns; times are of the thread,
or on CUDA until the device is done, minima over the turns. Results are compared to the last bit; on CUDA under deterministic
algorithms.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Self

import torch
from torch import Tensor, nn

from benchmarks.command import Main, Setting, make_names_reader
from benchmarks.storages import LiveStorages
from planner.capture.workload.models import build
from planner.graphs.errors import BudgetError
from planner.graphs.units import format_seconds
from planner.native.library import wait_for_library
from planner.plans.select_attributes import select_attributes
from planner.runtime.libraries import warm_up_libraries
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_value, order_by
from planner.studies.tables import Column, share_column
from planner.train.eager.session import Rematerialization, rematerialize

Step = Callable[[], Tensor]  # runs one step, and returns its loss

PLENTY = "nothing evicted"
NEAR = "nothing evicted, near"  # steps are logged for plans then
SHARES = (0.8, 0.6, 0.4)
_SOLVE_S = 60.0
_LEAVES = 51  # of a tree
_LEARNING = 3  # steps in which sizes are learned, and ops measured
_OF_SESSION = ("ops", "evictions", "recomputed_ops", "recomputed_s")
PLANNED = "planned"  # in place of a heuristic: the plan that steps turn into
WAYS = ("dtr", "dtr-full", "dtr-local", "lru", "largest", "msps", "megengine", PLANNED)


class TreeLSTM(nn.Module):
    """A binary TreeLSTM (Tai et al., 2015): it recurses over a tree, so that no two steps need have the same ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaf = nn.Embedding(100, 2 * width)
        self.gates = nn.Linear(2 * width, 5 * width)
        self.batch = 256

    def forward(self, leaves: int, draw: random.Random) -> tuple[Tensor, Tensor]:
        """Return outputs and memory cells of random trees of `leaves` leaves."""
        if leaves == 1:
            words = torch.randint(100, (self.batch,), device=self.leaf.weight.device)
            h, c = self.leaf(words).chunk(2, 1)
            return h, c
        left = draw.randrange(1, leaves)
        (h, c), (h_right, c_right) = self(left, draw), self(leaves - left, draw)
        i, f, f_right, g, o = self.gates(torch.cat((h, h_right), 1)).chunk(5, 1)
        c = i.sigmoid() * g.tanh() + f.sigmoid() * c + f_right.sigmoid() * c_right
        return o.sigmoid() * c.tanh(), c


class ExpertLayer(nn.Module):
    """A layer that routes each token to one of its experts: the sizes of their inputs vary from step to step."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the tokens `x` (tokens, width) and the weighted outputs of their experts."""
        weights, chosen = self.router(x).softmax(1).max(1)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            x = x.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x


def build_experts(device: str) -> tuple[nn.Module, Step]:
    """Return a mixture of experts, and a step on random tokens."""
    model = nn.Sequential(*(ExpertLayer(128, 4) for _ in range(6))).to(device)
    return model, lambda: model(torch.randn(2048, 128, device=device)).square().mean()


def build_tree(device: str) -> tuple[nn.Module, Step]:
    """Return a TreeLSTM, and a step of about 2,000 ops on a random tree."""
    model, draw = TreeLSTM(128).to(device), random.Random(0)
    state = draw.getstate()

    def step() -> Tensor:
        draw.setstate(state)  # each turn has the same tree
        loss: Tensor = model(_LEAVES, draw)[0].square().mean()
        return loss

    return model, step


def build_zoo_model(name: str, device: str, **sizes: int | float) -> tuple[nn.Module, Step]:
    """Return a model of the zoo and its step."""
    model, loss_fn, batch = build(name, device=device, **sizes)
    return model, lambda: loss_fn(model(*batch[:-1]), batch[-1])


MODELS: dict[str, Callable[[str], tuple[nn.Module, Step]]] = {
    "tree": build_tree,
    "experts": build_experts,
    "gpt2": partial(build_zoo_model, "gpt2", layers=4, width=128, heads=4, vocab=500, batch=8, seq=128, dropout=0.1),
    "gpt2-wide": partial(build_zoo_model, "gpt2", layers=4, width=256, heads=4, vocab=500, batch=8, seq=128, dropout=0.1),
    "resnet50": partial(build_zoo_model, "resnet50", width=16, size=64, classes=10, batch=16),
    # For a GPU, on which the ops of the others are shorter than their launches.
    "gpt2-small": partial(build_zoo_model, "gpt2", layers=12, width=768, heads=12, batch=8, seq=512),
    "resnet50-full": partial(build_zoo_model, "resnet50", batch=48),
}
ON_CPU = ("tree", "experts", "gpt2", "gpt2-wide", "resnet50")  # by default


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerRow(Made):
    """The measurements of a model at a budget."""

    model: str = declare_key()
    share: str = declare_key()
    heuristic: str = declare_key()
    ops: int | None = declare_value("ops of a step, without views")
    eager_s: float = declare_column("a step of eager PyTorch")
    time_s: float | None = declare_value("a step within the budget; unknown if it does not fit")
    eager_peak_bytes: int = declare_column("most bytes of all tensors, eager PyTorch")
    peak_bytes: int | None = declare_value("the same within the budget")
    budget_bytes: int = declare_column("the budget")
    evictions: int | None = declare_value("in the timed step")
    recomputed_ops: int | None = declare_value("in the timed step")
    recomputed_s: float | None = declare_value("time of these ops")
    plan_ratio: float | None = declare_value("predicted step by the plan, as a multiple of the step without recomputation")
    bound_ratio: float | None = declare_value("no schedule within the budget has a smaller one, proved")
    exact: bool | None = declare_value("losses and gradients of all steps are eager PyTorch's to the last bit")
    steps: int = declare_column("steps that are timed")


def measure(name: str, known: Sequence[EagerRow], *, steps: int, device: str, ways: Sequence[str]) -> Iterator[EagerRow]:
    """Yield the rows of a model."""
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products may differ in bits
        torch.use_deterministic_algorithms(True)
    wait_for_library()
    torch.manual_seed(0)
    model, step = MODELS[name](device)
    library_bytes = warm_up_libraries(torch.device(device))
    train(model, step)  # libraries load their kernels
    with count_memory(model) as live:
        expected = train(model, step)
    # What stays: the results, to be compared, and workspaces of libraries.
    others = sum(t.untyped_storage().nbytes() for t in expected) + library_bytes
    have = {(row.share, row.heuristic) for row in known}
    cases = [(PLENTY, 2.0, "dtr"), (NEAR, 1.05, "dtr")]
    cases += [(f"{share:.0%}", share, heuristic) for share in SHARES for heuristic in ways]
    for label, share, heuristic in cases:
        if (label, heuristic) in have:
            continue
        budget = int(share * live.peak_bytes)
        if heuristic == PLANNED:
            found = measure_planned(others + budget, model, step, expected, steps=steps)
        else:
            found = measure_within(others + budget, heuristic, model, step, expected, steps=steps)
        if not found:  # no step repeats
            continue
        yield EagerRow(
            model=name,
            share=label,
            heuristic=heuristic,
            eager_peak_bytes=live.peak_bytes,
            budget_bytes=budget,
            steps=steps,
            **found,
            **collect_provenance(torch.device(device)),
        )


def measure_within(
    budget: int, heuristic: str, model: nn.Module, step: Step, expected: list[Tensor], *, steps: int
) -> dict[str, object]:
    """Return the columns of steps within a budget, by turns with plain ones; of a first one, results and peak are taken."""
    block = partial(
        rematerialize, budget, heuristic=heuristic, device=get_device(model), max_recomputation=100, memory="allocated"
    )
    eager, timed = [], []
    try:
        checked = run_compared(model, step, expected, block())
        for _ in range(steps):
            eager.append(time_step(model, step))
            with block() as session:
                for _ in range(_LEARNING):
                    train(model, step)
                timed.append(time_within(session, model, step))
    except BudgetError:
        model.zero_grad()
        return {"eager_s": time_step(model, step)}
    return {"eager_s": min(eager), **min(timed, key=itemgetter("time_s")), **checked}


def measure_planned(budget: int, model: nn.Module, step: Step, expected: list[Tensor], *, steps: int) -> dict[str, object]:
    """Return the columns of steps by the plan that they turn into, after plain ones; empty if no step repeats."""
    eager_s = min(time_step(model, step) for _ in range(steps))
    session = rematerialize(budget, device=get_device(model), max_recomputation=100, memory="allocated")
    try:
        with session:
            for _ in range(3):
                train(model, step)
                session.wait_for_plans(_SOLVE_S)
            found = session.plans.longest_plan
            if found is None:
                return {}
            checked = run_compared(model, step, expected, nullcontext())
            timed = [time_within(session, model, step) for _ in range(steps)]
    except BudgetError:
        model.zero_grad()
        return {"eager_s": eager_s}
    plan = found.plan
    ratios = {"plan_ratio": 1 + plan.overhead, "bound_ratio": plan.bound_s / plan.graph.time_s if plan.bound_s else None}
    return {"eager_s": eager_s, **min(timed, key=itemgetter("time_s")), **checked, **ratios}


def run_compared(
    model: nn.Module, step: Step, expected: list[Tensor], block: AbstractContextManager[object]
) -> dict[str, object]:
    """Run a step in `block`; return as columns if loss and gradients are bit-identical to `expected`, and the peak bytes."""
    with count_memory(model) as live, block:
        exact = all(torch.equal(a, b) for a, b in zip(train(model, step), expected, strict=True))
    return {"exact": exact, "peak_bytes": live.peak_bytes - sum(t.untyped_storage().nbytes() for t in expected)}


def time_step(model: nn.Module, step: Step) -> float:
    """Return the time of the thread in a step, with its backward pass; on CUDA until the device is done."""
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if get_device(model).type == "cuda" else (time.thread_time, None)
    start = clock()
    step().backward()
    if wait is not None:
        wait()
    took = clock() - start
    model.zero_grad()
    return took


def time_within(session: Rematerialization, model: nn.Module, step: Step) -> dict[str, float]:
    """Return the time of a step in a block, and what the block counts of it."""
    before = select_attributes(session, *_OF_SESSION)
    time_s = time_step(model, step)
    after = select_attributes(session, *_OF_SESSION)
    return {"time_s": time_s, **{name: after[name] - before[name] for name in _OF_SESSION}}


def train(model: nn.Module, step: Step) -> list[Tensor]:
    """Return the loss and the gradients of a step, on the random numbers of a seed."""
    torch.manual_seed(1)
    loss = step()
    loss.backward()
    results = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return results


def count_memory(model: nn.Module) -> "LiveStorages | DevicePeak":
    """Return a block that counts the bytes of all tensors: on CUDA the allocator's own count, without workspaces of libraries."""
    device = get_device(model)
    gc.collect()
    if device.type == "cuda":
        return DevicePeak(device)
    return LiveStorages(found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter) and found.is_cpu)


class DevicePeak:
    """The most bytes that PyTorch's allocator hands out in a block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        """Begin to count."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the peak."""
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - warm_up_libraries(self._device)


def get_device(model: nn.Module) -> torch.device:
    """Return the device of the parameters."""
    return next(model.parameters()).device


def compute_time_per_op(row: EagerRow) -> float | None:
    """Return the time that the runtime adds to each op."""
    return (row.time_s - row.eager_s) / row.ops if row.time_s is not None and row.ops else None


def compute_excess(row: EagerRow) -> float | None:
    """Return the time as a multiple of eager PyTorch's and that of what is recomputed."""
    return row.time_s / (row.eager_s + row.recomputed_s) if row.time_s is not None and row.recomputed_s is not None else None


TABLE = (
    *("model", "share", "heuristic"),
    Column("eager step", "eager_s"),
    share_column("of eager's time", "time_s", "eager_s", "{:.2f}", missing="does not fit"),
    Column("of eager's and recomputed", compute_excess, "{:.2f}"),
    Column("added per op", lambda row: compute_time_per_op(row) if row.share in (PLENTY, NEAR) else None, format_seconds),
    share_column("peak of eager's", "peak_bytes", "eager_peak_bytes", "{:.0%}"),
    share_column("recomputed ops", "recomputed_ops", "ops", "{:.0%}"),
    Column("plan predicts", "plan_ratio", "{:.2f}"),
    Column("bound", "bound_ratio", "{:.2f}"),
    Column("exact", lambda row: {True: "yes", False: "no", None: ""}[row.exact], "{}"),
)


STUDY = Study(
    EagerRow,
    measure,
    order=order_by(model=MODELS, share=(PLENTY, NEAR, *(f"{share:.0%}" for share in SHARES)), heuristic=WAYS),
    pages={"table.md": TABLE},
    whole=False,
)
SETTINGS = {
    "steps": Setting(3, "timed of each"),
    "device": Setting("cpu", "cpu or cuda", str),
    "ways": Setting(",".join(WAYS), "heuristics, with commas", make_names_reader("way", WAYS)),
}
main = Main(STUDY, MODELS, chosen=ON_CPU, settings=SETTINGS)

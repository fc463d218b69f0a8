"""Training in an arena beside training without, with several optimizers: ``make bench-arena-training``.

Both train by plans for one budget, in turns, in a process with one thread for each row. What they take is counted by PyTorch's
profiler over a whole step with its optimizer, and compared with what was planned.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import planner
from benchmarks.command import Main, Setting, limit_threads
from benchmarks.process_memory import count_resident_bytes
from benchmarks.zoo_models import CPU_MODELS
from planner.capture.workload.models import build
from planner.graphs.units import format_bytes
from planner.runtime.allocator import measure_memory_rise
from planner.runtime.arena import Arena
from planner.runtime.arena_allocator import keep_idle_pages
from planner.runtime.executor import Executor
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, iterate_results
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, order_by
from planner.studies.tables import Column
from planner.train.compile.step import PlannedStep

MODELS = {
    "gpt2": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=500, batch=8, seq=128, dropout=0),
    "unet": CPU_MODELS["unet"],
    "vit": partial(build, "vit", layers=2, width=256, heads=4, size=32, patch=8, classes=10, batch=32, dropout=0),
}
OPTIMIZERS: dict[str, tuple[str, Callable[[nn.Module], Optimizer]]] = {
    "momentum": ("momentum", lambda model: SGD(model.parameters(), lr=1e-3, momentum=0.9)),
    "adamw": ("adamw", lambda model: AdamW(model.parameters())),
    "adamw, foreach": ("adamw", lambda model: AdamW(model.parameters(), foreach=True)),
    "adamw, fused": ("adamw", lambda model: AdamW(model.parameters(), fused=True)),
}
BUDGET = "80%"
Returned = TypeVar("Returned")
_RECORDED = 3  # steps until the optimizer has its addresses
_BYTES_BEYOND = 16  # numbers that the optimizer's later steps make and its first one did not, and the gradient of the loss
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaTrainingRow(Made):
    """Memory and time of training with and without an arena, by plans for one budget; bytes are without static memory."""

    model: str = declare_key()
    optimizer: str = declare_key("and the kernels that it steps with")
    budget_bytes: int = declare_column("the budget")
    plain_bytes: int = declare_column("the most that a step and its optimizer take without an arena, by PyTorch's profiler")
    slab_bytes: int = declare_column("the slab")
    given_bytes: int = declare_column("the most that both take outside of it, by PyTorch's profiler")
    predicted_bytes: int = declare_column("slab and outside, as planned from the recorded requests")
    beside_bytes: int = declare_column("slab and outside of the step alone, and the optimizer's temporaries beside them")
    evaluation_bytes: int = declare_column("the most that eager PyTorch takes to evaluate a batch of that size between two steps")
    resident_bytes: int = declare_column("of the slab's pages, behind that evaluation")
    identical: bool = declare_column("True if losses and parameters are those of eager PyTorch's training")
    plain_s: float = declare_column("a step and its optimizer without an arena")
    arena_ratio: float = declare_column("the same in an arena, as a multiple")
    evaluated_ratio: float = declare_column("the same where a batch is evaluated before each step, which is not counted")
    plain_plan_s: float = declare_column("planning without an arena, processor time of this process")
    arena_plan_s: float = declare_column("planning for an arena, likewise")
    addresses_s: float = declare_column(
        "processor time of the second step, which plans addresses with the optimizer, beyond that of the third"
    )
    repeats: int = declare_column("steps that are timed")

    @property
    def arena_bytes(self) -> int:
        """The most that a step and its optimizer take with an arena."""
        return self.slab_bytes + self.given_bytes

    @property
    def evaluating_bytes(self) -> int:
        """The most that the slab and an evaluation between two steps take."""
        return self.resident_bytes + self.evaluation_bytes

    @property
    def is_predicted(self) -> bool:
        """True if the slab and the memory outside of it have the planned size, up to `_BYTES_BEYOND`."""
        return 0 <= self.arena_bytes - self.predicted_bytes <= _BYTES_BEYOND


class _Training:
    """A model that trains on one batch."""

    def __init__(
        self, step: Callable[..., torch.Tensor], model: nn.Module, optimizer: Optimizer, batch: tuple[torch.Tensor, ...]
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._step, self._batch = step, batch

    def run(self) -> torch.Tensor:
        """Train for one step, and return the loss."""
        loss = self._step(*self._batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def time_step(self) -> float:
        """Train for one step, and return its wall time in seconds."""
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


def measure(name: str, known: Sequence[ArenaTrainingRow], *, repeats: int) -> Iterator[ArenaTrainingRow]:
    """Yield the rows of a model that are not `known`."""
    for optimizer in OPTIMIZERS:
        if optimizer not in {row.optimizer for row in known}:
            yield from iterate_results(measure_training, name, optimizer, repeats, variables=ALONE, limit_s=_LIMIT_S)


def measure_training(name: str, optimizer: str, repeats: int) -> Iterator[ArenaTrainingRow]:
    """Yield the row of a model with an optimizer."""
    limit_threads()
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    kind, make = OPTIMIZERS[optimizer]
    eager, usual = copy.deepcopy(model), copy.deepcopy(model)
    planned = partial(planner.compile, batch=batch, budget=BUDGET, optimizer=kind, swap="never", compare_eager=False)
    planned(copy.deepcopy(model), loss_fn, wait="1 work")  # loads what planning needs
    plain_step, plain_plan_s = _time(lambda: planned(usual, loss_fn))
    step, arena_plan_s = _time(lambda: planned(model, loss_fn, arena=True))
    arena = _get_arena(step)
    plain, within = _Training(plain_step, usual, make(usual), batch), _Training(step, model, make(model), batch)
    wanted = _Training(lambda x, y: loss_fn(eager(x), y), eager, make(eager), batch)  # type: ignore[misc]
    first_s = [_time(within.run)[1] for _ in range(_RECORDED)]
    for _ in range(_RECORDED):
        plain.run()
        wanted.run()
    same_losses = torch.equal(wanted.run(), within.run())
    same_parameters = all(map(torch.equal, eager.parameters(), model.parameters()))
    plain.run()
    with keep_idle_pages():
        turns = [(plain.time_step(), within.time_step()) for _ in range(repeats)]
    evaluated = [tuple(_time_after_evaluation(training, batch) for training in (plain, within)) for _ in range(repeats)]
    assert arena.slab is not None
    given = measure_given_bytes(within.run)
    evaluation_bytes = measure_given_bytes(lambda: _evaluate(model, batch))
    left_bytes = count_resident_bytes(arena.slab.address, arena.slab.size_bytes)
    plain_bytes, alone_bytes = measure_given_bytes(plain.run), _measure_optimizer_bytes(plain)
    assert arena.training_bytes is not None
    assert arena.step_bytes is not None
    yield ArenaTrainingRow(
        model=name,
        optimizer=optimizer,
        budget_bytes=step.plan.budget_bytes - step.plan.graph.static_bytes,
        plain_bytes=plain_bytes,
        slab_bytes=arena.slab.size_bytes,
        given_bytes=given,
        predicted_bytes=arena.training_bytes,
        beside_bytes=arena.step_bytes + alone_bytes,
        evaluation_bytes=evaluation_bytes,
        resident_bytes=left_bytes,
        identical=same_losses and same_parameters,
        plain_s=median(a for a, _ in turns),
        arena_ratio=median(b / a for a, b in turns),
        evaluated_ratio=median(b / a for a, b in evaluated),
        plain_plan_s=plain_plan_s,
        arena_plan_s=arena_plan_s,
        addresses_s=max(0.0, first_s[1] - first_s[2]),
        repeats=repeats,
        **collect_provenance(),
    )


def _evaluate(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        model(batch[0])


def _time_after_evaluation(training: _Training, batch: tuple[torch.Tensor, ...]) -> float:
    """Run a step and an evaluation, then return the seconds of a further step."""
    training.run()
    _evaluate(training.model, batch)
    return training.time_step()


def _time(run: Callable[[], Returned]) -> tuple[Returned, float]:
    """Call `run`, and return its result and the processor time in seconds."""
    start = time.process_time()
    return run(), time.process_time() - start


def _get_arena(step: PlannedStep) -> Arena:
    assert isinstance(step._run, Executor)
    assert isinstance(step._run.arena, Arena)
    return step._run.arena


def measure_given_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that PyTorch's allocator gives `run` at once."""
    return measure_memory_rise(run, torch.device("cpu")).peak_bytes


def _measure_optimizer_bytes(training: _Training) -> int:
    """Return the most bytes that the optimizer takes while it steps, without the gradients."""
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return measure_given_bytes(training.optimizer.step)


def list_failures(rows: Sequence[ArenaTrainingRow]) -> Iterator[str]:
    """Yield a line for each row with other bits than eager PyTorch's, or other bytes than planned, and for evaluations beyond."""
    for row in rows:
        if not row.identical:
            yield f"{row.model}, {row.optimizer}: other bits than eager PyTorch's"
        if not row.is_predicted:
            yield f"{row.model}, {row.optimizer}: {row.arena_bytes:,} bytes where {row.predicted_bytes:,} were planned"
        if row.evaluating_bytes > max(row.budget_bytes, row.slab_bytes, row.evaluation_bytes):
            yield f"{row.model}, {row.optimizer}: {row.evaluating_bytes:,} bytes while a batch is evaluated between steps"


TABLE = (
    *("model", "optimizer"),
    Column("budget", "budget_bytes", format_bytes),
    Column("without an arena", "plain_bytes", format_bytes),
    Column("in an arena", "arena_bytes", format_bytes),
    Column("planned", "is_predicted", lambda same: "to 16 bytes" if same else "DIFFERENT"),
    Column("optimizer beside it", "beside_bytes", format_bytes),
    Column("evaluating", "evaluation_bytes", format_bytes),
    Column("with the slab", "evaluating_bytes", format_bytes),
    Column("bits", "identical", lambda same: "identical" if same else "DIFFERENT"),
    Column("step without", "plain_s"),
    Column("in an arena", "arena_ratio"),
    Column("behind evaluations", "evaluated_ratio"),
    Column("planning without", "plain_plan_s"),
    Column("for an arena", "arena_plan_s"),
    Column("addresses with the optimizer", "addresses_s"),
)
STUDY = Study(
    ArenaTrainingRow,
    measure,
    whole=False,
    order=order_by(model=MODELS, optimizer=OPTIMIZERS),
    pages={"table.md": TABLE},
    failures=list_failures,
)
main = Main(STUDY, MODELS, settings={"repeats": Setting(20, "steps timed of each")})

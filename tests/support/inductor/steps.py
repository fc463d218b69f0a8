"""Training steps over Inductor's kernels, beside those of ``torch.compile``."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.kernels.variants import CompileVariant
from planner.capture.lowering.lower import Capture
from planner.capture.options.in_place import IN_PLACE
from planner.capture.signature import call
from planner.capture.workload.models import Workload, build
from planner.graphs.ir import Graph
from planner.graphs.schedule import Compute, Free, Schedule
from planner.measure.steps import get_loss
from planner.settings.budget import Bytes
from planner.settings.plan import PlanSettings
from planner.train.compile.inductor_compiler import InductorCompiler
from planner.train.distributed.wrappers import unwrap
from tests.support.models.steps import make, tokens

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A step, and how it is trained.

    Attributes:
        make: the workload, the same every time.
        context: what the step is planned and called in.
        batches: forward and backward passes before each step of the optimizer.
        crossed: whether all forward passes come before all backward passes.
    """

    make: Callable[[], Workload]
    context: Context = nullcontext
    batches: int = 1
    crossed: bool = False

    def workload(self) -> Workload:
        torch.manual_seed(7)
        return self.make()


class Everything(nn.Module):
    """Tied weights, a frozen layer, a frozen parameter that is written, batch norm, a concatenation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.frozen = nn.Linear(16, 8).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(i)
        both = torch.cat([torch.tanh(self.frozen(hidden)), F.dropout(hidden[:, 8:], 0.3)], 1)
        with torch.no_grad():
            self.scale.mul_(0.9)
        return self.head(F.gelu(self.norm(both)) * self.scale)


def everything() -> Workload:
    return Workload(Everything(), loss_and_accuracy, (torch.randint(20, (64,)), torch.randint(20, (64,))))


def loss_and_accuracy(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return F.cross_entropy(logits, target), (logits.argmax(1) == target).float().mean(), logits.detach()


def mlp(layers: int = 2, dropout: float = 0.2) -> Workload:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(layers)]
    return Workload(nn.Sequential(*blocks), F.mse_loss, (torch.randn(64, 16), torch.randn(64, 16)))


def convnet() -> Workload:
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())

    model = nn.Sequential(block(3, 8), block(8, 8), nn.MaxPool2d(2), block(8, 8), nn.Flatten(), nn.Linear(8 * 64, 4))
    return Workload(model, F.cross_entropy, (torch.randn(4, 3, 16, 16), torch.randint(4, (4,))))


def unet() -> Workload:
    return build("unet", channels=4, depth=2, size=16, batch=2)


def embedding() -> Workload:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
    return Workload(model, tokens, (torch.randint(20, (4, 12)), torch.randint(20, (4, 12))))


def pure_bfloat16() -> Workload:
    workload = embedding()
    return workload._replace(model=workload.model.bfloat16())


def trained_input() -> Workload:
    workload = mlp()
    return workload._replace(batch=(workload.batch[0].requires_grad_(), workload.batch[1]))


def by_name() -> Workload:
    def loss_fn(output: torch.Tensor, *, target: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = F.mse_loss(output, target)
        return {"loss": loss, "root": loss.detach().sqrt()}

    model, _, (x, y) = mlp()
    return Workload(model, loss_fn, {"input": x, "target": y})


_GPT2 = partial(build, "gpt2", layers=2, width=16, heads=2, vocab=31, seq=12, batch=2, dropout=0.1)

CASES: dict[str, Case] = {
    "everything": Case(everything, batches=2),
    "mlp": Case(partial(mlp, layers=4)),
    "gpt2": Case(partial(_GPT2, attention="sdpa")),
    "gpt2, attention written": Case(partial(_GPT2, attention="written")),
    "convnet": Case(convnet),
    "unet": Case(unet),
    "embedding": Case(embedding),
    "pure bfloat16": Case(pure_bfloat16),
    "tied": Case(partial(make, "tied")),
    "frozen": Case(partial(make, "frozen")),
    "mutated": Case(partial(make, "mutated")),
    "shared gradient": Case(partial(make, "shared_gradient")),
    "autocast": Case(mlp, context=partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    "trained input": Case(trained_input),
    "accumulated": Case(mlp, batches=2),
    "by name": Case(by_name),
    "crossed": Case(mlp, batches=2, crossed=True),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case, captured and profiled, with what ``torch.compile`` leaves behind."""

    case: Case
    workload: Workload
    compiler: InductorCompiler
    captured: Capture
    wanted: dict[str, torch.Tensor]

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def step(self, budget: int) -> planner.PlannedStep:
        with self.case.context():
            return self.compiler.solve(self.captured, self.workload.batch, Bytes(budget))

    def found(self, step: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """What training by `step` leaves behind; the model is afterwards as it was."""
        state = copy.deepcopy(self.workload.model.state_dict())
        try:
            return train(self.case, step, self.workload)
        finally:
            self.workload.model.load_state_dict(state)


def prepare(case: Case, variant: CompileVariant = CompileVariant.DEFAULT) -> Prepared:
    workload = case.workload()
    reference = workload._replace(model=copy.deepcopy(workload.model))
    wanted = train(case, compiled(plain_step(reference)), reference)
    settings = PlanSettings.of(options=[IN_PLACE.name], accumulate=case.batches > 1, passes=1, time_limit_s=10.0, swap="never")
    compiler = InductorCompiler(unwrap(workload.model), workload.loss_fn, settings, compare_eager=False)
    with case.context():
        captured = compiler.profile(compiler._capture(workload.batch, variant), workload.batch)
    return Prepared(case, workload, compiler, captured, wanted)


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` as ``torch.compile`` compiles it, however many were compiled of the same code: after some it runs them eagerly."""
    torch._dynamo.reset()
    return torch.compile(step, dynamic=False, fullgraph=True)


def plain_step(workload: Workload) -> Callable[..., Any]:
    """A step as people write it."""
    model, loss_fn, batch = workload
    if loss_fn is None:
        return model
    if isinstance(batch, dict):
        return lambda target, **inputs: loss_fn(model(**inputs), target=target)
    return lambda *batch: loss_fn(model(*batch[:-1]), batch[-1])


def train(case: Case, run: Callable[..., Any], workload: Workload) -> dict[str, torch.Tensor]:
    """All that three steps of AdamW make and leave behind."""
    parameters = {name: p for name, p in workload.model.named_parameters() if p.requires_grad}
    leaves = workload.batch.values() if isinstance(workload.batch, dict) else workload.batch
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    optimizer = torch.optim.AdamW([*parameters.values(), *trained], lr=1e-2)
    before = [leaf.detach().clone() for leaf in trained]
    left: dict[str, torch.Tensor] = {}
    for i in range(3):
        torch.manual_seed(i)
        losses = []
        for j in range(case.batches):
            with case.context():
                returned = call(run, workload.batch)
            others = returned.values() if isinstance(returned, dict) else returned if isinstance(returned, tuple) else [returned]
            left |= {f"result {i} {j} {k}": value.detach().clone() for k, value in enumerate(others)}
            left[f"random state {i} {j}"] = torch.get_rng_state()
            losses.append(get_loss(returned))
            if not case.crossed:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        left |= {f"gradient of {name} {i}": p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        left |= {f"gradient of input {k} {i}": leaf.grad.clone() for k, leaf in enumerate(trained)}
        optimizer.step()
        optimizer.zero_grad()
        left |= {f"{name} {i}": value.clone() for name, value in workload.model.state_dict().items()}
    with torch.no_grad():
        for leaf, value in zip(trained, before, strict=True):
            leaf.copy_(value)
    return left


def differences(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal to the last bit."""
    assert wanted.keys() == found.keys()
    return [name for name in wanted if not torch.equal(wanted[name], found[name])]


def freed_over(graph: Graph, schedule: Schedule, place: int) -> set[int]:
    """What the op at `place` of a schedule writes over."""
    step = schedule.steps[place]
    if not isinstance(step, Compute):
        return set()
    behind = takewhile(lambda later: isinstance(later, Free), schedule.steps[place + 1 :])
    return {t for _, t in graph.ops[step.op].overwrites} & {free.tensor for free in behind if isinstance(free, Free)}

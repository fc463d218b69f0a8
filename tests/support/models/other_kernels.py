"""Steps whose ops can be computed by other kernels, with all ways, of use or not; and schedules that take some of them."""

from collections.abc import Collection
from functools import cache

import torch
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.lowering.lower import Capture
from planner.capture.options.traced import add_traced
from planner.capture.replay import RealStep, collect_static
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.graphs.ir import Graph, Op
from planner.graphs.schedule import Schedule, schedule_of
from planner.measure.exactness import mark_exact_ops
from planner.measure.profile import profile
from planner.measure.tracing import capture_step
from planner.settings.plan import PlanSettings
from tests.support.models.alternatives import make


class Convolutions(nn.Module):
    """With strides, dilation, groups, no bias, a filter of one point, and one that goes up again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
            nn.GELU(),
            nn.Conv2d(12, 12, 3, padding=2, dilation=2),
            nn.SiLU(),
            nn.Conv2d(12, 16, 1),
            nn.SiLU(),
            nn.Conv2d(16, 16, 3, groups=4),
            nn.SiLU(),
            nn.ConvTranspose2d(16, 4, 2, stride=2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


def _classified(model: nn.Module, x: torch.Tensor) -> Workload:
    return Workload(model, nn.CrossEntropyLoss(), (x, torch.randint(4, (len(x),))))


def _masked() -> Workload:
    """Attention with a mask by which one query sees nothing."""

    def forward(m: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = m.layer(x).view(*x.shape[:2], 2, 12).transpose(1, 2).split(4, 3)
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3).square().mean()

    mask = torch.rand(3, 1, 20, 20) > 0.3
    mask[0, 0, 5] = False
    return Workload(FunctionModule(forward, layer=nn.Linear(8, 24)), None, (torch.randn(3, 20, 8), mask))


_STEPS = {
    "convolutions": lambda: _classified(Convolutions(), torch.randn(3, 3, 16, 16)),
    "channels last": lambda: _classified(
        Convolutions().to(memory_format=torch.channels_last),
        torch.randn(3, 3, 16, 16).contiguous(memory_format=torch.channels_last),
    ),
    "lines": lambda: _classified(
        nn.Sequential(nn.Conv1d(3, 8, 5), nn.SiLU(), nn.Conv1d(8, 4, 3), nn.Flatten()), torch.randn(4, 3, 20)
    ),
    "causal": lambda: build("gpt2", layers=1, width=32, heads=2, vocab=501, seq=32, batch=4, dropout=0.0),
    "masked": _masked,
    "halves": lambda: build("llama", layers=1, width=32, heads=2, kv_heads=2, hidden=96, vocab=300, seq=32, batch=4),
    "written": lambda: make("attention"),
}
STEPS = tuple(_STEPS)


@cache
def with_all_ways(name: str) -> tuple[Capture, Workload]:
    """The step `name`, profiled once, with all ways by which its ops can be computed."""
    torch.manual_seed(5)
    workload = _STEPS[name]()
    captured = add_traced(capture_step(workload, PlanSettings()), ["kernels"])
    step = TrainingStep(workload.model, workload.loss_fn)
    captured = profile(captured, collect_static(captured, step, workload.batch), passes=1)
    return mark_exact_ops(captured, RealStep(captured, step, workload.batch)), workload


def ways_of(graph: Graph) -> list[str]:
    """Names of the ways that `graph` offers."""
    return sorted({op.target.partition(".")[2] for op in graph.ops if op.optional and op.replaces})


def ops_by(graph: Graph, way: str) -> list[Op]:
    """Ops that compute in this way, of which no two stand for the same op, with what helps them."""
    names = {"kernels.weight", "kernels.input"} if way == "weight" else {f"kernels.{way}"}
    found: list[Op] = []
    for op in graph.ops:
        if op.target in names and all(set(op.replaces).isdisjoint(other.replaces) for other in found):
            found.append(op)
    return found


def schedule_by(graph: Graph, ops: Collection[Op]) -> Schedule:
    """The program in its order with `ops` in place of what they stand for, each where the last of these would be.

    What stands for nothing comes where the program first makes one of its outputs, behind what stands for that.
    """
    behind: dict[int, list[int]] = {}
    for op in sorted(ops, key=lambda op: not op.replaces):
        place = max(op.replaces, default=graph.tensors[op.outputs[0]].producers[0])
        behind.setdefault(place, []).append(op.id)
    skipped = {p for op in ops for p in op.replaces}
    computed = [
        executed for op in graph.program for executed in (*(() if op.id in skipped else (op.id,)), *behind.get(op.id, ()))
    ]
    return schedule_of(graph, computed)

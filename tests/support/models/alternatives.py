"""Schedules in which ops stand for groups of others, written down without a solver; and steps that offer such ops."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.workload.models import Workload, build
from planner.graphs.ir import Graph, Op
from planner.graphs.options.selection import describe_differences
from planner.graphs.schedule import Schedule, schedule_of
from planner.graphs.simulate import simulate
from planner.plans.plan import Plan
from planner.plans.summary import summarize
from planner.solvers.result import SolveSettings


def schedule_with(graph: Graph, stand_ins: Collection[Op]) -> Schedule:
    """Each op of the program in its order, but `stand_ins` in place of what they stand for, where the last of these would be."""
    instead = {max(op.replaces): op.id for op in stand_ins}
    skipped = {p for op in stand_ins for p in op.replaces}
    assert len(skipped) == sum(len(op.replaces) for op in stand_ins)
    computed = [instead.get(op.id, op.id) for op in graph.program if op.id not in skipped or op.id in instead]
    return schedule_of(graph, computed)


def optional_ops(graph: Graph, *, kind: str, chunks: int) -> list[Op]:
    """Those of `graph` that compute in so many chunks: ``forward``, ``backward`` or ``backward_kept``."""
    return [op for op in graph.ops if op.target == f"chunks.{kind}.{chunks}"]


def in_chunks(graph: Graph, chunks: int) -> list[Op]:
    """Both passes of all that can be in so many chunks, where nothing long is kept."""
    return [*optional_ops(graph, kind="forward", chunks=chunks), *optional_ops(graph, kind="backward", chunks=chunks)]


class Classifier(nn.Module):
    """Two layers and many classes, which are the last dimension of what it returns, or the second one."""

    def __init__(self, classes: int, *, second: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(12, 16)
        self.head = nn.Linear(16, classes)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.relu(self.body(x)))
        return scores.transpose(1, 2) if self.second else scores


CLASSES = 301


def labels(*shape: int) -> torch.Tensor:
    target = torch.randint(CLASSES, shape)
    target.view(-1)[::7] = -100  # none of the classes: it does not count
    return target


def classifier(loss: nn.Module) -> Workload:
    return Workload(Classifier(CLASSES), loss, (torch.randn(53, 12), labels(53)))


def smoothed() -> Workload:
    return classifier(nn.CrossEntropyLoss(label_smoothing=0.1))


def weighted() -> Workload:
    return classifier(nn.CrossEntropyLoss(weight=torch.rand(CLASSES) + 0.5))


def summed() -> Workload:
    return classifier(nn.CrossEntropyLoss(reduction="sum"))


def second_dimension() -> Workload:
    return Workload(Classifier(CLASSES, second=True), nn.CrossEntropyLoss(), (torch.randn(8, 5, 12), labels(8, 5)))


def _shifted(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1].float().reshape(-1, CLASSES), target[:, 1:].reshape(-1))


def shifted() -> Workload:
    return Workload(Classifier(CLASSES).bfloat16(), _shifted, (torch.randn(8, 5, 12).bfloat16(), labels(8, 5)))


def binary() -> Workload:
    return Workload(Classifier(CLASSES), nn.BCEWithLogitsLoss(pos_weight=torch.rand(CLASSES) + 0.5), _regressed())


def squares() -> Workload:
    return Workload(Classifier(CLASSES), nn.MSELoss(), _regressed())


def mean_of_absolutes() -> Workload:
    return Workload(Classifier(CLASSES), lambda scores, target: (scores - target).abs().mean(), _regressed())


def _regressed() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(53, 12), torch.rand(53, CLASSES)


def _written_out(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (torch.logsumexp(scores, -1) - scores.gather(1, target[:, None]).squeeze(1)).mean()


def written_out() -> Workload:
    return Workload(Classifier(CLASSES), _written_out, (torch.randn(53, 12), torch.randint(CLASSES, (53,))))


def gpt2() -> Workload:
    return build("gpt2", layers=2, width=32, heads=2, vocab=501, seq=16, batch=6)


def attention() -> Workload:
    """Of which the scores are most of the memory."""
    return build("gpt2", layers=1, width=32, heads=2, vocab=60, seq=128, batch=4, attention="written", dropout=0.0)


def llama() -> Workload:
    return build("llama", layers=2, width=32, heads=2, kv_heads=2, hidden=96, vocab=500, seq=16, batch=4)


def feed_forward() -> Workload:
    """A Llama whose vocabulary is small beside the layers between."""
    return build("llama", layers=1, width=32, heads=2, kv_heads=2, hidden=256, vocab=30, seq=16, batch=4)


def transformers_model(name: str) -> Workload:
    """A small one that makes its own loss; some of its labels do not count."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    size: dict[str, Any] = {"vocab_size": CLASSES}
    match name:
        case "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=1, n_head=2, **size))
        case "llama":
            layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**layers, **size)).bfloat16()
        case "bert":
            layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
            model = transformers.BertForMaskedLM(transformers.BertConfig(**layers, **size))
        case "t5":
            layers = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
            model = transformers.T5ForConditionalGeneration(transformers.T5Config(**layers, **size))
    return Workload(model, None, {"input_ids": torch.randint(CLASSES, (2, 16)), "labels": labels(2, 16)})


STEPS = {
    "gpt2": gpt2,
    "attention": attention,
    "llama": llama,
    "feed_forward": feed_forward,
    "smoothed": smoothed,
    "weighted": weighted,
    "summed": summed,
    "second_dimension": second_dimension,
    "shifted": shifted,
    "written_out": written_out,
    "binary": binary,
    "squares": squares,
    "mean_of_absolutes": mean_of_absolutes,
}


def make(name: str) -> Workload:
    """The step `name`, the same every time."""
    torch.manual_seed(7)
    return STEPS[name]()


def plan_of(graph: Graph, schedule: Schedule, budget_bytes: int | None = None) -> Plan:
    """A plan that no solver has made, for a graph with the option ``chunks``."""
    simulation = simulate(graph, schedule)
    return Plan(
        graph=summarize(graph),
        schedule=schedule,
        budget_bytes=simulation.peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=simulation.peak_bytes,
        time_s=simulation.time_s,
        bound_s=None,
        solver="by hand",
        seconds=0.0,
        settings=SolveSettings(options={"options": ["chunks"]}),
        differs=describe_differences(graph, schedule.computed),
    )

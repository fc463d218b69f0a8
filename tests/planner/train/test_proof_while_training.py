"""Status, bound and gap after each of 50 steps: never worse than what was proved before. ``-m slow -s`` shows them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.graphs.units import format_ratio, format_seconds
from planner.plans.plan import Plan
from planner.solvers.result import OPTIMAL_GAP
from tests.support.budgets import HALF_WAY
from tests.support.integrations import huggingface, lightning
from tests.support.integrations.huggingface import transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("half_way", "solves_at_once")]

_STEPS = 50
_OPTIONS: dict[str, Any] = {"passes": 1, "compare_eager": False}


class AfterEachStep(transformers.TrainerCallback):
    """Collects the plan after each step of a ``Trainer``."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.plans.append(self.trainer.planned.plan)


class AfterEachBatch(lightning.pl.Callback):
    """Collects the plan after each step in Lightning."""

    def __init__(self, planned: Any) -> None:
        self.plans: list[Plan] = []
        self.planned = planned

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.plans.append(self.planned.planned.plan)


def in_a_loop(folder: Path) -> Iterator[Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))))
    batch = torch.randn(256, 64), torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = planner.compile(model, F.mse_loss, batch, budget=HALF_WAY, optimizer="adamw", **_OPTIONS)
    yield step.plan
    for _ in range(_STEPS):
        step(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step.plan
    yield step.wait()


def in_the_trainer(model: nn.Module, data: list[dict[str, torch.Tensor]], folder: Path) -> Iterator[Plan]:
    from planner.huggingface import PlannedTrainer

    after = AfterEachStep()
    after.trainer = PlannedTrainer(
        model=model,
        args=huggingface.arguments(folder, max_steps=_STEPS, learning_rate=1e-3),
        train_dataset=data,
        callbacks=[after],
        budget=HALF_WAY,
        plan_options=_OPTIONS,
    )
    after.trainer.train()
    yield from after.plans
    yield after.trainer.planned.wait()


def bert(folder: Path) -> Iterator[Plan]:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 97}
    data = [{"input_ids": torch.randint(97, (32,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    return in_the_trainer(transformers.BertForSequenceClassification(transformers.BertConfig(**size)), data, folder)


def t5(folder: Path) -> Iterator[Plan]:
    torch.manual_seed(0)
    size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 97}
    config = transformers.T5Config(**size, decoder_start_token_id=0)
    data = [{"input_ids": torch.randint(97, (24,)), "labels": torch.randint(97, (12,))} for _ in range(8)]
    return in_the_trainer(transformers.T5ForConditionalGeneration(config), data, folder)


def in_lightning(folder: Path) -> Iterator[Plan]:
    from planner.lightning import PlannedTraining

    planned = PlannedTraining(HALF_WAY, **_OPTIONS)
    after = AfterEachBatch(planned)
    data = lightning.batches(_STEPS), lightning.batches(1)
    lightning.trained(lightning.Module(), folder, planned, after, data=data, max_epochs=1)
    yield from after.plans
    yield planned.planned.wait()


@pytest.mark.parametrize("train", [in_a_loop, bert, t5, in_lightning])
def test_no_step_knows_less_than_the_one_before(train: Any, tmp_path: Path) -> None:
    before: Plan | None = None
    count = 0
    for count, plan in enumerate(train(tmp_path)):
        assert plan.bound_s is not None and plan.gap is not None
        proof = f"{plan.status}, bound {format_seconds(plan.bound_s)}, gap {format_ratio(plan.gap)}"
        sys.stdout.write(f"step {count}: {proof}, times {plan.graph.provenance['times']}\n")
        if before is not None:
            assert before.gap is not None
            assert plan.gap <= max(before.gap, OPTIMAL_GAP)
            if plan.graph == before.graph:
                assert plan.gap <= before.gap and plan.bound_s >= (before.bound_s or 0.0)
        before = plan
    assert count >= _STEPS

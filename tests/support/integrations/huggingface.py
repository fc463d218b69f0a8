"""Hugging Face's trainer on a small model, with and without a plan."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.budgets import HALF_WAY

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


QUICK = {"passes": 1, "tolerance": 0.05, "time_limit_s": 20.0, "compare_eager": False}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(count: int, *, longer: int = 0) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        tokens = torch.randint(97, (16 + longer * (i // 4),), generator=draw)
        mask = torch.ones_like(tokens)
        mask[-(1 + i % 3) :] = 0  # Transformers chooses another kernel where no token is padded
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens})
    return found


def arguments(folder: Path, **more: Any) -> Any:
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        **more,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **options)


def trained(make: type, folder: Path, data: Any, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    given = {"model": model(), "args": arguments(folder, **more), "train_dataset": data, **(options or {})}
    trainer = make(**given)
    trainer.train()
    return trainer


def assert_same(planned: Any, eager: Any) -> None:
    logs = [
        [entry.get(name) for entry in t.state.log_history for name in ("loss", "grad_norm", "eval_loss")]
        for t in (planned, eager)
    ]
    assert logs[0] == logs[1]
    assert any(entry is not None for entry in logs[0])
    pairs = zip(planned.model.state_dict().items(), eager.model.state_dict().items(), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []


def planned_options(budget: str = HALF_WAY, **more: Any) -> dict[str, Any]:
    return {"budget": budget, "plan_options": {**QUICK, **more}}


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch

"""A model of images and text of Transformers, whose parts install hooks in their first call, by every front end."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import planner  # noqa: E402
from planner.cli.main import main  # noqa: E402
from planner.huggingface import PlannedTrainer  # noqa: E402
from tests.support.integrations.huggingface import QUICK, arguments  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_compiler")]

BUILD = """
import torch, transformers

TEXT = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)


def model():
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=16),
        image_token_index=96,
        image_seq_length=4,
    )
    return transformers.LlavaForConditionalGeneration(config).train()


def examples(count):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (count, 16), generator=generator)
    ids[:, 2:6] = 96
    return {"input_ids": ids, "pixel_values": torch.randn(count, 3, 16, 16, generator=generator), "labels": ids.clone()}


def build():
    return model(), None, examples(4)
"""
HERE: dict[str, Any] = {}
exec(BUILD, HERE)
OPTIONS: dict[str, Any] = {"budget": "100%", "time_limit_s": 10.0, "tolerance": 0.05}


def checkpointed(model: torch.nn.Module) -> Callable[..., Any]:
    return planner.checkpoint(model, **OPTIONS)


def compiled(model: torch.nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="planner", options=OPTIONS)


@pytest.mark.parametrize("wrap", [checkpointed, compiled])
def test_gradients_are_those_of_eager(wrap: Callable[[torch.nn.Module], Callable[..., Any]]) -> None:
    """Parameters that lead only to outputs that the loss does not read get zeros, as with ``aot_eager``."""
    model, batch = HERE["model"](), HERE["examples"](4)
    planned = copy.deepcopy(model)
    model(**batch).loss.backward()
    wrap(planned)(**batch).loss.backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), planned.parameters(), strict=True)]
    assert all(b is None or not b.any() for a, b in pairs if a is None)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None)


def test_trainer_trains_as_without_a_plan(tmp_path: Path) -> None:
    given = HERE["examples"](8)
    data = [{name: values[i] for name, values in given.items()} for i in range(8)]
    options = {"args": arguments(tmp_path, max_steps=2), "train_dataset": data}
    plain = transformers.Trainer(model=HERE["model"](), **options)
    planned = PlannedTrainer(HERE["model"](), **options, budget="100%", plan_options=QUICK)
    for trainer in (plain, planned):
        trainer.train()
    pairs = zip(plain.model.named_parameters(), planned.model.parameters(), strict=True)
    assert [name for (name, wanted), found in pairs if not torch.equal(wanted, found)] == []


def test_the_command_line_traces_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llava.py").write_text(BUILD)
    graph = tmp_path / "llava.json"
    assert main(["trace", f"{tmp_path / 'llava.py'}:build", "-o", str(graph), "--passes", "1"]) == 0
    assert main(["info", str(graph)]) == 0
    assert "least budget" in capsys.readouterr().out

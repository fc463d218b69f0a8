"""Models of Transformers, small and randomly initialized: planned steps are bitwise equal to eager ones."""

import os
from collections.abc import Callable

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import planner  # noqa: E402
from planner.capture.trace import capture  # noqa: E402
from planner.graphs.errors import TraceError  # noqa: E402
from planner.runtime.executor import Executor  # noqa: E402
from planner.torch_private.capture import FOLLOWS_COPIES  # noqa: E402
from tests.support.budgets import HALF_WAY  # noqa: E402
from tests.support.marks import slow  # noqa: E402
from tests.support.models.outcomes import assert_exact  # noqa: E402
from tests.support.models.steps import random_schedule  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("half_way")]

Case = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def text(*, labels: int = 16) -> dict[str, torch.Tensor]:
    """Two sentences, one of them padded, and what is to be predicted."""
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, -3:] = 0
    return {"input_ids": torch.randint(97, (2, 16)), "attention_mask": mask, "labels": torch.randint(97, (2, labels))}


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), text()


def llama() -> Case:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config), text()


def unmasked() -> Case:
    """Llama without a mask: eager PyTorch sees that it packs no sequences, and shares keys among heads in the kernel."""
    model, batch = llama()
    return model, {name: value for name, value in batch.items() if name != "attention_mask"}


def bert() -> Case:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    return transformers.BertForMaskedLM(config), text()


def t5(*, use_cache: bool = FOLLOWS_COPIES) -> Case:
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, use_cache=use_cache
    )
    return transformers.T5ForConditionalGeneration(config), text(labels=12)


def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "labels": torch.randint(5, (2,)),
    }


@pytest.mark.parametrize("make", [unmasked, bert, *slow(gpt2, llama, t5, vit)], ids=lambda make: make.__name__)
def test_a_random_schedule_is_exact(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    captured = capture(model, None, batch)
    schedule = random_schedule(captured.graph, 1)
    assert len(schedule.computed) > len(captured.graph.ops)
    assert_exact(Executor(captured, schedule, model, None), model, batch)


@pytest.mark.skipif(FOLLOWS_COPIES, reason="from torch 2.13 on Dynamo follows copy.deepcopy")
def test_unsupported_deepcopy_raises() -> None:
    model, batch = t5(use_cache=True)
    with pytest.raises(
        TraceError, match=r"does not follow copy.deepcopy\(\) \(.*get_text_config\): use torch 2\.13, or .*use_cache"
    ):
        capture(model.train(), None, batch)


@pytest.mark.slow
def test_gpt2_is_planned_in_one_call() -> None:
    torch.manual_seed(0)
    model, batch = gpt2()
    model.train()
    step = planner.compile(model, None, batch, budget=HALF_WAY, passes=1, tolerance=0.05, time_limit_s=20.0)
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
    torch.manual_seed(1)
    step(**batch).backward()
    planned = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    model(**batch).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(planned, model.parameters(), strict=True))


@pytest.mark.parametrize("make", [llama, *slow(gpt2)], ids=lambda make: make.__name__)
def test_a_compiled_model_is_exact(make: Callable[[], Case]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    model.loss_type = "ForCausalLM"  # else GPT-2 logs that it has none, which breaks its graph
    compiled = torch.compile(model, backend="planner", dynamic=False, options={"budget": HALF_WAY, "tolerance": 0.05})
    assert_exact(lambda **given: compiled(**given).loss, model, batch)

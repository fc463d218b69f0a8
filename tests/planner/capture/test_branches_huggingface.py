"""Models of Transformers, small and randomly initialized: branches on data, and a registry that other models extend."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from planner.capture.trace import capture  # noqa: E402
from planner.graphs.errors import MismatchError, TraceError  # noqa: E402
from planner.graphs.schedule import keep_everything  # noqa: E402
from planner.runtime.executor import Executor  # noqa: E402
from tests.support.models.as_eager import check_trains_as_eager  # noqa: E402
from tests.support.models.outcomes import check_three_steps  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

Case = tuple[torch.nn.Module, dict[str, torch.Tensor]]

SMALL = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}


def sentences(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, -3:] = 0
    return {"input_ids": torch.randint(97, (2, 8)), "attention_mask": mask, "labels": labels}


def deberta() -> Case:
    config = transformers.DebertaConfig(**SMALL, **DISENTANGLED, num_labels=3)
    return transformers.DebertaForSequenceClassification(config), sentences(torch.tensor([2, 0]))


def deberta_v2() -> Case:
    config = transformers.DebertaV2Config(**SMALL, **DISENTANGLED, num_labels=3, position_buckets=4, share_att_key=True)
    return transformers.DebertaV2ForSequenceClassification(config), sentences(torch.tensor([2, 0]))


def wav2vec2(**options: Any) -> Case:
    shape = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    chance = {"mask_time_prob": 0.0, "layerdrop": 0.0, **options}
    model = transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(**{**SMALL, "vocab_size": 12}, **shape, **positions, **chance)
    )
    mask = torch.ones(2, 600, dtype=torch.int64)
    mask[1, 400:] = 0
    labels = torch.tensor([[3, 4, 5, -100], [1, 2, 3, 4]])
    return model, {"input_values": torch.randn(2, 600), "attention_mask": mask, "labels": labels}


class Grouped(torch.nn.Module):
    """Llama with fewer heads of keys than of queries, whose kernel depends on whether the mask pads anything."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | shape))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, attention_mask=mask, labels=ids).loss
        return loss


def padded_in_turn(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(4, 64, dtype=torch.int64)
    mask[0, 64 - 20 * (number % 2) :] = 0
    return torch.randint(97, (4, 64), generator=torch.Generator().manual_seed(number)), mask


def test_a_mask_that_pads_nothing_is_looked_at_as_in_eager_mode() -> None:
    step = check_trains_as_eager(Grouped, None, padded_in_turn)
    assert len(step.history) == 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [deberta, deberta_v2, wav2vec2], ids=["deberta", "deberta_v2", "wav2vec2"])
def test_three_steps_of_transformers_models_are_exact(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    step = check_three_steps(model.train(), batch)
    if make is wav2vec2:
        with pytest.raises(MismatchError, match=r"labels.masked_select\(labels_mask\)\) gives \(8,\) for this batch"):
            step(**batch | {"labels": torch.ones(2, 4, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("options", "line", "way_out"),
    [
        ({"layerdrop": 0.5}, r"modeling_wav2vec2.py:\d+ \(if not skip_the_layer", "layerdrop=0 in the model's config"),
        ({"mask_time_prob": 0.5, "mask_time_length": 2}, r"modeling_wav2vec2.py:\d+ \(.*np.random", "mask_time_prob=0"),
    ],
    ids=["layers dropped", "SpecAugment"],
)
def test_random_choices_of_a_model_raise(options: dict[str, Any], line: str, way_out: str) -> None:
    model, batch = wav2vec2(**options)
    with pytest.raises(TraceError, match=line) as caught:
        capture(model.train(), None, batch)
    assert way_out in str(caught.value)


def test_a_plan_stays_valid_when_another_model_is_imported() -> None:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    batch = sentences(torch.randint(97, (2, 8)))
    step = Executor(captured := capture(model, None, batch), keep_everything(captured.graph), model, None)
    step(**batch).backward()
    registered = set(transformers.utils.generic._registered_model_output_types)

    @dataclass
    class Found(transformers.utils.ModelOutput):
        loss: torch.Tensor

    Found(loss=torch.ones(()))
    assert transformers.utils.generic._registered_model_output_types > registered
    step(**batch).backward()

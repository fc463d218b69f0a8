"""The models of ``make bench-first-step``: eager PyTorch takes about 1 to 3 GB for a step, and 1 to 8 s with one thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.huggingface_models import build_image_model, build_token_model
from benchmarks.models.parts import FunctionModule, next_tokens
from benchmarks.training_loop import Recipe
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure.steps import Step

REPEATED_STEPS, DISTINCT_STEPS = 3, 5  # eager steps that planning may take, besides the capture: with and without repeated layers
_RATE = 0.01


@dataclass(frozen=True, slots=True)
class FirstStepCase:
    """A model, and its training in less memory.

    Attributes:
        recipe: makes the workload; its optimizer has no state.
        checkpointing: returns the step with its blocks checkpointed.
        planning_steps: number of eager steps that planning may take, besides the capture.
        share: of eager's peak, the budget.
        steps: number of training steps.
    """

    recipe: Recipe
    checkpointing: Callable[[Workload], Step]
    planning_steps: int = REPEATED_STEPS
    share: float = 0.5
    steps: int = 8  # of which the last are timed, when a plan found during the first ones runs in its arena

    @staticmethod
    def of(make: Callable[[], Workload], checkpointing: Callable[[Workload], Step], **settings: Any) -> "FirstStepCase":
        """Return the case of a model that is trained by SGD."""
        return FirstStepCase(Recipe(make, "sgd", rate=_RATE), checkpointing, **settings)


def checkpoint_by_blocks(workload: Workload, **choice: int) -> Step:
    """Return the step with ``torch.utils.checkpoint`` around its blocks, chosen as in ``planner.studies.blocks``."""
    from planner.studies.baselines import build_checkpoint_blocks  # imports settings of Inductor, which planned runs do not need

    return build_checkpoint_blocks(**choice).prepare(workload.model, workload.loss_fn)


def checkpoint_by_own_method(workload: Workload) -> Step:
    """Return the step with the activation checkpointing of Hugging Face turned on."""
    workload.model.activation_checkpointing_enable()  # type: ignore[operator]
    return TrainingStep(workload.model, workload.loss_fn)


def build_lstm(*, batch: int, length: int, width: int, hidden: int, layers: int, vocabulary: int) -> Workload:
    """Build a language model of PyTorch's LSTM."""

    def forward(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = m.lstm(m.embed(tokens))
        logits: torch.Tensor = m.head(states)
        return logits

    parts = {
        "embed": nn.Embedding(vocabulary, width),
        "lstm": nn.LSTM(width, hidden, num_layers=layers, batch_first=True, dropout=0.1),
        "head": nn.Linear(hidden, vocabulary),
    }
    tokens, targets = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return Workload(FunctionModule(forward, **parts), next_tokens, (tokens, targets))


_GPT2 = partial(build, "gpt2", layers=12, width=384, heads=6, seq=512, batch=4)
_LLAMA = partial(build, "llama", layers=12, width=192, heads=4, hidden=512, vocab=4000, seq=512, batch=8, dtype="float32")
_VIT = partial(build, "vit", layers=12, width=192, heads=3, size=128, patch=8, classes=10, batch=24)
_RESNET50 = partial(build, "resnet50", width=48, size=112, classes=100, batch=64)
_UNET = partial(build, "unet", channels=16, size=256, batch=12)
_LSTM = partial(build_lstm, batch=128, length=64, width=256, hidden=256, layers=8, vocabulary=500)

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_TRANSFORMER = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1024}
_NARROW = {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 768}
_SMALL_GPT2 = {"n_embd": 256, "n_layer": 8, "n_head": 8}
_SMALL_T5 = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "decoder_start_token_id": 1}
_TOKENS = {"batch": 10, "length": 256, "vocabulary": 8000}
_HF_GPT2 = partial(build_token_model, "GPT2Config", "GPT2LMHeadModel", **_TOKENS, **_SMALL_GPT2, **_SPECIAL)
_HF_BERT = partial(build_token_model, "BertConfig", "BertForMaskedLM", **_TOKENS, **_TRANSFORMER)
_HF_T5 = partial(
    build_token_model, "T5Config", "T5ForConditionalGeneration", **{**_TOKENS, "length": 192}, **_SMALL_T5, **_SPECIAL
)
_HF_VIT = partial(
    build_image_model, "ViTConfig", "ViTForImageClassification", batch=36, size=128, image_size=128, patch_size=8, **_NARROW
)

CASES: Mapping[str, FirstStepCase] = {
    "gpt2": FirstStepCase.of(_GPT2, checkpoint_by_blocks, share=0.6),  # half is too little for its loss over 50257 tokens
    "llama": FirstStepCase.of(_LLAMA, checkpoint_by_blocks),
    "vit": FirstStepCase.of(_VIT, checkpoint_by_blocks),
    "resnet50": FirstStepCase.of(_RESNET50, partial(checkpoint_by_blocks, level=2), planning_steps=DISTINCT_STEPS),
    "unet": FirstStepCase.of(_UNET, partial(checkpoint_by_blocks, depth=1), planning_steps=DISTINCT_STEPS),
    "lstm": FirstStepCase.of(_LSTM, checkpoint_by_blocks, planning_steps=DISTINCT_STEPS),
    "hf-gpt2": FirstStepCase.of(_HF_GPT2, checkpoint_by_own_method),
    "hf-bert": FirstStepCase.of(_HF_BERT, checkpoint_by_own_method),
    "hf-t5": FirstStepCase.of(_HF_T5, checkpoint_by_own_method),
    "hf-vit": FirstStepCase.of(_HF_VIT, checkpoint_by_own_method),
}

"""Models of Hugging Face Transformers: small configurations, random weights, without downloads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.models.parts import FunctionModule
from planner.capture.workload.models import Workload

VOCABULARY = 96
_BATCH, _LENGTH = 4, 32


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape or (_BATCH, _LENGTH))


def build_model(config: str, model: str, **options: Any) -> torch.nn.Module:
    """Build a model with random weights, in train mode."""
    import transformers

    found: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return found.train()


def build_token_model(
    config: str, model: str, *, batch: int = _BATCH, length: int = _LENGTH, vocabulary: int = VOCABULARY, **options: Any
) -> Workload:
    """Build a model that reads tokens, and computes its loss from labels itself."""
    inputs = {name: torch.randint(3, vocabulary, (batch, length)) for name in ("input_ids", "labels")}
    return Workload(build_model(config, model, vocab_size=vocabulary, **options), None, inputs)


def build_image_model(config: str, model: str, *, batch: int = 4, size: int = 32, **options: Any) -> Workload:
    """Build a model that classifies images, and computes its loss from labels itself."""
    inputs = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(10, (batch,))}
    return Workload(build_model(config, model, num_labels=10, **options), None, inputs)


def language_model(name: str, **options: Any) -> Workload:
    """Build a model that predicts the next token."""
    head = _CAUSAL.get(name, f"{name}ForCausalLM")
    return build_token_model(f"{name}Config", head, **_SPECIAL, use_cache=False, **options)


_CAUSAL = {"GPT2": "GPT2LMHeadModel"}


def masked_model(name: str, head: str = "ForMaskedLM", **options: Any) -> Workload:
    """Build a model that predicts every token; the batch has an attention mask."""
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    batch = {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}
    return Workload(build_model(f"{name}Config", f"{name}{head}", vocab_size=VOCABULARY, **options), None, batch)


def sequence_to_sequence(name: str, **options: Any) -> Workload:
    """Build an encoder and a decoder, whose input is derived from the labels."""
    fixed = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}
    return build_token_model(f"{name}Config", f"{name}ForConditionalGeneration", **fixed, **options)


def image_classifier(name: str, size: int = 32, **options: Any) -> Workload:
    return build_image_model(f"{name}Config", f"{name}ForImageClassification", size=size, **options)


def segformer() -> Workload:
    """Build a model that interpolates to the size of the labels."""
    sizes = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
    model = build_model("SegformerConfig", "SegformerForSemanticSegmentation", num_labels=5, decoder_hidden_size=32, **sizes)
    return Workload(model, None, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(5, (2, 64, 64))})


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def clip() -> Workload:
    """Build two encoders with a contrastive loss."""
    text = {**_TINY, **_SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    vision = {**_TINY, "image_size": 32, "patch_size": 8}
    model = build_model("CLIPConfig", "CLIPModel", text_config=text, vision_config=vision, projection_dim=32)
    batch = {"input_ids": tokens(8, 16), "pixel_values": torch.randn(8, 3, 32, 32)}
    return Workload(FunctionModule(lambda m, **inputs: m.model(**inputs, return_loss=True), model=model), None, batch)


def speech_classifier() -> Workload:
    """Build Wav2Vec2, without masked spans of time and dropped layers, which NumPy would draw."""
    convolutions = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16}
    steady = {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "layerdrop": 0.0}
    head = {"num_labels": 10, "classifier_proj_size": 32}
    model = build_model("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", **convolutions, **_TINY, **steady, **head)
    return Workload(model, None, {"input_values": torch.randn(4, 2000), "labels": torch.randint(10, (4,))})


def whisper() -> Workload:
    layers = _of_both(layers=2, attention_heads=4, ffn_dim=64)
    sizes = {"d_model": 32, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 32}
    special = {**_SPECIAL, "decoder_start_token_id": 1, "use_cache": False}
    model = build_model("WhisperConfig", "WhisperForConditionalGeneration", vocab_size=VOCABULARY, **layers, **sizes, **special)
    return Workload(model, None, {"input_features": torch.randn(4, 16, 100), "labels": tokens(4, 24)})


def time_series() -> Workload:
    """Build PatchTST: patches of several channels in time, normalized by their statistics."""
    small = {"d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "patch_length": 8, "patch_stride": 8}
    model = build_model(
        "PatchTSTConfig", "PatchTSTForPrediction", num_input_channels=3, context_length=64, prediction_length=16, **small
    )
    return Workload(model, None, {"past_values": torch.randn(8, 64, 3), "future_values": torch.randn(8, 16, 3)})


class _WithImage(torch.nn.Module):
    """A model of images and text, with an image in the same place of each sentence, whatever tokens are drawn."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("places", torch.arange(2, 6))

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        ids = input_ids.clamp(max=VOCABULARY - 2).index_fill(1, self.places, VOCABULARY - 1)
        return self.inner(input_ids=ids, pixel_values=pixel_values, labels=labels)


def llava() -> Workload:
    """Build a model of images and text, whose parts install hooks in their first call."""
    import transformers

    text = transformers.LlamaConfig(vocab_size=VOCABULARY, **_LLAMA)
    vision = transformers.CLIPVisionConfig(**{**_VIT, "image_size": 16, "patch_size": 8}, projection_dim=16)
    options = {"text_config": text, "vision_config": vision, "image_token_index": VOCABULARY - 1, "image_seq_length": 4}
    model = build_model("LlavaConfig", "LlavaForConditionalGeneration", **options)
    batch = {"input_ids": tokens(), "pixel_values": torch.randn(_BATCH, 3, 16, 16), "labels": tokens()}
    return Workload(_WithImage(model), None, batch)


def _of_both(**sizes: int) -> dict[str, int]:
    """Return the options of an encoder and a decoder of the same sizes."""
    return {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}


_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_LLAMA = {**_SMALL, "num_key_value_heads": 2}
_BERT = {**_SMALL, "max_position_embeddings": 64}
_VIT = {**_SMALL, "image_size": 32, "patch_size": 4}
_BART = {"d_model": 64, **_of_both(layers=2, ffn_dim=128, attention_heads=4), "max_position_embeddings": 64}
_SMALL_OPT = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "word_embed_proj_dim": 64}
_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}

MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2": partial(language_model, "GPT2", n_embd=64, n_layer=4, n_head=4, n_positions=64),
    "opt": partial(language_model, "OPT", **_SMALL_OPT),
    "gpt_neox": partial(language_model, "GPTNeoX", **_SMALL),
    "bloom": partial(language_model, "Bloom", hidden_size=64, n_layer=4, n_head=4),
    "llama": partial(language_model, "Llama", **_LLAMA),
    "mistral": partial(language_model, "Mistral", **_LLAMA, sliding_window=16),
    "qwen2": partial(language_model, "Qwen2", **_LLAMA),
    "qwen3": partial(language_model, "Qwen3", **_LLAMA, head_dim=16),
    "gemma": partial(language_model, "Gemma", **_LLAMA, head_dim=16),
    "gemma2": partial(language_model, "Gemma2", **_LLAMA, head_dim=16),
    "phi3": partial(language_model, "Phi3", **_LLAMA),
    "mixtral": partial(language_model, "Mixtral", **_LLAMA, num_local_experts=4),
    "mamba": partial(language_model, "Mamba", hidden_size=32, state_size=4, num_hidden_layers=2, expand=2, conv_kernel=4),
    "bert": partial(masked_model, "Bert", **_BERT),
    "roberta": partial(masked_model, "Roberta", **_BERT, pad_token_id=0),
    "distilbert": partial(masked_model, "DistilBert", dim=64, hidden_dim=128, n_layers=4, n_heads=4, max_position_embeddings=64),
    "deberta": partial(
        masked_model, "DebertaV2", **_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0
    ),
    "electra": partial(masked_model, "Electra", **_BERT, embedding_size=32),
    "albert": partial(masked_model, "Albert", **_BERT, embedding_size=32),
    "t5": partial(sequence_to_sequence, "T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
    "bart": partial(sequence_to_sequence, "Bart", **_BART, bos_token_id=1),
    "vit": partial(image_classifier, "ViT", **_VIT),
    "beit": partial(image_classifier, "Beit", **_VIT, use_relative_position_bias=True, drop_path_rate=0.1),
    "swin": partial(
        image_classifier, "Swin", 64, image_size=64, embed_dim=16, depths=[1, 1, 2], num_heads=[1, 2, 4], window_size=4
    ),
    "convnext": partial(image_classifier, "ConvNext", 64, **_STAGES),
    "resnet": partial(image_classifier, "ResNet", 64, **_STAGES, embedding_size=16, layer_type="basic"),
    "segformer": segformer,
    "clip": clip,
    "llava": llava,
    "wav2vec2": speech_classifier,
    "whisper": whisper,
    "patchtst": time_series,
}

"""Models of Transformers with adapters of PEFT: small, with random weights, without downloads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.models import huggingface_models
from planner.capture.workload.models import Workload


def with_adapter(config: str, base: Callable[[], Workload], **options: Any) -> Workload:
    import peft

    workload = base()
    kind = getattr(peft, config)
    return workload._replace(model=peft.get_peft_model(workload.model, kind(task_type="CAUSAL_LM", **options)))


def quantize_and_adapt(base: Callable[[], Workload], quantize: Callable[[torch.nn.Module], None]) -> Workload:
    """Build a model with LoRA on frozen weights that `quantize` replaces (QLoRA)."""
    workload = base()
    quantize(workload.model)
    return with_adapter("LoraConfig", lambda: workload, r=4, target_modules=["q_proj", "v_proj"])


def to_4_bits(model: torch.nn.Module) -> None:
    """Replace the linear layers of blocks by those of bitsandbytes."""
    import bitsandbytes

    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    quantized = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
                    quantized.load_state_dict(layer.state_dict())
                    setattr(parent, name, quantized.to("cpu"))


def to_8_bits(model: torch.nn.Module) -> None:
    """Quantize the weights of blocks by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model.layers, Int8WeightOnlyConfig())


_GPT2, _LLAMA = huggingface_models.MODELS["gpt2"], huggingface_models.MODELS["llama"]

MODELS: dict[str, Callable[[], Workload]] = {
    "lora-gpt2": partial(
        with_adapter, "LoraConfig", _GPT2, r=4, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True
    ),
    "dora-llama": partial(with_adapter, "LoraConfig", _LLAMA, r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "ia3-llama": partial(
        with_adapter, "IA3Config", _LLAMA, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "adalora-llama": partial(
        with_adapter, "AdaLoraConfig", _LLAMA, init_r=6, target_r=4, total_step=10, target_modules=["q_proj", "v_proj"]
    ),
    "vera-llama": partial(with_adapter, "VeraConfig", _LLAMA, r=4, target_modules=["q_proj", "o_proj"]),
    "oft-llama": partial(with_adapter, "OFTConfig", _LLAMA, oft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "boft-llama": partial(with_adapter, "BOFTConfig", _LLAMA, boft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "hra-llama": partial(with_adapter, "HRAConfig", _LLAMA, r=4, target_modules=["q_proj", "v_proj"]),
    "miss-llama": partial(with_adapter, "MissConfig", _LLAMA, r=4, target_modules=["q_proj", "v_proj"]),
    "loha-llama": partial(with_adapter, "LoHaConfig", _LLAMA, r=4, target_modules=["q_proj", "v_proj"]),
    "lokr-llama": partial(with_adapter, "LoKrConfig", _LLAMA, r=4, target_modules=["q_proj", "v_proj"]),
    "ln-llama": partial(with_adapter, "LNTuningConfig", _LLAMA, target_modules=["input_layernorm"]),
    "prefix-llama": partial(with_adapter, "PrefixTuningConfig", _LLAMA, num_virtual_tokens=8),
    "qlora-4-bits-llama": partial(quantize_and_adapt, _LLAMA, to_4_bits),
    "qlora-8-bits-llama": partial(quantize_and_adapt, _LLAMA, to_8_bits),
    "prompt-gpt2": partial(with_adapter, "PromptTuningConfig", _GPT2, num_virtual_tokens=8),
}

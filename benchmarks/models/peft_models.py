"""Models of Transformers with adapters of PEFT: small, with random weights, without downloads."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.models import huggingface_models
from planner.models import Workload


def with_adapter(config: str, base: Callable[[], Workload], **options: Any) -> Workload:
    import peft

    workload = base()
    kind = getattr(peft, config)
    return workload._replace(model=peft.get_peft_model(workload.model, kind(task_type="CAUSAL_LM", **options)))


_GPT2, _LLAMA = huggingface_models.MODELS["gpt2"], huggingface_models.MODELS["llama"]

MODELS: dict[str, Callable[[], Workload]] = {
    "lora-gpt2": partial(
        with_adapter, "LoraConfig", _GPT2, r=4, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True
    ),
    "dora-llama": partial(with_adapter, "LoraConfig", _LLAMA, r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "ia3-llama": partial(
        with_adapter, "IA3Config", _LLAMA, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt-gpt2": partial(with_adapter, "PromptTuningConfig", _GPT2, num_virtual_tokens=8),
}

"""Settings of PyTorch and of the process that select kernels: times, workspaces and rounding depend on them."""

import os
from typing import Any, cast

import torch

_ENVIRONMENT = {
    "cpu": ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR"),
    "cuda": ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE"),
}


def collect_kernel_settings(device: torch.device) -> dict[str, str]:
    """Return the settings for kernels on `device`, by their names in PyTorch or in the environment.

    The precision of products is read from the interface of each library (``fp32_precision``), which
    ``torch.set_float32_matmul_precision`` and ``allow_tf32`` set as well.
    """
    settings = _collect_cuda_settings() if device.type == "cuda" else _collect_cpu_settings()
    settings["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    settings |= {name: os.environ[name] for name in _ENVIRONMENT.get(device.type, ()) if name in os.environ}
    return {name: str(value) for name, value in settings.items()}


def format_settings(settings: dict[str, str]) -> str:
    """Return the settings in one line."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _collect_cpu_settings() -> dict[str, object]:
    mkldnn: Any = torch.backends.mkldnn
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": mkldnn.enabled,
        "mkldnn.matmul": _get_precision(mkldnn.matmul),
        "mkldnn.conv": _get_precision(mkldnn.conv),
        "mkldnn.rnn": _get_precision(mkldnn.rnn),
    }


def _collect_cuda_settings() -> dict[str, object]:
    cuda, cudnn = torch.backends.cuda, cast("Any", torch.backends.cudnn)
    products = cuda.matmul
    return {
        "matmul": _get_precision(products),
        "matmul.allow_fp16_accumulation": products.allow_fp16_accumulation,
        "matmul.allow_fp16_reduced_precision_reduction": products.allow_fp16_reduced_precision_reduction,
        "matmul.allow_bf16_reduced_precision_reduction": products.allow_bf16_reduced_precision_reduction,
        "blas": cuda.preferred_blas_library(),
        "cudnn": cudnn.enabled and cudnn.version(),
        "cudnn.conv": _get_precision(cudnn.conv),
        "cudnn.rnn": _get_precision(cudnn.rnn),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "attention": "+".join(name for name, enabled in _get_attention().items() if enabled),
        "CUDA": torch.version.cuda,
    }


def _get_precision(of: Any) -> str:
    """Return the precision of float32 products; IEEE 754 if none was set."""
    return str(of.fp32_precision).replace("none", "ieee")


def _get_attention() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }

"""Report in a minute how a CUDA device and its libraries behave where plans rely on it: the first step of ``make gpu``.

Each line is printed as soon as it is known, ``name: result``; a failure is a line too.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module, metadata

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from planner.graphs.allocators.caching import CachingAllocator
from planner.graphs.errors import typed_line
from planner.graphs.units import format_bytes
from planner.measure.kernel_settings import collect_kernel_settings, format_settings
from planner.runtime.libraries import warm_up_libraries

_PACKAGES = ("numpy", "scipy", "pandas", "pulp", "highspy", "msgspec", "psutil", "rich", "jinja2")
_FOR_TESTS = ("pytest", "hypothesis", "triton")
_MB = 2**20
# At the borders between the allocator's kinds of segments.
_REQUESTS = (1, 513, _MB, _MB + 1, 5 * _MB, 10 * _MB - 512, 10 * _MB, 33 * _MB)
_COPY_BYTES = 256 * _MB

Lines = Iterator[tuple[str, str]]


def probe_versions() -> Lines:
    """Yield the versions of packages, and those that cannot be imported."""
    yield "Python", f"{sys.version.split()[0]} on {platform.platform()}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    for package in (*_PACKAGES, *_FOR_TESTS):
        try:
            import_module(package)
            yield package, metadata.version(package)
        except ImportError as error:
            yield package, f"NOT THERE: {error}"


def probe_device() -> Lines:
    """Yield the device, its memory, and the settings that kernels and memory depend on."""
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    yield "device", f"{found.name}, capability {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    yield "memory", f"{format_bytes(free)} of {format_bytes(total)} free"
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    config = next((f"{name}={os.environ[name]}" for name in names if name in os.environ), "no settings of its own")
    yield "allocator", f"{torch.cuda.get_allocator_backend()}, {config}"
    yield "settings", format_settings(collect_kernel_settings(torch.device("cuda")))


def probe_attention() -> Lines:
    """Yield the attention kernels that run, by type."""
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(2, 4, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
            try:
                with sdpa_kernel(backend):
                    torch.autograd.grad(F.scaled_dot_product_attention(query, query, query).sum(), query)
                yield f"attention, {dtype}, {backend.name}", "runs"
            except RuntimeError as error:
                yield f"attention, {dtype}, {backend.name}", f"no: {str(error).splitlines()[0]}"


def probe_context() -> Lines:
    """Yield the bytes of the device that are outside of PyTorch's allocator, after each kind of work that loads more."""

    def format_outside() -> str:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return f"{total - free - torch.cuda.memory_reserved()} B"

    ones = partial(torch.ones, device="cuda", requires_grad=True)
    matrix, query = ones(64, 64), ones(2, 4, 64, 64, dtype=torch.bfloat16)
    yield "outside of the allocator, first tensor", format_outside()
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "product": lambda: torch.mm(matrix, matrix),
        "convolution": lambda: F.conv2d(ones(2, 8, 32, 32).detach(), ones(8, 8, 3, 3)),
        "attention": lambda: F.scaled_dot_product_attention(query, query, query),
    }
    for name, result in kinds.items():
        result().sum().backward()
        yield f"outside of the allocator, {name}", format_outside()


def probe_workspaces() -> Lines:
    """Yield the bytes that libraries allocate in a forward and a backward pass, which they do once."""
    for turn in ("first", "second"):
        before = torch.cuda.memory_allocated()
        warm_up_libraries(torch.device("cuda:0"))
        grown = torch.cuda.memory_allocated() - before
        yield f"workspaces of libraries, {turn} call", f"{grown} B"


def probe_rounding() -> Lines:
    """Yield the allocated and reserved bytes of single requests, compared with the simulated allocator."""
    for size in _REQUESTS:
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        found = torch.cuda.memory_allocated() - allocated, torch.cuda.memory_reserved() - reserved
        simulated = CachingAllocator()
        simulated.allocate(size)
        expected = simulated.allocated.bytes, simulated.reserved.bytes
        verdict = "as simulated" if found == expected else f"NOT as simulated ({expected[0]} and {expected[1]} B)"
        yield f"request of {size} B", f"allocated {found[0]} B, reserved {found[1]} B: {verdict}"
        del block


def probe_repeating() -> Lines:
    """Yield for each kernel if its bits repeat: plans are compared with two runs of eager PyTorch."""

    def make_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", requires_grad=True)

    index, image, query = torch.randint(7, (4096,), device="cuda"), make_tensor(16, 32, 28, 28), make_tensor(4, 8, 256, 64)
    rows, kernel, scale = make_tensor(7, 64), make_tensor(64, 32, 3, 3), make_tensor(32)
    losses: dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {
        "embedding": (rows, lambda: F.embedding(index, rows)),
        "convolution": (kernel, lambda: F.conv2d(image, kernel)),
        "batch norm": (scale, lambda: F.batch_norm(image, None, None, scale, scale, training=True)),
        "attention": (query, lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)),
    }
    for name, (read, result) in losses.items():
        first, *others = (torch.autograd.grad(result().sin().sum(), read)[0] for _ in range(5))
        same = all(torch.equal(first, other) for other in others)
        yield f"gradients of {name}, five times", "the same bits" if same else "NOT the same bits"


def probe_graphs() -> Lines:
    """Yield the memory that a captured graph reserves."""
    factor = torch.ones(64, 64, device="cuda")
    torch.mm(factor, factor)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # as a capture does
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.mm(factor, factor)
    graph.replay()
    torch.cuda.synchronize()
    yield "a CUDA graph of one product", f"reserves {torch.cuda.memory_reserved() - reserved} B; {made.numel() * 4} B are in use"


def link() -> Lines:
    """Yield the rates of copies of page-locked memory."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    for name, to, of in (("to the device", there, host), ("to the host", host, there)):
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        yield f"copies {name}", f"{_COPY_BYTES / (time.perf_counter() - began) / 1e9:.1f} GB/s"


PROBES = (
    probe_versions,
    probe_device,
    probe_rounding,
    probe_workspaces,
    probe_context,
    probe_attention,
    probe_repeating,
    probe_graphs,
    link,
)


def main(words: Sequence[str] = ()) -> int:
    """Print the results of all probes; return 1 if one of them failed."""
    failed = 0
    for probe in PROBES:
        try:
            for name, found in probe():
                print(f"{name}: {found}", flush=True)
        except Exception as error:  # noqa: BLE001  # the other probes run all the same
            failed = 1
            print(f"{probe.__name__}: FAILED, {typed_line(error)}", flush=True)
    return failed

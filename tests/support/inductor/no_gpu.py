"""Inductor's compiler for CUDA, on a machine without a GPU.

A step is captured on the CPU; its fake tensors are moved to the device before Inductor parts and compiles it. Nothing is
executed, and no kernel is compiled. Triton must be there, a CUDA build of PyTorch need not. It is for a process of its own:
Inductor and Triton remember what they found.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree, _triton
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.kernels import halves
from planner.capture.rewrites.cuda_attention import capture_attention_as_on_cuda
from planner.torch_private.capture import JointWithDescriptors

_DEVICE = torch.device("cuda:0")
_H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_CUDA: dict[str, Callable[..., Any]] = {
    "is_available": _always(value=True),
    "device_count": _always(1),
    "current_device": _always(0),
    "set_device": _always(None),
    "_exchange_device": _always(0),
    "_maybe_exchange_device": _always(0),
    "synchronize": _always(None),
    "get_device_properties": _always(_H100),
    "get_device_capability": _always((_H100.major, _H100.minor)),
    "is_bf16_supported": _always(value=True),
    "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
    "set_rng_state": _always(None),
    "_lazy_init": _always(None),
}


class _Interface(device_interface.DeviceInterface):
    """The device, as Inductor asks for it."""

    class Worker:
        """The same, in its processes."""

        get_device_properties = staticmethod(_always(_H100))
        current_device = staticmethod(_always(0))

    Event, Stream = torch.Event, torch.Stream
    is_available = staticmethod(_always(value=True))
    device_count = staticmethod(_always(1))
    current_device = staticmethod(_always(0))
    exchange_device = maybe_exchange_device = staticmethod(_always(0))
    set_device = synchronize = staticmethod(_always(None))
    get_raw_stream = staticmethod(_always(0))
    get_compute_capability = staticmethod(_always(10 * _H100.major + _H100.minor))
    is_bf16_supported = is_triton_capable = staticmethod(_always(value=True))
    raise_if_triton_unavailable = staticmethod(_always(None))


class Driver:
    """The device, as Triton asks for it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * _H100.major + _H100.minor, _H100.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return _DEVICE


class _OnTheHost(TorchDispatchMode):
    """Makes tensors that are folded into constants on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: torch.device("cpu") if value == _DEVICE else value for name, value in (kwargs or {}).items()})


@contextmanager
def compiled_for_cuda() -> Iterator[None]:
    """Inside, steps that are captured on the CPU are compiled for CUDA."""
    compile_joint = halves.aot_compile_joint_with_descriptors

    def compile_moved(joint: JointWithDescriptors, **options: Any) -> object:
        with _device():
            return compile_joint(_moved(joint), **options)

    with ExitStack() as stack:
        stack.enter_context(capture_attention_as_on_cuda())
        stack.enter_context(patch.object(halves, "aot_compile_joint_with_descriptors", compile_moved))
        for name in ("compile_fx_forward", "compile_fx_backward"):
            stack.enter_context(patch.object(halves, name, _given_moved(getattr(halves, name))))
        # What measures on the device is decided: matrices are padded where they can be.
        stack.enter_context(config.patch(fx_graph_cache=False, force_shape_pad=True, compile_threads=1))
        yield


def _given_moved(compile_half: Callable[..., Any]) -> Callable[..., Any]:
    def compile_it(gm: fx.GraphModule, inputs: Sequence[object], *options: object) -> object:
        return compile_half(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")], *options)

    return compile_it


@contextmanager
def _device() -> Iterator[None]:
    """Inside, there is a device, as far as a compiler can tell."""
    from triton.runtime import driver

    _guard()
    fold = UniformValueConstantFolder.run

    def fold_on_the_host(self: UniformValueConstantFolder) -> object:
        with _OnTheHost():
            return fold(self)

    device_interface.get_interface_for_device("cpu")  # registers all that there are
    interfaces = {**device_interface.device_interfaces, "cuda": _Interface, "cuda:0": _Interface}
    driver.set_active(Driver())
    with ExitStack() as stack:
        for name, function in _CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", _always(0), create=True))
        stack.enter_context(patch.object(device_interface, "device_interfaces", interfaces))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", _always(None)))
        stack.enter_context(patch.object(UniformValueConstantFolder, "run", fold_on_the_host))
        for compiled in ("triton", "multi_kernel"):
            stack.enter_context(patch.object(AsyncCompile, compiled, lambda *_, **__: SimpleNamespace(run=None)))
        _triton.has_triton.cache_clear()
        yield


def _guard() -> None:
    """Let fake tensors be on a device that is not there: a build for the CPU has nothing that would switch to it."""
    if torch.cuda._is_compiled():
        torch._C._ensureCUDADeviceGuardSet()
        return
    source = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
extern "C" void set_guard() {
  auto& guard = impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
  if (!guard.load()) guard.store(new impl::NoOpDeviceGuardImpl<DeviceType::CUDA>());
}
"""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/guard.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", "-o", library, f"-I{root}/include", f"-L{root}/lib"]
        subprocess.run([*command, "-lc10"], input=source, text=True, check=True)
        ctypes.CDLL(library).set_guard()


def _moved(joint: JointWithDescriptors) -> JointWithDescriptors:
    """`joint` with all its fake tensors on the device."""
    module = joint.graph_module
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))

    def device(given: object) -> object:
        return _DEVICE if isinstance(given, torch.device) else given

    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = pytree.tree_map(device, (node.args, node.kwargs))
    with mode, torch.no_grad():
        moved = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=_DEVICE, requires_grad=v.requires_grad)
            if isinstance(v, FakeTensor)
            else v
            for v in values
        ]
    with torch.no_grad():
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*moved)
    return joint

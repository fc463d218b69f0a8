"""Private names of Inductor's compiler for C++, which takes a second to import."""

import ctypes
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

from torch._inductor import codecache
from torch._inductor.codecache import CppCodeCache  # compiles, and keeps what it has compiled on disk
from torch._inductor.cpu_vec_isa import invalid_vec_isa
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler  # raised if the source or the compiler fails
from torch.utils.cpp_extension import library_paths

# Without this, CppCodeCache tests the vector instructions of the machine in each process, in subprocesses that import torch.
_HAS_NEEDS_VEC_ISA = "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters
_NO_VECTORS = {"needs_vec_isa": False} if _HAS_NEEDS_VEC_ISA else {}


@contextmanager
def _skip_vector_instructions() -> Iterator[None]:
    """Let older releases of PyTorch, which have no such argument, skip the tests too."""
    pick = codecache.pick_vec_isa
    codecache.pick_vec_isa = lambda: invalid_vec_isa
    try:
        yield
    finally:
        codecache.pick_vec_isa = pick


def load_cpp(
    source: str,
    prefix: str,
    functions: Mapping[str, tuple[Any, list[Any]]],
    libraries: Sequence[str] = (),
    *,
    on_compile: Callable[[], None] = lambda: None,
) -> ctypes.CDLL:
    """Return the library of C++ `source`, which may call Python, PyTorch's core (c10) and others of its `libraries`.

    Args:
        source: the code.
        prefix: the prefix of the names of its functions.
        functions: types of their results and arguments, by their names without the prefix.
        libraries: names without ``lib``.
        on_compile: is called before the library is compiled, if there is none on disk.
    """

    def announce_compile(_compile: Callable[[], None]) -> Future[None]:
        on_compile()
        ready: Future[None] = Future()
        ready.set_result(None)
        return ready

    names = ("c10", *libraries)
    linked = (*(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in names))
    with nullcontext() if _HAS_NEEDS_VEC_ISA else _skip_vector_instructions():
        library = CppCodeCache.load(
            source, extra_flags=("-Wl,--no-as-needed", *linked), submit_fn=announce_compile, **_NO_VECTORS
        )
    assert isinstance(library, ctypes.CDLL)
    for name, (returned, given) in functions.items():
        function = getattr(library, f"{prefix}_{name}")
        function.restype, function.argtypes = returned, given
    return library


__all__ = ["CppCompileError", "InvalidCxxCompiler", "load_cpp"]

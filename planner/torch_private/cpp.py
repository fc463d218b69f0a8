"""Private names of Inductor's compiler for C++, which takes a second to import."""

import ctypes

from torch._inductor.codecache import CppCodeCache  # compiles, and keeps what it has compiled on disk
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler  # raised if the source or the compiler fails
from torch.utils.cpp_extension import library_paths


def load_cpp(source: str, *libraries: str) -> ctypes.CDLL:
    """Return the library of C++ `source`, which may call PyTorch's core (c10) and others of its `libraries`."""
    names = ("c10", *libraries)
    flags = (*(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in names))
    library = CppCodeCache.load(source, extra_flags=("-Wl,--no-as-needed", *flags))
    assert isinstance(library, ctypes.CDLL)
    return library


__all__ = ["CppCompileError", "InvalidCxxCompiler", "load_cpp"]

"""Private names of Inductor's compiler for C++, which takes a second to import."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor.codecache import CppCodeCache  # compiles, and keeps what it has compiled on disk
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler  # raised if the source or the compiler fails
from torch.utils.cpp_extension import library_paths


def load_cpp(
    source: str, prefix: str, functions: Mapping[str, tuple[Any, list[Any]]], libraries: Sequence[str] = ()
) -> ctypes.CDLL:
    """Return the library of C++ `source`, which may call PyTorch's core (c10) and others of its `libraries`.

    Args:
        source: the code.
        prefix: what the names of its functions begin with.
        functions: types of what they return and take, by the rest of their names.
        libraries: names without ``lib``.
    """
    names = ("c10", *libraries)
    flags = (*(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in names))
    library = CppCodeCache.load(source, extra_flags=("-Wl,--no-as-needed", *flags))
    assert isinstance(library, ctypes.CDLL)
    for name, (returned, given) in functions.items():
        function = getattr(library, f"{prefix}_{name}")
        function.restype, function.argtypes = returned, given
    return library


__all__ = ["CppCompileError", "InvalidCxxCompiler", "load_cpp"]

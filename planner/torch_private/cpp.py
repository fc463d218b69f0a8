"""Private names of Inductor's builder of C++ libraries, which takes a second to import."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir, write  # what is compiled is kept on disk, in Inductor's cache
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler  # raised if the source or the compiler fails
from torch.utils._filelock import FileLock
from torch.utils.cpp_extension import library_paths


def load_cpp(
    source: str, prefix: str, functions: Mapping[str, tuple[Any, list[Any]]], libraries: Sequence[str] = ()
) -> ctypes.CDLL:
    """Return the library of C++ `source`, which may call PyTorch's core (c10) and others of its `libraries`.

    Inductor's own ``CppCodeCache`` first looks for vector instructions, which takes six times as long as to compile the source.

    Args:
        source: the code.
        prefix: what the names of its functions begin with.
        functions: types of what they return and take, by the rest of their names.
        libraries: names without ``lib``.
    """
    names = ("c10", *libraries)
    flags = ("-Wl,--no-as-needed", *(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in names))
    options = CppTorchOptions(extra_flags=flags)
    name, path = write(source, "cpp", extra=CppBuilder("o", "i", options).get_command_line())
    builder = CppBuilder(name, path, options, str(Path(path).parent))
    compiled = Path(builder.get_target_file_path())
    with FileLock(str(Path(get_lock_dir(), f"{name}.lock")), timeout=LOCK_TIMEOUT):
        if not compiled.exists():
            builder.build()
    library = ctypes.CDLL(str(compiled))
    for rest, (returned, given) in functions.items():
        function = getattr(library, f"{prefix}_{rest}")
        function.restype, function.argtypes = returned, given
    return library


__all__ = ["CppCompileError", "InvalidCxxCompiler", "load_cpp"]

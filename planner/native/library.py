"""The C++ library of planned steps: compiled once on a machine, for each release of PyTorch and Python, and kept on disk.

Nothing waits for it. It is compiled by a process of its own with low priority, and the passes in Python run until it is there. A
process that shares its memory limit with the compiler must not die for it: the system is told to end the compiler first.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from graphs.errors import PlannerError, first_line

_LOGGER = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("passes.cpp")
_FIRST_TO_DIE = 1000  # of oom_score_adj
_NICENESS = 10


class Library:
    """The functions of the library; ``passes.cpp`` describes them.

    Attributes:
        accepts: returns True if an instruction can call its operator.
        new_program: returns a program from its description.
        run: runs a program on a tuple, and sets the position of the instruction at which it is.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at `path`."""
        functions, value = ctypes.PyDLL(str(path)), ctypes.py_object
        self.accepts = _declare(functions.passes_accepts, value, value)
        self.new_program = _declare(functions.passes_new, value, value)
        self.run = _declare(functions.passes_run, value, value, value, ctypes.POINTER(ctypes.c_int64))


class _Loader:
    """The state of the library in this process.

    Attributes:
        library: the library; None until it is loaded.
        problem: the reason why it cannot be; None if there is none.
        used: False while passes run in Python although it is there.
    """

    def __init__(self) -> None:
        self.library: Library | None = None
        self.problem: str | None = None
        self.used = True
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Load the library, or start to compile it; do nothing if that was done before."""
        with self._lock:
            if self._thread is None and self.library is None and self.problem is None:
                if (path := library_path()).exists():
                    self._load(path)
                else:
                    self._thread = threading.Thread(target=self._compile, args=(path,), name="native library", daemon=True)
                    self._thread.start()

    def wait(self) -> None:
        """Wait until the library is loaded, or cannot be."""
        self.start()
        if self._thread is not None:
            self._thread.join()

    def _compile(self, path: Path) -> None:
        command = [sys.executable, "-m", "planner.native.library", str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            printed = (getattr(error, "stderr", None) or str(error)).strip()
            self._fail(printed.splitlines()[-1] if printed else str(error))
        else:
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            self.library = Library(path)
        except (OSError, AttributeError) as error:
            self._fail(first_line(error))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        _LOGGER.info("planned steps run their passes in Python, because the C++ library cannot be compiled: %s", problem)


_LOADER = _Loader()


def find_library() -> Library | None:
    """Return the library if it is loaded; start to load it otherwise."""
    if not _LOADER.used:
        return None
    if _LOADER.library is None:
        _LOADER.start()
    return _LOADER.library


def wait_for_library() -> Library:
    """Return the library, after compiling it if necessary.

    Raises:
        PlannerError: it cannot be compiled or loaded.
    """
    _LOADER.wait()
    if _LOADER.library is None:
        raise PlannerError(f"the C++ library of planned steps cannot be compiled: {_LOADER.problem}; install a compiler (g++)")
    return _LOADER.library


def describe_library() -> str:
    """Return a line on the state of the library on this machine, without compiling it."""
    path = library_path()
    return f"compiled, {path}" if path.exists() else "not compiled yet: the first plan does so in the background"


@contextmanager
def use_python_passes() -> Iterator[None]:
    """Let passes that are compiled inside the context run in Python, to compare both."""
    before, _LOADER.used = _LOADER.used, False
    try:
        yield
    finally:
        _LOADER.used = before


def library_path() -> Path:
    """Return the file of the library, in the user's cache folder, or in one for temporary files if there is none."""
    made_of = (_SOURCE.read_text(encoding="utf-8"), torch.__version__, sys.version, sysconfig.get_platform())
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return folder / "remat-planner" / f"native-{name}.so"


def compile_library(path: Path) -> None:
    """Compile the library to `path`; if another process does so, wait for it.

    Raises:
        CppCompileError, InvalidCxxCompiler: it cannot be compiled.
    """
    from planner.torch_private.cpp import load_cpp  # takes a second

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            source = _SOURCE.read_text(encoding="utf-8")
            compiled = Path(load_cpp(source, "passes", {}, ("torch_cpu", "torch", "torch_python"))._name)
            own = path.with_suffix(f".{os.getpid()}")
            own.write_bytes(compiled.read_bytes())
            own.replace(path)


def _declare(function: Any, returned: Any, *given: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = returned, given
    called: Callable[..., Any] = function
    return called


def _main() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)
    with suppress(OSError):  # another system than Linux
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_DIE))
    compile_library(Path(sys.argv[1]))


if __name__ == "__main__":
    _main()

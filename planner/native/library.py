"""The C++ library: compiled once on a machine, for each release of PyTorch and Python, and kept on disk.

It has the passes and the nodes of planned steps, what undoes them, the ops, the records and the ledger of the eager runtime, and
the CPU allocator of arenas. It is compiled by a process of its own with low priority. Passes run in Python until it is there;
arenas and the eager runtime wait for it. A process that shares its memory limit with the compiler must not die for it: the system
is told to end the compiler first.

Inductor's code cache was used before. It compiles one file each, for the present machine only, which is wrong in a home folder
that machines share, and takes two seconds to import.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from planner.graphs.errors import PlannerError, first_line

_LOGGER = logging.getLogger(__name__)
_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_COMPILER = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
# No vectors of the present machine: others may share the folder. Warnings are errors in the tests: another compiler has others.
# Products and sums are rounded one by one, as in Python.
# pybind11 looks up its own state at each lock of the interpreter, unless it is told that Python's is enough.
_FLAGS = (
    *("-std=c++20", "-O2", "-ffp-contract=off", "-DNDEBUG", "-fPIC", "-shared", "-Wall", "-Wextra"),
    *("-DPYBIND11_SIMPLE_GIL_MANAGEMENT", "-DAT_PER_OPERATOR_HEADERS"),
)
_LINKED = ("c10", "torch_cpu", "torch", "torch_python")
_SHOWN_ERRORS = 3  # the others mostly follow from the first
_FIRST_TO_DIE = 1000  # of oom_score_adj
_NICENESS = 10


class Library:
    """The functions of the library; its C++ files describe them.

    Attributes:
        unlocked: all functions, which are called without Python's interpreter lock.
        accepts: returns True if an instruction can call its operator.
        new_program: returns a program from its description.
        run: runs a program on a tuple, and sets the position of the instruction at which it is.
        run_step: runs the forward pass of a step, and returns its results, with a node for the backward pass.
        copy_all: copies a list of tensors to another one.
        list_versions: returns the versions of a list of tensors.
        new_stored_values: returns a state of objects, names and some tensors among them; `any` stands for values that do not
            matter.
        find_unchanged: returns the list of these tensors if all is as in a state, else None.
        ledger: the type of ledgers, with the methods of ``planner.solvers.online.ledger.Ledger`` that the eager runtime calls.
        memory, recomputation, sources: the types that ``planner.train.eager.storages`` describes.
        step_log: the type that ``planner.train.eager.step_log`` describes.
    """

    def __init__(self, path: Path) -> None:
        """Load the library at `path`."""
        self.unlocked = ctypes.CDLL(str(path))
        functions, value = ctypes.PyDLL(str(path)), ctypes.py_object
        _declare(functions.passes_register, value)()
        self.accepts = _declare(functions.passes_accepts, value, value)
        self.new_program = _declare(functions.passes_new, value, value)
        self.run = _declare(functions.passes_run, value, value, value, ctypes.POINTER(ctypes.c_int64))
        self.run_step = _declare(functions.step_node_run, value, value, value)
        self.copy_all = _declare(functions.undo_copy, value, value, value)
        self.list_versions = _declare(functions.undo_list_versions, value, value)
        self.new_stored_values = _declare(functions.stored_values_new, value, value, value, value, value)
        self.find_unchanged = _declare(functions.stored_values_find_unchanged, value, value)
        self.ledger = _declare(functions.ledger_type_of_library, value)()
        self.memory, self.recomputation, self.sources, self.step_log = _declare(functions.eager_types, value)()

    def declare(self, prefix: str, functions: Mapping[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
        """Return all functions, after declaring the results and arguments of some, by their names without `prefix`."""
        for name, (returned, given) in functions.items():
            _declare(getattr(self.unlocked, f"{prefix}_{name}"), returned, *given)
        return self.unlocked


class _Loader:
    """The state of the library in this process.

    Attributes:
        library: the library; None until it is loaded.
        problem: the reason why it cannot be; None if there is none.
    """

    def __init__(self) -> None:
        self.library: Library | None = None
        self.problem: str | None = None
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
            self._fail(_find_errors(getattr(error, "stderr", None) or str(error)))
        else:
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            self.library = Library(path)
        except (OSError, AttributeError, RuntimeError) as error:
            self._fail(first_line(error))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        _LOGGER.info("planned steps run their passes in Python, because the C++ library cannot be compiled: %s", problem)


_LOADER = _Loader()


def find_library() -> Library | None:
    """Return the library if it is loaded; start to load it otherwise."""
    if _LOADER.library is None:
        _LOADER.start()
    return _LOADER.library


def is_being_compiled() -> bool:
    """Return True if the library is not loaded yet and may still be."""
    return find_library() is None and _LOADER.problem is None


def wait_for_library() -> Library:
    """Return the library, after compiling it if necessary.

    Raises:
        PlannerError: it cannot be compiled or loaded.
    """
    _LOADER.wait()
    if _LOADER.library is None:
        raise PlannerError(f"the C++ library cannot be compiled: {_LOADER.problem}; install a compiler (g++)")
    return _LOADER.library


def describe_library() -> str:
    """Return a line on the state of the library on this machine, without compiling it."""
    path = library_path()
    if path.exists():
        return f"compiled, {path}"
    if shutil.which(_COMPILER) is None:
        return f"there is no C++ compiler, {_COMPILER}: plans run in Python, arena=True and planner.rematerialize are refused"
    return "not compiled yet: the first plan does so in the background, planner.rematerialize and arena=True wait for it"


def library_path() -> Path:
    """Return the file of the library, in the user's cache folder, or in one for temporary files if there is none."""
    sources = (source.read_text(encoding="utf-8") for source in (*_SOURCES, *_HEADERS))
    made_of = (*sources, *_FLAGS, torch.__version__, sys.version, sysconfig.get_platform())
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK):
        folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return folder / "remat-planner" / f"native-{name}.so"


def compile_library(path: Path, *flags: str) -> None:
    """Compile the library to `path`, with more `flags`; if another process does so, wait for it.

    Raises:
        OSError: there is no compiler.
        CalledProcessError: it fails.
    """
    from torch.utils.cpp_extension import include_paths, library_paths  # takes a second

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        own = path.with_suffix(f".{os.getpid()}")
        headers = (f"-isystem{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"]))
        linked = (*(f"-L{folder}" for folder in library_paths()), "-Wl,--no-as-needed", *(f"-l{name}" for name in _LINKED))
        # All files as one: PyTorch's headers take ten times as long as a file of ours.
        together = "".join(f'#include "{source}"\n' for source in _SOURCES)
        command = [_COMPILER, *_FLAGS, *flags, *headers, "-x", "c++", "-", "-o", str(own), *linked]
        subprocess.run(command, check=True, input=together, text=True)
        own.replace(path)


def _find_errors(printed: str) -> str:
    """Return the first errors of the compiler in what it printed; the last line if there are none."""
    lines = printed.strip().splitlines()
    return "\n".join([line for line in lines if " error: " in line][:_SHOWN_ERRORS] or lines[-1:])


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

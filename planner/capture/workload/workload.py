"""Training steps named in one line: ``zoo:gpt2,layers=4`` or ``my_model.py:build,batch=8``."""

import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from planner.capture.workload.models import Workload, build, describe_options, get_factory
from planner.graphs.errors import ModelError, UnknownOptionError, UsageError, typed_line

ZOO_SOURCE = "zoo"
_SPEC = re.compile(r"(?P<source>.+?):(?P<function>[A-Za-z_]\w*)(?P<options>,.*)?", re.DOTALL)
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# Types of options: the function that reads a text, and the words for what it reads.
_READERS: Mapping[object, tuple[Callable[[str], object], str]] = {
    bool: (lambda text: _BOOLEANS[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    tuple[int, ...]: (lambda text: tuple(map(int, text.split(","))), "whole numbers separated by commas"),
    str: (str, "text"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A function that returns a workload, with its options.

    Attributes:
        source: ``zoo``, or the path of a Python file.
        function: its name in the source.
        options: names and values as text; the function's parameters have their types.
    """

    source: str
    function: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return ",".join((f"{self.source}:{self.function}", *(f"{name}={value}" for name, value in self.options)))


def parse_spec(text: str) -> ModelSpec:
    """Parse ``zoo:NAME[,option=value...]`` or ``path/to/file.py:function[,option=value...]``.

    A value may hold commas: a part without ``=`` belongs to the value before it.

    Raises:
        ModelError: the text has neither form, or an option without a name, or one given twice.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        traced = "; planner info, solve, curve and compare take a graph" if text.endswith(".json") else ""
        raise ModelError(
            f"model {text!r} names no function: write zoo:NAME or path/to/file.py:function, options after commas "
            f"(zoo:gpt2,layers=4){traced}"
        )
    options: dict[str, str] = {}
    last = ""
    for part in match["options"].split(",")[1:] if match["options"] else ():
        name, equals, value = part.partition("=")
        if not equals and last:
            options[last] += f",{part}"
        elif equals and name.strip().isidentifier():
            last = name.strip()
            if last in options:
                raise ModelError(f"model {text!r} gives the option {last!r} twice")
            options[last] = value.strip()
        else:
            raise ModelError(f"model {text!r} has the option {part!r}: write name=value")
    return ModelSpec(match["source"], match["function"], tuple(options.items()))


def load(spec: ModelSpec, *, device: str = "cpu", seed: int = 0, fake: bool = False, as_on_cuda: bool = False) -> Workload:
    """Call the function that `spec` names. Imports torch, and for a file all that the file imports.

    Args:
        device: the device of model and batch, ``cpu`` or ``cuda``.
        seed: seed of torch's generators, so that weights and batch are the same every time.
        fake: build fake tensors, on the CPU: shapes without memory.
        as_on_cuda: with `fake`, run code that names CUDA devices as on a machine that has one
            (``planner.capture.workload.fake_build``).

    Raises:
        ModelError: no such device, file or function; an error inside the function; a return value that is not
            ``(model, loss_fn, batch)``.
        UsageError: an option that is unknown, missing or of the wrong type; no such model of the zoo.
    """
    path = find_file(spec)
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("there is no CUDA device on this machine: use --device cpu, or plan for one with --roofline")
    torch.manual_seed(seed)
    with ExitStack() as stack:
        if fake:
            from planner.capture.workload.fake_build import build_on_fakes

            stack.enter_context(build_on_fakes(as_on_cuda=as_on_cuda))
        if path is None:
            workload = build(spec.function, **parse_options(get_factory(spec.function), spec, spec.function))
        else:
            with _add_to_path(path):
                workload = _call_function(path, spec)
        return workload if fake else _move_to_device(workload, device)


def find_file(spec: ModelSpec) -> Path | None:
    """Return the file that `spec` names, None for the zoo; raise a ModelError if there is no such file. Never imports torch."""
    if spec.source == ZOO_SOURCE:
        return None
    path = Path(spec.source)
    if not path.is_file():
        raise ModelError(
            f"{path} is {'a folder' if path.is_dir() else 'not there'}: name a Python file, path/to/file.py:function"
        )
    return path


def _call_function(path: Path, spec: ModelSpec) -> Workload:
    module = _import_file(path)
    function = getattr(module, spec.function, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if _is_own_function(value, module)]
        choice = f"its functions are {', '.join(functions)}" if functions else "it defines no function"
        raise ModelError(f"{path} has no function {spec.function!r}: {choice}")
    options = parse_options(function, spec, f"{spec.function} of {spec.source}")
    try:
        returned = function(**options)
    except Exception as error:
        raise ModelError(f"{spec.function} of {path} failed: {_add_line(error, path)}") from error
    return _check_returned(returned, f"{spec.function} of {path}")


@contextmanager
def _add_to_path(path: Path) -> Iterator[None]:
    """Put the folder of `path` on sys.path: first inside the context, as for a script, then last, for later processes."""
    folder = str(path.resolve().parent)
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # for imports when the model runs


def _import_file(path: Path) -> ModuleType:
    # A unique name: the user's file may be named like a package.
    name = f"_planner_model_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    file_spec = importlib.util.spec_from_file_location(name, path)
    if file_spec is None or file_spec.loader is None:
        raise ModelError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(file_spec)
    sys.modules[name] = module
    try:
        file_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelError(f"{path} cannot be imported: {_add_line(error, path)}") from error
    return module


def parse_options(function: Callable[..., object], spec: ModelSpec, what: str) -> dict[str, object]:
    """Return the options of `spec` with the types of the function's parameters; messages call the function `what`."""
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, ValueError):
        # Annotations that cannot be evaluated are ignored; defaults may have types.
        parameters, hints = inspect.signature(function).parameters, {}
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options: dict[str, object] = {}
    for name, text in spec.options:
        if name not in named and not takes_any:
            raise UnknownOptionError(what, name, describe_options(named))
        options[name] = _read(text, _get_option_type(named.get(name), hints.get(name)), f"option {name!r} of {what}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in options]
    if missing:
        raise UsageError(f"{what} needs a value for {', '.join(missing)}: {spec.source}:{spec.function},{missing[0]}=...")
    return options


def _get_option_type(parameter: inspect.Parameter | None, hint: object) -> object:
    """Return the type of a parameter: its annotation, or the type of its default, or None if it has neither."""
    if hint is not None:
        return hint
    if parameter is None or parameter.default is parameter.empty or parameter.default is None:
        return None
    return type(parameter.default)


def _read(text: str, wanted: object, what: str) -> object:
    """Return `text` as a value of the type `wanted`; of a union, the first member that accepts it."""
    members = (
        typing.get_args(wanted) if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) is typing.Union else (wanted,)
    )
    if type(None) in members and text.lower() == "none":
        return None
    candidates = [member for member in _READERS if member in members]
    if wanted is None or wanted is Any:
        candidates = [int, float, bool, str] if text not in ("0", "1") else [int]
    if not candidates:
        name = getattr(wanted, "__name__", wanted)
        raise UsageError(
            f"{what} is of type {name}: only int, float, bool and str, and tuple[int, ...], can be given on the command line"
        )
    for member in candidates:
        try:
            return _READERS[member][0](text)
        except (KeyError, ValueError):
            continue
    raise UsageError(f"{what} is {text!r}: must be {' or '.join(_READERS[member][1] for member in candidates)}")


def _check_returned(returned: object, what: str) -> Workload:
    from torch import nn

    if not isinstance(returned, tuple | list) or len(returned) != 3:
        count = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise ModelError(f"{what} returned a {type(returned).__name__}{count}: must return (model, loss_fn, batch)")
    model, loss_fn, batch = returned
    if not isinstance(model, nn.Module):
        raise ModelError(f"{what} returned a {type(model).__name__} as the model: must be a torch.nn.Module")
    if loss_fn is not None and not callable(loss_fn):
        raise ModelError(f"{what} returned a {type(loss_fn).__name__} as the loss function: must be callable, or None")
    if isinstance(batch, Mapping):
        return Workload(model, loss_fn, dict(batch))
    if not isinstance(batch, tuple | list):
        raise ModelError(
            f"{what} returned a {type(batch).__name__} as the batch: must be a tuple, such as (inputs, targets), or a dict"
        )
    return Workload(model, loss_fn, tuple(batch))


def _move_to_device(workload: Workload, device: str) -> Workload:
    import torch

    from planner.torch_private.core import pytree

    batch = pytree.tree_map_only(torch.Tensor, methodcaller("to", device), workload.batch)
    return workload._replace(model=workload.model.to(device), batch=batch)


def _is_own_function(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def _add_line(error: BaseException, path: Path) -> str:
    """Return the error in one line, with the last line of the user's file that led to it."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    line = _find_last_line(error.__traceback__, path)
    return typed_line(error) + ("" if line is None else f" ({path}, line {line})")


def _find_last_line(traceback: TracebackType | None, path: Path) -> int | None:
    line = None
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename).resolve() == path.resolve():
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line

"""Private names of FX: generation of a graph's source, and its storage for tracebacks."""

import linecache
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen as _CodeGen, PythonCode
from torch.fx.graph_module import _loader


class CodeGen(_CodeGen):
    """Base class of code generators for graphs."""

    @abstractmethod
    def write_source(self, nodes: Iterable[fx.Node]) -> tuple[str, dict[str, Any]]:
        """Return the source of a function ``forward``, and its globals."""

    def _gen_python_code(self, nodes: Any, *_: Any, **__: Any) -> PythonCode:
        return PythonCode(*self.write_source(nodes), {})


def build_module(graph: fx.Graph, codegen: CodeGen, title: str) -> fx.GraphModule:
    """Return a module that runs `graph` with the code of `codegen`.

    Tracebacks show its lines as long as its function exists, in a file with a unique number and `title` in its name. Objects that
    the function holds die with it: classes and graphs form reference cycles that wait for garbage collection, so neither holds
    the function.
    """
    graph.set_codegen(codegen)
    graph._co_fields = {"co_filename": title, "co_firstlineno": 1, "co_name": "forward"}
    module = fx.GraphModule(torch.nn.Module(), graph)
    function = type(module).forward
    del type(module).forward
    module.forward = function
    graph.owning_module = None
    weakref.finalize(function, _forget, function.__code__.co_filename)
    return module


def _forget(file: str) -> None:
    _loader.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)

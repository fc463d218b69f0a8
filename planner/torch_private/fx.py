"""Private names of FX: how a graph is written as source, and where that source is kept for tracebacks."""

import linecache
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen as _CodeGen
from torch.fx.graph import PythonCode
from torch.fx.graph_module import _loader


class CodeGen(_CodeGen):
    """How a graph is written."""

    @abstractmethod
    def source(self, nodes: Iterable[fx.Node]) -> tuple[str, dict[str, Any]]:
        """Return the source of a function ``forward``, and its globals."""

    def _gen_python_code(self, nodes: Any, *_: Any, **__: Any) -> PythonCode:
        return PythonCode(*self.source(nodes), {})


def module_of(graph: fx.Graph, codegen: CodeGen, title: str) -> fx.GraphModule:
    """Return what runs `graph` as `codegen` writes it.

    Tracebacks show its lines for as long as it is there, in a file whose name has a number that no other has, and `title`.
    """
    graph.set_codegen(codegen)
    graph._co_fields = {"co_filename": title, "co_firstlineno": 1, "co_name": "forward"}
    module = fx.GraphModule(torch.nn.Module(), graph)
    weakref.finalize(module, _forget, module.forward.__code__.co_filename)
    return module


def _forget(file: str) -> None:
    _loader.eval_cache.pop(file, None)
    linecache.cache.pop(file, None)

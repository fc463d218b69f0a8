"""Which module may import what, beyond what import-linter checks in ``make lint``."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.structure import FLOORS, find_functions_without_verb, import_cycles, read

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def private_names(source: str) -> list[str]:
    """The private names of torch in `source`: those with a part that begins with one underscore, but for names of operators.

    Attributes count where they are read from what an import of torch gave, a module or a class; not those of other objects,
    whose types are not known here.
    """
    nodes = list(ast.walk(ast.parse(source)))
    imported: dict[str, str] = {}  # names in the module: what they are in torch
    for node in nodes:
        if isinstance(node, ast.Import):
            of_torch = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            imported |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in of_torch}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for node in nodes if isinstance(node, ast.Import) for name in (alias.name for alias in node.names)}
    found = {name for name in found if name.split(".")[0] == "torch"} | set(imported.values())
    for node in nodes:
        owner, *attributes = _dotted(node) if isinstance(node, ast.Attribute) else [""]
        if attributes and owner in imported:
            found.add(".".join((imported[owner], *attributes)))
    return sorted(name for name in found if re.search(r"\._(?!_)", name) and not name.startswith("torch.ops.aten."))


def _dotted(node: ast.AST) -> list[str]:
    """The parts of an expression such as ``torch.nn.functional``; none that are known of others."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [""]


def find_in_sources(rule: Callable[[str], list[str]], apart_from: Path | None = None) -> dict[str, list[str]]:
    """Return what `rule` finds in each source and script outside the folder `apart_from`; files without findings are left out."""
    found = {path: rule(path.read_text()) for path in (*SOURCES, *SCRIPTS) if path.parent != apart_from}
    return {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


def test_private_names_of_torch_are_imported_in_one_place() -> None:
    assert find_in_sources(private_names, apart_from=ROOT / "planner" / "torch_private") == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("def f():\n    import torch._dynamo.config as c", ["torch._dynamo.config"]),
        ("from torch._guards import tracing", ["torch._guards.tracing"]),
        ("from torch.utils import _pytree as pytree\npytree.tree_map", ["torch.utils._pytree", "torch.utils._pytree.tree_map"]),
        ("import torch\ntorch._C._get_tracing_state()", ["torch._C", "torch._C._get_tracing_state"]),
        ("import torch\nfrom torch import fx\nfx.node._legal_ops", ["torch.fx.node._legal_ops"]),
        ("import torch\ntorch.__version__, torch.compiler.reset, torch.ops.aten._to_copy, x._base", []),
    ],
)
def test_the_check_for_private_names_finds_them(source: str, found: list[str]) -> None:
    assert private_names(source) == found


def long_bodies(source: str) -> list[str]:
    """Return the functions in `source` whose statements, without the docstring, take more than 60 lines."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = ((f.name, f.body[ast.get_docstring(f) is not None :]) for f in functions)
    return [name for name, body in bodies if body and (body[-1].end_lineno or 0) - body[0].lineno >= 60]


def test_functions_fit_on_a_screen() -> None:
    assert find_in_sources(long_bodies) == {}


def test_the_check_for_long_functions_finds_them() -> None:
    short = 'def short():\n    """Docstring\n' + "\n" * 70 + '    """\n    return 1\n'
    long = "def long():\n" + "    x = 1\n" * 61
    assert long_bodies(short + long) == ["long"]


def test_names_of_functions_begin_with_a_verb() -> None:
    found = [find_functions_without_verb(module) for floor in FLOORS for module in read(ROOT, floor)]
    without, count = [name for names, _ in found for name in names], sum(count for _, count in found)
    assert len(without) < 0.1 * count, sorted(without)


def test_imports_have_no_cycles() -> None:
    assert import_cycles([module for floor in FLOORS for module in read(ROOT, floor)]) == []

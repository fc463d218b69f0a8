"""The calls that ``docs/figures/draw.py`` draws: each is in the sources, and happens in a run."""

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.graphs.io.formats import write_graph
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from tests.support.cli import call

ROOT = Path(__file__).parents[1]
FLOORS = ("graphs", "solvers", "planner")
Arrow = tuple[str, str, str]  # the caller's module, the called one, and a function there


def _load_figures() -> ModuleType:
    spec = spec_from_file_location("docs_figures_draw", ROOT / "docs" / "figures" / "draw.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and named tuples look for their annotations
    spec.loader.exec_module(module)
    return module


FIGURES = _load_figures()
WALKS = {"solve": FIGURES.SOLVE_WALK, "compile": FIGURES.COMPILE_WALK}


def with_callers(calls: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each call that has a caller, with the caller's module."""
    above: list[str] = []
    for each in calls:
        assert each.depth <= len(above)
        del above[each.depth :]
        if above:
            yield above[-1], each
        above.append(each.module)


def arrows(calls: Sequence[Any]) -> list[Arrow]:
    return [(caller, each.module, name) for caller, each in with_callers(calls) for name in each.functions]


def source(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def imports(module: str) -> set[str]:
    """Return the modules that `module` imports, or names in a string to import them when it runs; none for types alone."""
    tree, found = source(module), set[str]()
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def called_names(module: str) -> set[str]:
    """Return the last parts of the names of all functions that `module` calls."""
    functions = [node.func for node in ast.walk(source(module)) if isinstance(node, ast.Call)]
    return {ast.unparse(function).rsplit(".", 1)[-1] for function in functions}


def defined_names(module: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(source(module)) if isinstance(node, kinds)}


def faults(calls: Sequence[Any]) -> list[str]:
    """Return the calls that are not in the sources."""
    found = []
    for caller, each in with_callers(calls):
        importer = each.passed_by or caller
        if each.module not in imports(importer):
            found.append(f"{importer} does not import {each.module}")
        for name in each.functions:
            if name not in defined_names(each.module):
                found.append(f"{each.module} has no {name}")
            is_dynamic = each.passed_by or caller == "planner.solvers.registry"  # the caller knows the function by another name
            if not is_dynamic and name not in called_names(caller):
                found.append(f"{caller} does not call {name}")
    return found


@pytest.mark.parametrize("name", WALKS)
def test_drawn_calls_are_in_the_sources(name: str) -> None:
    assert len(WALKS[name]) > 10
    assert faults(WALKS[name]) == []


@pytest.mark.parametrize(
    ("caller", "called", "fault"),
    [
        (
            "planner.measure.profile",
            ("planner.plans.search", "find_first_plan"),
            "planner.measure.profile does not import planner.plans.search",
        ),
        ("planner.plans.search", ("planner.plans.solve", "solve"), "planner.plans.search does not call solve"),
        ("planner.plans.search", ("planner.plans.solve", "solve_all"), "planner.plans.solve has no solve_all"),
    ],
)
def test_wrong_arrows_are_noticed(caller: str, called: tuple[str, str], fault: str) -> None:
    assert fault in faults([FIGURES.Call(0, caller, "", ""), FIGURES.Call(1, *called, "")])


_AROUND = ("planner.graphs.short_tracebacks",)


@contextmanager
def recorded_calls(wanted: Sequence[Arrow]) -> Iterator[dict[Arrow, None]]:
    """Record which of the `wanted` calls happen, in the order of their first occurrence.

    The caller is the closest module of the three floors on the stack, but for those that wrap public functions.
    """
    functions = {name for _, _, name in wanted} | {"__init__"}
    found: dict[Arrow, None] = {}

    def module_of(frame: FrameType) -> str:
        return str(frame.f_globals.get("__name__", ""))

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_name not in functions:
            return
        called, caller, name = module_of(frame), frame.f_back, frame.f_code.co_name
        if name == "__init__":  # which may be inherited
            made = type(frame.f_locals.get("self"))
            called, name = made.__module__, made.__name__
        while caller is not None and (module_of(caller) in _AROUND or module_of(caller).split(".")[0] not in FLOORS):
            caller = caller.f_back
        if caller is not None:
            found.setdefault((module_of(caller), called, name))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def check_happened(wanted: Sequence[Arrow], happened: dict[Arrow, None]) -> None:
    """Check that all `wanted` calls happened, and those of one caller in their order."""
    order = list(happened)
    assert [arrow for arrow in wanted if arrow not in happened] == []
    for caller in {caller for caller, _, _ in wanted}:
        of_caller = list(dict.fromkeys(arrow for arrow in wanted if arrow[0] == caller))
        assert sorted(of_caller, key=order.index) == of_caller


def test_drawn_calls_happen_in_a_solve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_graph(transformer(TransformerSize(layers=2, vocabulary=800)), tmp_path / "graph.json")
    wanted = arrows(FIGURES.SOLVE_WALK)
    with recorded_calls(wanted) as happened:
        call(capsys, "solve", str(tmp_path / "graph.json"), "--budget", "60%", "--work-limit", "5")
    check_happened(wanted, happened)


def test_drawn_calls_happen_when_a_step_is_planned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
    batch = torch.randn(512, 32), torch.randn(512, 32)
    wanted = arrows(FIGURES.COMPILE_WALK)
    with recorded_calls(wanted) as happened:
        step = planner.compile(model, nn.MSELoss(), batch, budget="80%", passes=1, wait=0.2)
        step(*batch).backward()
    check_happened(wanted, happened)

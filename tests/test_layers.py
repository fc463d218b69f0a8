"""Which module may import what, beyond what import-linter checks in ``make lint``."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for floor in ("graphs", "solvers", "planner") for path in (ROOT / floor).rglob("*.py"))


def imports_torch(path: Path) -> bool:
    """Whether `path` imports torch anywhere, for types alone aside."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return any(name.split(".")[0] == "torch" for name in found)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_is_imported_only_where_it_may_be(path: Path) -> None:
    floor = path.relative_to(ROOT).parts[0]
    allowed = floor == "planner" or (floor == "graphs" and path.parent.name in ("capture", "cost", "zoo"))
    assert allowed or not imports_torch(path)


def test_the_check_for_torch_finds_it() -> None:
    assert imports_torch(ROOT / "graphs" / "capture" / "trace.py")
    assert not imports_torch(ROOT / "graphs" / "zoo" / "__init__.py")


@pytest.mark.parametrize("name", ["graphs", "solvers"])
@pytest.mark.parametrize("kind", ["package", "module"])
def test_another_package_of_the_same_name_is_named(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "package":
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    else:
        (tmp_path / f"{name}.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import planner"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: planner needs its own package {name!r} from {ROOT / name}")
    assert str(tmp_path) in said

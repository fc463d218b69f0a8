"""The figures of ``benchmarks.structure``, on a checkout of three small modules."""

import ast
from pathlib import Path

import pytest

from benchmarks import structure

SHORT = '''"""A module."""

import planner.solvers.other


class Box:
    """Something with state."""

    def __init__(self) -> None:
        self.first = 0  # a comment

    def fill(self, value: int) -> None:
        """Fill it."""
        self.second = value
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "solvers").mkdir()
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "solvers").symlink_to("../solvers")
    (tmp_path / "solvers" / "box.py").write_text(SHORT)
    body = "".join(f"    x{i} = offload\n" for i in range(structure.MOST_LINES))
    parameters = ", ".join("abcdefgh")
    (tmp_path / "solvers" / "other.py").write_text(f"def long({parameters}):\n{body}    from planner.solvers.box import Box\n")
    return tmp_path


def test_lines_of_code_leave_out_comments_docstrings_and_blank_lines(checkout: Path) -> None:
    box = structure.read(checkout, "solvers")[0]
    assert (box.lines, box.code_lines) == (14, 6)


def test_long_functions_and_many_parameters_are_found(checkout: Path) -> None:
    other = structure.read(checkout, "solvers")[1]
    assert list(structure.iterate_functions(other)) == [("planner.solvers.other.long", structure.MOST_LINES + 2, 8)]


def test_imports_inside_of_functions_close_a_cycle(checkout: Path) -> None:
    assert structure.import_cycles(structure.read(checkout, "solvers")) == [{"planner.solvers.box", "planner.solvers.other"}]


def test_names_without_a_verb_are_found() -> None:
    source = """
def find_readers(): ...
def readers(): ...
def is_static(): ...
class Op:
    def __init__(self): ...
    @property
    def size(self): ...
    @classmethod
    def of(cls): ...
    def _shifted(self):
        def stop(): ...
"""
    module = structure.Module("ops", source, ast.parse(source))
    assert structure.find_functions_without_verb(module) == (["readers", "_shifted"], 5)
    assert structure.count_nested_functions(module) == 1


def test_comments_are_counted(checkout: Path) -> None:
    assert [structure.count_comment_lines(module) for module in structure.read(checkout, "solvers")] == [1, 0]


def test_private_names_of_our_objects_are_counted_in_tests_outside_of_support(checkout: Path) -> None:
    (checkout / "tests" / "support").mkdir(parents=True)
    (checkout / "solvers" / "box.py").write_text("class Box:\n    def __init__(self):\n        self._first = self._last_ = 0\n")
    used = "box._first\nself._first\nrow._replace(a=1)\nbox._last_\nother._unknown\n"
    for name in ("test_box.py", "support/boxes.py"):
        (checkout / "tests" / name).write_text(used)
    sources, tests = (structure.read(checkout, folder) for folder in ("solvers", "tests"))
    assert structure.find_private_uses(sources, tests) == ["tests.test_box: box._first"]

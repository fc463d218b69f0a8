"""The figures of ``benchmarks.walks``, on three small modules."""

import sys
from pathlib import Path

import pytest

from benchmarks.walks import Walk

MODULES = {
    "first": "import second, third\ndef start(value):\n    second.pass_on(value)\n    third.read(value)\n",
    "second": """
import third
def pass_on(value):
    for _ in range(2):
        third.read(value)  # the second call counts no more
    third.count(0, value)
    third.read(0)  # another value
""",
    "third": """
def read(value):
    return value
def count(*values):
    return len(values)
""",
}
# first, second, third, second, third, second, first, third, first
FIGURES = "4 | 9 | 3 | 1 | 4"


@pytest.mark.parametrize(("most", "figures"), [(400, FIGURES), (4, "3 | 4 | 3 | 1 | 1")])
def test_a_walk_counts_calls_and_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, figures: str) -> None:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    first, value = __import__("first"), object()
    walk = Walk((f"{tmp_path}/",), lambda found: found is value, most)
    walk.follow(lambda: first.start(value))
    assert walk.describe() == figures
    for name in MODULES:
        sys.modules.pop(name)

"""Runs one benchmark: ``python -m benchmarks NAME``, with the arguments that its ``--help`` explains; all are listed without."""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

_FOLDER = Path(__file__).parent


def list_benchmarks() -> dict[str, str]:
    """Return the first line about each benchmark, by its name. None is imported: some need libraries of models."""
    found = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        text = path.read_text()
        if path.name != "__main__.py" and ("\nmain = " in text or "\ndef main(words" in text):
            name = ".".join(path.relative_to(_FOLDER).with_suffix("").parts)
            found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main(words: Sequence[str]) -> int:
    """Run the benchmark that the first word names with the others; return its exit code."""
    known = list_benchmarks()
    name, *others = words or [""]
    if name not in known:
        print(*(f"{name}: {line}" for name, line in known.items()), sep="\n")
        return 0 if name in ("", "--help") else 2
    sys.argv[0] = f"python -m benchmarks {name}"  # as usage has it
    code: int = import_module(f"benchmarks.{name}").main(others)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Mutations of the runtime on CUDA: each takes away a wait, an event, a hold or a rounding, and a test must fail.

They are the rows of a table in ``docs/gpu.md``. ``python -m tests.support.cuda_device.mutations`` makes each of them in a copy of
the sources, and runs its test there. It takes some minutes; arguments choose mutations by a part of what they take away.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
_COPIED = ("benchmarks", "graphs", "solvers", "planner", "tests", "pyproject.toml")
_LIMIT_S = 300
_PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu")  # slow tests too
_FOLDERS = ("tests/planner/runtime", "tests/graphs/allocators")
_ROW = re.compile(r"^\| `(\S+\.py)` \| (.+) \| `(.+)` \| `(.+)` \| `(test_.+)` \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of a source that leaves it valid Python.

    Attributes:
        file: of the source.
        takes_away: what is missing then.
        before, after: text of the source, which is there once, and what stands in its place.
        test: in one of the folders of tests, which fails then.
    """

    file: str
    takes_away: str
    before: str
    after: str
    test: str

    def change(self, source: str) -> str:
        """The source with it."""
        assert source.count(self.before) == 1, f"{self.file} has {source.count(self.before)} times {self.before!r}"
        return source.replace(self.before, self.after)


def read_mutations() -> tuple[Mutation, ...]:
    """Read the table of ``docs/gpu.md``."""
    rows = _ROW.findall((ROOT / "docs" / "gpu.md").read_text())
    return tuple(Mutation(*(cell.replace("\\n", "\n") for cell in row)) for row in rows)


MUTATIONS = read_mutations()


def path_of_test(root: Path, file: str) -> str:
    """The path of a file of tests in the sources at `root`."""
    return next(f"{folder}/{file}" for folder in _FOLDERS if (root / folder / file).exists())


def survives(mutation: Mutation) -> bool:
    """Return True if the test of `mutation` still passes with it."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        path = root / mutation.file
        path.write_text(mutation.change(path.read_text()))
        file, *chosen = mutation.test.split()
        command = [*_PYTEST, path_of_test(root, file), *chosen]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return False  # who is not told waits for ever
        assert run.returncode in (0, 1), run.stdout.decode()[-2000:]
        return run.returncode == 0


def main(words: list[str]) -> int:
    """Try the mutations that are asked for; 1 if one survives."""
    survivors = 0
    for mutation in MUTATIONS:
        if not words or any(word in mutation.takes_away or word in mutation.file for word in words):
            survived = survives(mutation)
            survivors += survived
            state = "SURVIVED" if survived else "failed as it must"
            sys.stderr.write(f"{mutation.file}: {mutation.takes_away}: {state}\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Count the functions, files and folders that a value passes through: the batch of ``compile``, the graph of ``solve``.

    python -m benchmarks.walks                             # of this checkout
    PYTHONPATH=../before python benchmarks/walks.py        # of another one

A value is in a function if it is one of its arguments when it is called, or an item of one that is a tuple, list or dict: the
graph itself, or a tensor with the memory of the batch. Its own methods do not count, nor what a function reads from an attribute.
A call from one function to another counts once, with all that happens in it.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MOST = 400  # calls and returns


@dataclass(slots=True)
class Walk:
    """The way of a value through the functions of the sources.

    Attributes:
        folders: paths of the sources.
        is_value: tells the value, or a part of it, from others.
        most: number of calls and returns that are looked at.
        files: where the value is, from call to return to call.
        functions: those that it has been passed to.
        climbs: how often it came back to a function in another file, which had passed it on.
    """

    folders: tuple[str, ...]
    is_value: Callable[[object], bool]
    most: int = MOST
    files: list[str] = field(default_factory=list)
    functions: set[CodeType] = field(default_factory=set)
    climbs: int = 0
    _open: list[FrameType] = field(default_factory=list)
    _calls: set[tuple[CodeType | None, CodeType]] = field(default_factory=set)
    _repeated: FrameType | None = None

    def follow(self, run: Callable[[], object]) -> "Walk":
        """Return this walk after `run`."""
        sys.setprofile(self._note)
        try:
            run()
        finally:
            sys.setprofile(None)
        return self

    @property
    def stays(self) -> int:
        """Number of times that it came into a file, by a call or by a return."""
        return sum(file != before for file, before in zip(self.files, [None, *self.files], strict=False))

    def describe(self) -> str:
        """Return the figures, as cells of a table."""
        folders = {Path(file).parent for file in self.files}
        return f"{len(self.functions)} | {self.stays} | {len(set(self.files))} | {len(folders)} | {self.climbs}"

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._repeated is not None:
            if event == "return" and frame is self._repeated:
                self._repeated = None
        elif len(self.files) == self.most:
            return
        elif event == "return" and self._open and frame is self._open[-1]:
            self._open.pop()
            if self._open:
                file = self._open[-1].f_code.co_filename
                self.climbs += file != frame.f_code.co_filename
                self.files.append(file)
        elif event == "call" and frame.f_code.co_filename.startswith(self.folders) and self._is_argument(frame):
            call = self._open[-1].f_code if self._open else None, frame.f_code
            if call in self._calls:
                self._repeated = frame
                return
            self._calls.add(call)
            self.functions.add(frame.f_code)
            self._open.append(frame)
            self.files.append(frame.f_code.co_filename)

    def _is_argument(self, frame: FrameType) -> bool:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        names = code.co_varnames[code.co_varnames[:1] == ("self",) : count]
        return any(self._holds(frame.f_locals.get(name)) for name in names)

    def _holds(self, argument: object) -> bool:
        items = argument.values() if isinstance(argument, dict) else argument if isinstance(argument, tuple | list) else ()
        return any(map(self.is_value, (argument, *items)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss

    import planner

    root = Path(planner.__file__).parents[1]
    sources = tuple(f"{root / folder}/" for folder in ("graphs", "planner", "solvers"))
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    batch = torch.randn(256, 64), torch.randn(256, 64)
    graph = planner.trace(model, mse_loss, batch)
    memory = {tensor.data_ptr() for tensor in batch}

    def is_batch(value: object) -> bool:
        return type(value) is torch.Tensor and value.device.type == "cpu" and value.data_ptr() in memory

    options: dict[str, Any] = {"budget": "80%", "on_progress": None}
    runs: dict[str, tuple[Callable[[object], bool], Callable[[], object]]] = {
        "`batch` of `planner.compile`": (is_batch, lambda: planner.compile(model, mse_loss, batch, **options)),
        "`graph` of `planner.solve`": (lambda value: value is graph, lambda: planner.solve(graph, **options)),
    }
    walks = {name: Walk(sources, is_value).follow(run) for name, (is_value, run) in runs.items()}
    print("| value | functions | stays in files | files | folders | climbs |\n| --- | --- | --- | --- | --- | --- |")
    for name, walk in walks.items():
        print(f"| {name} | {walk.describe()} |")


if __name__ == "__main__":
    main()

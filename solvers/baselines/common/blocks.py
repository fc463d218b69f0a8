"""The blocks of a model: divisions of its forward pass by the module paths of its ops.

Models name and nest their parts in different ways, so there are several definitions of a block:

- at *level* n a block ends with the n-th number in a module's path, or its last: ``model.h.0``, ``model.layers.3``; ops of
modules without a number belong to no block;
- at *depth* n blocks are the modules n steps below the model (``model.stem``, ``model.encoder``), where the elements of an
``nn.ModuleList`` take its place. Modules without submodules belong to no block, or are blocks too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from planner.graphs.ir import Graph, Phase


@dataclass(frozen=True, slots=True)
class Blocking:
    """A division of the forward pass: its name, and the block of each op, or None."""

    settings: Mapping[str, object]
    blocks: tuple[str | None, ...]


def find_blockings(graph: Graph) -> list[Blocking]:
    """Return the distinct divisions of the forward pass of `graph` into blocks."""
    ways = [
        Blocking({"level": level}, tuple(block_of(op.module, level) or None for op in graph.ops))
        for level in range(1, count_levels(graph) + 1)
    ]
    tree = ModuleTree(graph)
    for depth in range(1, tree.depth + 1):
        ways.append(Blocking({"depth": depth}, tree.list_modules_at(depth, layers=False)))
        ways.append(Blocking({"depth": depth, "layers": True}, tree.list_modules_at(depth, layers=True)))
    distinct: dict[tuple[int, ...], Blocking] = {}
    for way in ways:
        if any(way.blocks):
            distinct.setdefault(_number_blocks(way.blocks), way)
    return list(distinct.values())


def _number_blocks(blocks: Sequence[str | None]) -> tuple[int, ...]:
    """Return `blocks` as numbers that do not depend on names."""
    numbers: dict[str | None, int] = {None: 0}
    return tuple(numbers.setdefault(block, len(numbers)) for block in blocks)


def count_levels(graph: Graph) -> int:
    """Return the nesting depth of numbered modules; 0 if there are none."""
    return max((sum(part.isdecimal() for part in op.module.split(".")) for op in graph.ops), default=0)


def block_of(module: str, level: int) -> str:
    """Return the block that `module` belongs to at `level` (1 or more); "" if none."""
    parts = module.split(".")
    ends = [place + 1 for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: ends[min(level, len(ends)) - 1]]) if ends else ""


Path = tuple[str, ...]


class ModuleTree:
    """The modules of a graph that ops of its forward pass were called in.

    Attributes:
        paths: the module path of each op, in parts; () for ops without a module, and those after the forward pass.
        root: the common prefix of all paths: the model.
        depth: nesting depth of modules below it.
        compound: modules with submodules.
        lists: containers that are never called themselves, such as an ``nn.ModuleList``.
    """

    def __init__(self, graph: Graph) -> None:
        self.paths: list[Path] = [
            tuple(op.module.split(".")) if op.phase is Phase.FORWARD and op.module else () for op in graph.ops
        ]
        there = sorted({path for path in self.paths if path})
        ends = zip(there[0], there[-1], strict=False) if there else ()
        self.root = tuple(part for part, _ in takewhile(lambda parts: parts[0] == parts[1], ends))
        self.depth = max((len(path) for path in there), default=0) - len(self.root)
        self.compound = {path[:end] for path in there for end in range(len(path))}
        self.lists = self._find_lists()

    def list_modules_at(self, depth: int, *, layers: bool) -> tuple[str | None, ...]:
        """Return for each op the module `depth` steps below the root that it belongs to; None if there is none.

        Elements of lists take their place. Modules without submodules count only if `layers`, then also at lower depths. A module
        that is called again, with others in between, counts as another one.
        """
        found = [self._find_module(path, depth) for path in self.paths]
        names: list[str | None] = [None] * len(found)
        calls: dict[Path, int] = {}
        placed = ((i, module) for i, module in enumerate(found) if self.paths[i])
        for module, members in groupby(placed, key=lambda place: place[1]):
            if not module or not (layers or module in self.compound):
                continue
            calls[module] = calls.get(module, 0) + 1
            name = ".".join(module) + (f" call {calls[module]}" if calls[module] > 1 else "")
            for i, _ in members:
                names[i] = name
        return tuple(names)

    def _find_module(self, path: Path, depth: int) -> Path:
        """Return the prefix of `path` that is `depth` steps below the root, not counting steps to lists.

        It is shorter only if there are no submodules; () for ops that a module with submodules executes itself.
        """
        end, left = len(self.root), depth
        while end < len(path) and left:
            end += 1
            left -= path[:end] not in self.lists
        return () if end == len(self.root) or (left and path in self.compound) else path[:end]

    def _find_lists(self) -> frozenset[Path]:
        """Return the containers that are never called: no op runs in themselves, and others run between their elements.

        Each element runs once; if a module is called several times, each of its parts runs once per call.
        """
        runs: dict[Path, int] = {}
        last: dict[Path, int] = {}
        held: dict[Path, set[Path]] = {}
        for place, path in enumerate(path for path in self.paths if path):
            for end in range(1, len(path) + 1):
                part = path[:end]
                if last.get(part) != place - 1:
                    runs[part] = runs.get(part, 0) + 1
                last[part] = place
                held.setdefault(part[:-1], set()).add(part)
        lists: set[Path] = set()
        for container in sorted(self.compound - set(self.paths), key=len, reverse=True):
            once = all(runs[part] == 1 or part in lists for part in held[container])
            if runs.get(container, 0) > 1 and once:
                lists.add(container)
        return frozenset(lists)

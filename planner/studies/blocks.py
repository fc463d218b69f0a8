"""Modules of a PyTorch model that can be checkpointed one by one.

As for graphs (``planner.solvers.baselines.common.blocks``) there are two families. At *level* n, blocks are the numbered modules
whose path has n numbers, such as ``model.layers.3``. At *depth* n, they are the modules n steps below the model that have
submodules, such as ``model.stem``; an ``nn.ModuleList`` is replaced by its items.
"""

from collections.abc import Iterator
from typing import TypedDict

from torch import nn

from planner.graphs.errors import ModelError


class InapplicableError(ModelError):
    """The error that a method does not apply to a model."""


class Choice(TypedDict, total=False):
    """A family of blocks, as arguments by name."""

    level: int
    depth: int


def block_choices(model: nn.Module) -> list[Choice]:
    """Return the levels and depths whose blocks differ; level 1 if there are none."""
    found: dict[frozenset[nn.Module], Choice] = {}
    for level in range(1, block_levels(model) + 1):
        found.setdefault(frozenset(module for module in find_blocks(model, level) if not _is_layer(module)), {"level": level})
    for depth in range(1, _compute_depth(model) + 1):
        found.setdefault(frozenset(_find_at_depth(model, depth)), {"depth": depth})
    found.pop(frozenset(), None)  # blocks of single layers hold nothing to discard
    return list(found.values()) or [{"level": 1}]


def block_levels(model: nn.Module) -> int:
    """Return the nesting depth of numbered modules; 0 if there are none."""
    return max((_count_numbers(path) for path, _ in _list_numbered(model)), default=0)


def find_blocks(model: nn.Module, level: int) -> list[nn.Module]:
    """Return the numbered modules, such as ``model.layers.3``, whose path has `level` numbers (1 or more).

    If numbered modules are nested less deep, their last level is returned. No block contains another.

    Raises:
        InapplicableError: the model has no numbered modules.
    """
    candidates = [(path, module) for path, module in _list_numbered(model) if _count_numbers(path) <= level]
    if not candidates:
        raise InapplicableError(
            f"{type(model).__name__} has no blocks: none of its modules is numbered, such as layers.0; "
            "keep them in an nn.ModuleList or nn.Sequential, or take a method without blocks"
        )
    paths = [path for path, _ in candidates]
    return [module for path, module in candidates if not any(other.startswith(f"{path}.") for other in paths)]


def find_blocks_at(model: nn.Module, depth: int) -> list[nn.Module]:
    """Return the modules `depth` steps (1 or more) below `model` that are not single layers.

    Raises:
        InapplicableError: there are none.
    """
    if modules := _find_at_depth(model, depth):
        return modules
    raise InapplicableError(f"{type(model).__name__} has no blocks: no module {depth} levels below it has modules inside")


def select_checkpointable(modules: list[nn.Module]) -> list[nn.Module]:
    """Return `modules` without in-place activations, which cannot be recomputed as blocks: their input is overwritten."""
    return [module for module in modules if not (_is_layer(module) and getattr(module, "inplace", False))]


def _list_numbered(model: nn.Module) -> list[tuple[str, nn.Module]]:
    # A list of modules is not called, its items are.
    return [
        (path, module)
        for path, module in model.named_modules()
        if path.rpartition(".")[2].isdecimal() and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]


def _count_numbers(path: str) -> int:
    return sum(part.isdecimal() for part in path.split("."))


def _find_at_depth(model: nn.Module, depth: int) -> list[nn.Module]:
    modules = [model]
    for _ in range(depth):
        modules = [child for module in modules for child in _iterate_called(module)]
    return [module for module in dict.fromkeys(modules) if not _is_layer(module)]


def _compute_depth(model: nn.Module) -> int:
    return max((1 + _compute_depth(child) for child in _iterate_called(model)), default=0)


def _iterate_called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of `module`; lists of modules are replaced by their items."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iterate_called(child)
        else:
            yield child


def _is_layer(module: nn.Module) -> bool:
    """Return True if the module is a single layer of ``torch.nn``."""
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())

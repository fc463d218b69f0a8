"""The memory-saving methods that PyTorch ships, applied to a model as PyTorch applies them.

Each is a ``Method``: its ``prepare`` gives a step with the method on: ``loss = step(*batch)[0]``, or ``step(**batch)[0]``,
then ``loss.backward()``.
The model is changed while a step's forward pass runs, at most, and settings of PyTorch likewise.
"""

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphs.errors import ModelError
from graphs.trace import LossFn, TrainingStep
from planner.measure import Step
from solvers.policies.sac import Rule
from solvers.policies.torch_ops import ATTENTION, COMPUTE_INTENSIVE, MATMUL, base_name

# Fractions of the Memory Budget API by backend; Inductor compiles for a minute or more, each time.
BUDGETS = MappingProxyType({"aot_eager": (1.0, 0.75, 0.5, 0.25, 0.0), "inductor": (1.0, 0.5, 0.0)})

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to run a training step.

    Attributes:
        name: that of the policy in the registry that imitates it, where there is one, and its options.
        prepare: a model and its loss function to a step; raises ModelError where the method does not apply.
    """

    name: str
    prepare: Callable[[nn.Module, LossFn | None], Step]


def of_policies(methods: Iterable[Method], policies: Collection[str]) -> list[Method]:
    """Those that PyTorch has of the `policies`, by their names in the registry; plain PyTorch always, Auto-SAC with ``sac``."""
    kinds = {eager().name, *policies, *({auto_sac().name} if Rule.LISTED in policies else ())}
    return [method for method in methods if method.name.split()[0] in kinds]


def stock_methods(
    model: nn.Module,
    *,
    budgets: Mapping[str, Sequence[float]] = BUDGETS,
    save: Sequence[str] = (),
) -> list[Method]:
    """Every method for `model`: checkpointing and SAC at each level of blocks (at level 1 if it has none).

    Args:
        budgets: by backend of ``torch.compile``, the fractions of the Memory Budget API.
        save: targets of ops, such as ``aten.mm.default`` or ``mm``: SAC with this list as well.
    """
    levels = range(1, max(1, block_levels(model)) + 1)
    sacs = [partial(sac, rule) for rule in Rule] + ([partial(sac, save=save)] if save else [])
    return [
        eager(),
        *(checkpoint_blocks(level) for level in levels),
        *(make(level=level) for make in sacs for level in levels),
        *(memory_budget(fraction, backend) for backend, fractions in budgets.items() for fraction in fractions),
        auto_sac(),
    ]


def eager() -> Method:
    """Plain PyTorch."""
    return Method("eager", TrainingStep)


def checkpoint_blocks(level: int = 1) -> Method:
    """``torch.utils.checkpoint`` around every block of `level`."""

    def prepare(model: nn.Module, loss_fn: LossFn | None) -> Step:
        step, wrapped = TrainingStep(model, loss_fn), blocks(model, level)

        def run(*args: object, **kwargs: object) -> Any:
            with _wrapped(wrapped, lambda forward: partial(checkpoint, forward, use_reentrant=False)):
                return step(*args, **kwargs)

        return run

    return Method(f"checkpoint_blocks{_at(level)}", prepare)


def sac(rule: Rule = Rule.LISTED, *, level: int = 1, save: Sequence[str] = ()) -> Method:
    """Selective activation checkpointing around every block of `level`.

    Its steps raise ModelError where no op in the blocks is one of those that are saved.

    Args:
        rule: what is saved, as in ``solvers.policies.sac``; every second matmul is counted in each block,
            as torchtitan does.
        save: for the rule ``sac``, targets of ops, such as ``aten.mm.default`` or ``mm``, instead of its own list.
    """
    names = {Rule.LISTED: frozenset(save) or COMPUTE_INTENSIVE, Rule.EVERY_SECOND: COMPUTE_INTENSIVE, Rule.ATTENTION: ATTENTION}
    name = f"{rule}{' ' + ','.join(save) if save else ''}{_at(level)}"

    def prepare(model: nn.Module, loss_fn: LossFn | None) -> Step:
        step, wrapped = TrainingStep(model, loss_fn), blocks(model, level)

        def run(*args: object, **kwargs: object) -> Any:
            saved: set[str] = set()
            contexts = partial(_contexts, names[rule], saved, every_second=rule is Rule.EVERY_SECOND)
            with _wrapped(wrapped, lambda forward: partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)):
                returned = step(*args, **kwargs)
            if not saved:
                raise ModelError(f"{name} saves nothing: no op in the blocks is one of {', '.join(sorted(names[rule]))}")
            return returned

        return run

    return Method(name, prepare)


def memory_budget(fraction: float, backend: str = "aot_eager") -> Method:
    """``torch.compile`` with ``activation_memory_budget``: `fraction` of the bytes that are saved for the backward.

    Its random numbers are those of eager PyTorch, also in Inductor, so that gradients can be compared. A graph
    that cannot be captured whole is an error, for the rest would run without the budget. Below 1 and with random
    ops, such as dropout, gradients are wrong (torch 2.11 to 2.13: what is recomputed draws other numbers).

    Args:
        fraction: from 0 to 1; 1 is ``torch.compile`` by default.
        backend: ``aot_eager``, or ``inductor``, which needs a C++ compiler for the CPU.
    """

    def prepare(model: nn.Module, loss_fn: LossFn | None) -> Step:
        compiled = torch.compile(own_code(TrainingStep(model, loss_fn)), backend=backend, fullgraph=True, dynamic=False)

        def run(*args: object, **kwargs: object) -> Any:
            with functorch_config.patch(activation_memory_budget=fraction), inductor_config.patch(fallback_random=True):
                return compiled(*args, **kwargs)

        return run

    return Method(f"memory-budget {fraction:.2f} {backend}", prepare)


def auto_sac() -> Method:
    """Auto-SAC (``torch.distributed._tools.sac_ilp``): not available.

    The module chooses how much each block discards and leaves it to its user to run that. What it chooses from,
    times of ops (``RuntimeEstimator``), is taken from CUDA events or from a roofline of a CUDA device, and
    fitted with pwlf, which is no dependency of PyTorch (torch 2.13).
    """

    def prepare(model: nn.Module, loss_fn: LossFn | None) -> Step:
        raise ModelError(
            "Auto-SAC is not available: torch.distributed._tools.sac_ilp estimates times of ops on CUDA devices only, "
            "needs the package pwlf, and has nothing that runs what it chose; take sac or memory-budget"
        )

    return Method("auto-sac", prepare)


def block_levels(model: nn.Module) -> int:
    """How deep numbered modules are nested; 0 if there are none."""
    return max((_numbers(path) for path, _ in _numbered(model)), default=0)


def blocks(model: nn.Module, level: int) -> list[nn.Module]:
    """The numbered modules, such as ``model.layers.3``, whose path has `level` numbers (1 or more).

    Where numbered modules are not nested so deep, their last level. No block contains another.

    Raises:
        ModelError: the model has no numbered modules.
    """
    candidates = [(path, module) for path, module in _numbered(model) if _numbers(path) <= level]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no blocks: none of its modules is numbered, such as layers.0; "
            "keep them in an nn.ModuleList or nn.Sequential, or take a method without blocks"
        )
    paths = [path for path, _ in candidates]
    return [module for path, module in candidates if not any(other.startswith(f"{path}.") for other in paths)]


def _numbered(model: nn.Module) -> list[tuple[str, nn.Module]]:
    # A list of modules is not called, its items are.
    return [
        (path, module)
        for path, module in model.named_modules()
        if path.rpartition(".")[2].isdecimal() and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]


def _numbers(path: str) -> int:
    return sum(part.isdecimal() for part in path.split("."))


def _at(level: int) -> str:
    return f" level {level}" if level > 1 else ""


@contextmanager
def _wrapped(modules: Sequence[nn.Module], wrap: Wrap) -> Iterator[None]:
    """Inside, the modules' ``forward`` is wrapped; what they are computed again with is the plain one."""
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = wrap(module.forward)
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def _contexts(names: frozenset[str], saved: set[str], *, every_second: bool) -> Contexts:
    """What SAC enters in one region; adds the targets whose outputs are saved to `saved`."""
    # The policy is asked again while recomputing by torch 2.11.
    matmuls = {False: count(), True: count()}

    def policy(context: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        target = str(op)
        if target not in names and base_name(target) not in names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if every_second and base_name(target) in MATMUL and next(matmuls[context.is_recompute]) % 2:
            return CheckpointPolicy.PREFER_RECOMPUTE
        saved.add(target)
        return CheckpointPolicy.MUST_SAVE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)
    return contexts


def own_code(step: TrainingStep) -> Callable[..., Any]:
    """`step` as a function with a code object of its own, by which Dynamo knows what it has compiled.

    Otherwise one method would run what was compiled for another.
    """

    def forward(*args: object, **kwargs: object) -> Any:
        return step(*args, **kwargs)

    return types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)

"""The memory-saving methods that PyTorch ships, applied to a model as PyTorch applies them.

The ``prepare`` of each ``Method`` returns a step with the method enabled: ``loss = step(*batch)[0]``, or ``step(**batch)[0]``,
then ``loss.backward()``. The model and PyTorch's settings are changed at most during the forward pass of a step.

The Memory Budget API gives wrong gradients where random ops are recomputed (torch 2.11 to 2.13), and nothing says so. Its
fractions bound saved bytes, not the peak, and peaks do not fall with them: of a small GPT, fractions 1, 0.5 and 0 had peaks of
28.7, 15.9 and 28.7 MiB.
"""

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from planner.capture.step import LossFn, TrainingStep
from planner.graphs.errors import ModelError
from planner.measure.steps import Step
from planner.solvers.baselines.common.torch_ops import extract_base_name
from planner.solvers.baselines.sac import LISTS, SacRule, SaveList, save_lists
from planner.studies.blocks import InapplicableError, block_choices, find_blocks, find_blocks_at, select_checkpointable
from planner.torch_private.capture import functorch_config, inductor_config

# Fractions of the Memory Budget API by backend; Inductor compiles for a minute or more each time.
BUDGETS = MappingProxyType({"aot_eager": (1.0, 0.75, 0.5, 0.25, 0.0), "inductor": (1.0, 0.5, 0.0)})

# Every so many blocks is checkpointed, as with ``every_n_layers`` of Hugging Face's Transformers.
EVERY = (2, 3, 4)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Counts = Mapping[tuple[frozenset[str], bool], Iterator[int]]  # of ops, by their half of the list and if they are recomputed


@dataclass(frozen=True, slots=True)
class Method:
    """A method to run a training step.

    Attributes:
        name: name of the corresponding policy in the registry, if there is one, with its options.
        prepare: function from a model and its loss function to a step; raises ModelError if the method does not apply.
    """

    name: str
    prepare: Callable[[nn.Module, LossFn | None], Step]


def select_policies(methods: Iterable[Method], policies: Collection[str]) -> list[Method]:
    """Return the methods that implement the `policies` of the registry; always plain PyTorch, and Auto-SAC with ``sac``."""
    kinds = {build_eager().name, *policies, *({build_auto_sac().name} if SacRule.LISTED in policies else ())}
    return [method for method in methods if method.name.split()[0] in kinds]


def list_baseline_methods(
    model: nn.Module,
    *,
    budgets: Mapping[str, Sequence[float]] = BUDGETS,
    targets: Sequence[str] = (),
) -> list[Method]:
    """Return every method for `model`: checkpointing and SAC with each choice of blocks, SAC with each of its lists.

    Args:
        budgets: fractions of the Memory Budget API, by backend of ``torch.compile``.
        targets: targets of the forward ops: SAC with all lists of kinds among them, not only the named ones.
    """
    choices = block_choices(model)
    layers = _count_layers(model)
    sacs = [partial(build_sac, rule) for rule in SacRule if not targets or any(map(LISTS[rule].has, targets))]
    sacs += [partial(build_sac, save_list=known) for known in list_unnamed(targets)]
    useless = [build_sac(rule) for rule in SacRule if targets and not any(map(LISTS[rule].has, targets))]  # their steps raise
    return [
        build_eager(),
        *(build_checkpoint_blocks(**choice) for choice in choices),
        *(build_checkpoint_blocks(every=every) for every in EVERY if every < layers),
        *(make(**choice) for make in sacs for choice in choices),
        *useless,
        *(build_memory_budget(fraction, backend) for backend, fractions in budgets.items() for fraction in fractions),
        build_auto_sac(),
    ]


def build_eager() -> Method:
    """Return plain PyTorch as a method."""
    return Method("eager", TrainingStep)


def build_checkpoint_blocks(level: int = 1, *, depth: int = 0, every: int = 1) -> Method:
    """Return ``torch.utils.checkpoint`` around each block of `level`, or of `depth`: see ``planner.studies.blocks``.

    Args:
        every: n for the first of each n blocks only, as ``activation_checkpointing_enable(every_n_layers=n)`` of Transformers.
    """
    name = f"checkpoint-blocks{_format_level(level, depth)}{f' every {every}' if every > 1 else ''}"
    return Method(name, partial(_prepare_blocks, level, depth, every))


def _prepare_blocks(level: int, depth: int, every: int, model: nn.Module, loss_fn: LossFn | None) -> Step:
    modules = find_checkpointed_blocks(model, level, depth)[::every]
    return partial(run_checkpointed, TrainingStep(model, loss_fn), modules, checkpoint)


def run_checkpointed(
    step: Step, modules: Sequence[nn.Module], run: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    """Return the result of `step` with `modules` checkpointed by `run`: ``checkpoint``, or a function around it.

    Recomputation calls the plain ``forward`` of a module.
    """
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = partial(run, module.forward, use_reentrant=False)
        return step(*args, **kwargs)
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def build_sac(rule: SacRule = SacRule.LISTED, *, level: int = 1, depth: int = 0, save_list: SaveList | None = None) -> Method:
    """Return selective activation checkpointing around every block of `level`, or of `depth`.

    Its steps raise InapplicableError if no op in the blocks is in the save list.

    Args:
        rule: the saved ops, as in ``planner.solvers.baselines.sac``; for the rule ``sac`` all kinds there. Every second op is
            counted per block, as in torchtitan.
    """
    saves = save_list or LISTS[rule]
    name = f"{rule}{f' {saves.name}' if save_list else ''}{_format_level(level, depth)}"
    return Method(name, partial(_prepare_sac, level, depth, saves, name))


def _prepare_sac(level: int, depth: int, saves: SaveList, name: str, model: nn.Module, loss_fn: LossFn | None) -> Step:
    modules = find_checkpointed_blocks(model, level, depth)
    return partial(run_selectively, TrainingStep(model, loss_fn), modules, checkpoint, saves, name)


def run_selectively(
    step: Step,
    modules: Sequence[nn.Module],
    run: Callable[..., Any],
    saves: SaveList,
    name: str,
    /,
    *args: object,
    **kwargs: object,
) -> Any:
    """Return as ``run_checkpointed``, with the ops of `saves` saved.

    Raises:
        InapplicableError: no op in the modules is one of them; `name` is the method in the message.
    """
    saved: set[str] = set()
    returned = run_checkpointed(step, modules, partial(run, context_fn=partial(_save_contexts, saves, saved)), *args, **kwargs)
    if not saved:
        raise InapplicableError(f"{name} saves nothing: no op in the blocks is one of {', '.join(sorted(saves.ops))}")
    return returned


def list_unnamed(targets: Sequence[str]) -> list[SaveList]:
    """Return the save lists of kinds among `targets`, except those that a rule already makes and the empty one."""
    named = {_compute_effect(known, targets) for known in LISTS.values()}
    return [known for known in save_lists(targets) if known.ops and _compute_effect(known, targets) not in named]


def _compute_effect(save_list: SaveList, targets: Sequence[str]) -> tuple[bool, ...]:
    """Return for each of `targets`, in order, whether the list saves it."""
    skipped: set[int] = set()
    for half in save_list.halved:
        skipped.update([i for i, target in enumerate(targets) if extract_base_name(target) in half][1::2])
    return tuple(save_list.has(target) and i not in skipped for i, target in enumerate(targets))


def build_torch_compile(mode: str | None = None) -> Method:
    """Return ``torch.compile`` with Inductor at one of its modes; its random numbers differ from eager PyTorch's."""
    return Method("torch.compile" if mode is None else f"torch.compile {mode}", partial(_compile_step, {"mode": mode}))


def _compile_step(options: Mapping[str, Any], model: nn.Module, loss_fn: LossFn | None) -> Step:
    step: Step = torch.compile(copy_code(TrainingStep(model, loss_fn)), fullgraph=True, dynamic=False, **options)
    return step


def build_memory_budget(fraction: float, backend: str = "aot_eager", *, eager_random: bool = True) -> Method:
    """Return ``torch.compile`` with ``activation_memory_budget``: `fraction` of the bytes of saved tensors.

    A graph break is an error, since the rest would run without the budget. If random ops such as dropout are recomputed,
    gradients are wrong (torch 2.11 to 2.13 draw different numbers), also with eager PyTorch's random numbers.

    Args:
        fraction: from 0 to 1; 1 is ``torch.compile`` by default.
        backend: ``aot_eager``, or ``inductor``, which needs a C++ compiler for the CPU.
        eager_random: True to draw eager PyTorch's random numbers, also with Inductor, so that gradients are comparable.
    """
    return Method(f"memory-budget {fraction:.2f} {backend}", partial(_prepare_budget, fraction, backend, eager_random))


def _prepare_budget(fraction: float, backend: str, eager_random: object, model: nn.Module, loss_fn: LossFn | None) -> Step:
    return partial(_run_within, _compile_step({"backend": backend}, model, loss_fn), fraction, eager_random)


def _run_within(step: Step, fraction: float, eager_random: object, /, *args: object, **kwargs: object) -> Any:
    with functorch_config.patch(activation_memory_budget=fraction), inductor_config.patch(fallback_random=eager_random):
        return step(*args, **kwargs)


def build_auto_sac() -> Method:
    """Return Auto-SAC (``torch.distributed._tools.sac_ilp``) as a method that raises: it is not available.

    The module decides how much each block discards, and its user must implement that. It needs op times (``RuntimeEstimator``)
    from CUDA events or from a roofline of a CUDA device, fitted with pwlf, which is no dependency of PyTorch (torch 2.13).
    """
    return Method("auto-sac", _refuse_auto_sac)


def _refuse_auto_sac(_: nn.Module, __: LossFn | None) -> NoReturn:
    raise ModelError(
        "Auto-SAC is not available: torch.distributed._tools.sac_ilp estimates times of ops on CUDA devices only, "
        "needs the package pwlf, and cannot run what it chooses; use sac or memory-budget"
    )


def find_checkpointed_blocks(model: nn.Module, level: int = 1, depth: int = 0) -> list[nn.Module]:
    """Return the blocks of `level`, or of `depth`, that can be checkpointed; raise an InapplicableError if the model has none."""
    return select_checkpointable(find_blocks_at(model, depth) if depth else find_blocks(model, level))


def _count_layers(model: nn.Module) -> int:
    try:
        return len(find_checkpointed_blocks(model))
    except InapplicableError:
        return 0


def _format_level(level: int, depth: int) -> str:
    return f" depth {depth}" if depth else f" level {level}" if level > 1 else ""


def _save_contexts(saves: SaveList, saved: set[str]) -> Contexts:
    """Return the contexts of SAC for one region; targets whose outputs are saved are added to `saved`."""
    # Torch 2.11 calls the policy again during recomputation.
    counts = {(half, again): count() for half in saves.halved for again in (False, True)}
    contexts: Contexts = create_selective_checkpoint_contexts(partial(_choose_policy, saves, saved, counts))
    return contexts


def _choose_policy(
    saves: SaveList, saved: set[str], counts: Counts, context: SelectiveCheckpointContext, op: object, *_: object, **__: object
) -> CheckpointPolicy:
    target = str(op)
    if not saves.has(target):
        return CheckpointPolicy.PREFER_RECOMPUTE
    half = next((half for half in saves.halved if extract_base_name(target) in half), None)
    if half is not None and next(counts[half, context.is_recompute]) % 2:
        return CheckpointPolicy.PREFER_RECOMPUTE
    saved.add(target)
    return CheckpointPolicy.MUST_SAVE


def copy_code(step: TrainingStep) -> Callable[..., Any]:
    """Return `step` as a function with a code object of its own, by which Dynamo identifies compiled functions.

    With a shared code object, one method would run what was compiled for another.
    """

    def forward(*args: object, **kwargs: object) -> Any:
        return step(*args, **kwargs)

    return types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)

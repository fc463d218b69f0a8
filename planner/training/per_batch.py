"""Plans inside somebody else's training loop: one for each kind of batch that comes, and the optimizer the loop has."""

from collections.abc import Hashable, Mapping
from inspect import Parameter, signature
from typing import Any
from warnings import warn

import torch

from graphs.capture.signature import Batch, leaves
from graphs.capture.step import LossFn
from graphs.errors import PlannerError
from graphs.optimizers import OPTIMIZERS
from graphs.torch_private.core import pytree
from planner.distributed.wrappers import Unwrapped
from planner.training.auto_budget import with_auto_resolved
from planner.training.compile import compile  # noqa: A004
from planner.training.lru import LRUCache
from planner.training.step import PlannedStep

_MOST_PLANS = 32
_BUDGETS = {"budget", "max_overhead"}
_OPTIONS = {p.name for p in signature(compile).parameters.values() if p.kind is Parameter.KEYWORD_ONLY} - _BUDGETS


class BatchPlans:
    """Makes a plan when a batch of new sizes first comes to a model, and keeps the last of them.

    With ``dynamic=True`` among the options there is one step, which sees to the sizes itself.

    Attributes:
        last: the step that was used last; None before the first batch.
    """

    def __init__(self, wrapper: Unwrapped, budget: str | int, options: Mapping[str, Any]) -> None:
        """What every plan is made for, and with.

        Args:
            wrapper: how the model is trained.
            budget: as in ``planner.compile``.
            options: its other keyword arguments.
        """
        self.last: PlannedStep | None = None
        self._wrapper = wrapper
        self._budget = budget
        self._options = dict(options)
        self._steps: LRUCache[Hashable, PlannedStep] = LRUCache(self._options.get("max_plans", _MOST_PLANS))
        self._parameters = list(wrapper.module.parameters())

    def step(self, loss_fn: LossFn | None, batch: Batch, *, optimizer: torch.optim.Optimizer, accumulate: bool) -> PlannedStep:
        """The step for `batch`. Where several processes train, all call this, with batches of the same sizes.

        Args:
            loss_fn, accumulate: as in ``planner.compile``, the same in every call.
            optimizer: whose memory counts, unless the options name another.

        Raises:
            PlannerError: that memory is not known, or the processes' batches differ; or what ``planner.compile`` raises.
        """
        sizes_matter = not self._options.get("dynamic", False)
        key = (_kind(batch, sizes_matter=sizes_matter), tuple(p.requires_grad for p in self._parameters))
        self._check_same(key, batch)
        self.last = self._steps.use(key, lambda: self._made(loss_fn, batch, optimizer, accumulate=accumulate))
        return self.last

    def _check_same(self, key: Hashable, batch: Batch) -> None:
        """A process that planned on its own would wait for the others for ever."""
        ranks = self._wrapper.ranks
        if not ranks.same(key):
            found = "; ".join(f"rank {rank}: {shapes}" for rank, shapes in enumerate(ranks.gather(_shapes(batch))))
            raise PlannerError(
                f"the batches of the processes differ ({found}), but one plan is for all of them: pad to one length, and drop "
                "the last batch"
            )

    def _made(self, loss_fn: LossFn | None, batch: Batch, optimizer: torch.optim.Optimizer, *, accumulate: bool) -> PlannedStep:
        if self.last:
            if self._options.get("cuda_graph", False):
                raise PlannerError(
                    f"a batch of {_shapes(batch)} needs a plan of its own, and CUDA graphs hold the memory of the first: pad "
                    "batches to one size and drop the last, or leave out cuda_graph=True"
                )
            warn(
                f"planning again, for {_shapes(batch)}: batches of one size need one plan (pad them, drop the last), "
                "batches of many sizes dynamic=True",
                stacklevel=4,
            )
        options = {"accumulate": accumulate, **self._options}
        if "optimizer" not in options:
            options["optimizer"] = optimizer_kind(optimizer)
        budget = with_auto_resolved(self._budget, self._wrapper, batch, optimizer)
        made = compile(self._wrapper, loss_fn, batch, budget=budget, **options)
        self._budget = made.plan.budget_bytes  # where it is a share, of the first batch's peak
        return made


def check_options(options: Mapping[str, Any]) -> None:
    """Whether ``planner.compile`` has these keyword arguments besides the budget.

    Raises:
        PlannerError: it has not.
    """
    if unknown := options.keys() - _OPTIONS:
        raise PlannerError(f"unknown option {min(unknown)!r} of planner.compile: choose of {', '.join(sorted(_OPTIONS))}")


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """What ``planner.compile`` calls an optimizer.

    Raises:
        PlannerError: it is none of those whose memory is known.
    """
    found = {_kind_of_group(type(optimizer), group) for group in optimizer.param_groups}
    if len(found) != 1 or None in found:
        raise PlannerError(
            f"what memory {type(optimizer).__name__} takes is not known: name the optimizer that keeps as many copies of the "
            f"parameters, optimizer= one of {', '.join(f'{name!r} ({known.copies})' for name, known in OPTIMIZERS.items())}"
        )
    return str(found.pop())


def _kind_of_group(optimizer: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str | None:
    name = optimizer.__name__
    if getattr(torch.optim, name, None) is not optimizer:
        return None
    return next((kind for kind, known in OPTIMIZERS.items() if known.describes(name, group)), None)


def _kind(batch: Batch, *, sizes_matter: bool) -> Hashable:
    leaves, spec = pytree.tree_flatten(batch)

    def kind(leaf: object) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        return leaf.dtype, leaf.requires_grad, tuple(leaf.shape) if sizes_matter else leaf.dim()

    return str(spec), tuple(map(kind, leaves))


def _shapes(batch: Batch) -> str:
    return ", ".join(str(list(leaf.shape)) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))

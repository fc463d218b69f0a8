"""Plans inside another library's training loop: one for each kind of batch.

Plans are kept by the model's step and the batch: by the batch alone, a second model was trained by the step of the first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch

from planner.capture.signature import Batch, Shapes, format_shapes, list_shapes
from planner.capture.step import LossFn, TrainingStep
from planner.graphs.errors import BudgetError, LimitError, PlannerError, refuse_unknown_options
from planner.graphs.optimizers import MeasuredOptimizer
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.units import format_bytes
from planner.measure.optimizers import find_memory
from planner.progress import OnProgress
from planner.settings.budget import Budget, Bytes, Share
from planner.settings.plan import PlanSettings, Wait
from planner.torch_private.core import pytree
from planner.train.compile.auto_budget import resolve_auto
from planner.train.compile.compile import compile  # noqa: A004
from planner.train.compile.lru import LRUCache
from planner.train.compile.step import PlannedStep
from planner.train.distributed.ranks import agree
from planner.train.distributed.wrappers import Unwrapped

_MOST_PLANS = 32
_MANY_SIZES = 8  # sizes besides the first at which a warning is issued
_SIDE_LIMIT_S = 5.0  # for the solve of a size other than the first
Key = tuple[tuple[Hashable, ...], Shapes]  # all that a plan depends on except sizes; and the sizes
_LIMIT_S = signature(compile).parameters["time_limit_s"].default
_BUDGETS = {"budget", "max_overhead"}
_OPTIONS = {p.name for p in signature(compile).parameters.values() if p.kind is Parameter.KEYWORD_ONLY} - _BUDGETS


class BatchPlans:
    """A cache of plans by the sizes of batches: a plan is made when a batch of new sizes arrives.

    The first size gets the whole time limit. A smaller last batch is left to the step of a larger one. Other sizes run by the
    first schedule that fits, if it may be replaced, are solved for a few seconds, and are not compared with eager PyTorch. With
    ``dynamic=True`` among the options, one step handles all sizes itself.
    """

    def __init__(self, wrapper: Unwrapped, budget: Budget, options: Mapping[str, Any]) -> None:
        """Set the model, the budget and the options that all plans share."""
        self._wrapper = wrapper
        self._asked: Budget = budget
        self._budget: Budget = budget
        self._options = dict(options)
        self.steps: LRUCache[Key, PlannedStep] = LRUCache(self._options.get("max_plans", _MOST_PLANS))
        self._memory: LRUCache[Hashable, str | MeasuredOptimizer] = LRUCache(1)  # of the optimizer, by the trained parameters
        self._uses: Counter[Key] = Counter()
        self._main: tuple[Key, PlannedStep] | None = None
        self._side_sizes = 0
        self._parameters = list(wrapper.module.parameters())

    @property
    def main(self) -> PlannedStep | None:
        """The step for the most frequent size; None before the first batch."""
        return None if self._main is None else self._main[1]

    @property
    def follow_numbers(self) -> bool:
        """True if a step follows the numbers in its batch when they change."""
        excluded = self._options.get("cuda_graph", False) or self._options.get("replan") is False
        return self._wrapper.can_replan and not excluded

    def step(
        self,
        loss_fn: LossFn | None,
        batch: Batch,
        *,
        optimizer: torch.optim.Optimizer,
        accumulate: bool,
        on_progress: OnProgress = None,
    ) -> PlannedStep:
        """Return the step for `batch`. If several processes train, all call this, with batches of the same sizes.

        Args:
            loss_fn: as in ``planner.compile``, the same in every call.
            accumulate: as in ``planner.compile``; a step that accumulates has plans of its own.
            optimizer: the optimizer, whose memory counts, unless the options name another.
            on_progress: shows how the first size is planned, unless the options name another.

        Raises:
            PlannerError: its memory cannot be measured, or the processes' batches differ; or as in ``planner.compile``.
        """
        key = self._find_larger(self._build_key(batch, accumulate=accumulate))
        if not (self._wrapper.can_replan and key in self.steps):  # else the processes agree when the step is called
            agree(self._wrapper.ranks, key, batch)
        step = self.steps.use(
            key, lambda: self._make_step(key, loss_fn, batch, optimizer, accumulate=accumulate, on_progress=on_progress)
        )
        self._uses[key] += 1
        if self._main is None or self._uses[key] >= self._uses[self._main[0]] + (key != self._main[0]):
            self._main = key, step
        return step

    def _build_key(self, batch: Batch, *, accumulate: bool) -> Key:
        """Return the cache key of a plan: structure, dtypes, trained parameters, and sizes unless one plan serves all sizes."""
        leaves, spec = pytree.tree_flatten(batch)
        numbers = (int, float) if self.follow_numbers else ()
        kinds: list[Hashable] = [
            (x.dtype, x.requires_grad, x.dim())
            if isinstance(x, torch.Tensor)
            else (str(type(x)) if type(x) in numbers else repr(x))
            for x in leaves
        ]
        trained = tuple(p.requires_grad for p in self._parameters)
        return (accumulate, str(spec), *kinds, trained), () if self._options.get("dynamic", False) else list_shapes(batch)

    def _find_larger(self, key: Key) -> Key:
        """Return the key of a step that runs smaller batches of this kind itself; `key` if it has a step, or there is none."""
        larger = (other for other, step in self.steps.items() if other[0] == key[0] and step.takes(key[1], other[1]))
        return key if key in self.steps else next(larger, key)

    def _make_step(
        self,
        key: Key,
        loss_fn: LossFn | None,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: bool,
        on_progress: OnProgress,
    ) -> PlannedStep:
        if self._main is not None and self._options.get("cuda_graph", False):
            raise PlannerError(
                f"a batch of {format_shapes(batch)} needs a plan of its own, and CUDA graphs hold the memory of the first: pad "
                "batches to one size and drop the last, or leave out cuda_graph=True"
            )
        options = {"accumulate": accumulate, "optimizer": optimizer, **self._options}
        trained, step = key[0][-1], TrainingStep(self._wrapper.module, loss_fn)
        options["optimizer"] = self._memory.use(trained, lambda: find_memory(options["optimizer"], step))
        budget: Any = resolve_auto(self._budget, self._wrapper, batch, optimizer)
        make = partial(compile, self._wrapper, loss_fn, batch, budget=budget)
        if any(kind == key[0] for kind, _ in self._uses):
            return self._make_side_step(make, options, batch)
        made = make(**{"on_progress": on_progress, **options})
        self._budget = Bytes(made.plan.budget_bytes)  # a share refers to the first batch's peak
        return made

    def _make_side_step(self, make: Callable[..., PlannedStep], options: Mapping[str, Any], batch: Batch) -> PlannedStep:
        """Return a step for another size than the first, solved for a shorter time."""
        self._side_sizes += 1
        if self._side_sizes == _MANY_SIZES:
            dynamic = ", or plan with dynamic=True" if self._wrapper.can_replan else ""
            warn_caller(
                f"batches have come in {_MANY_SIZES + 1} sizes so far, and each takes seconds to plan: pad them to few lengths "
                f"(pad_to_multiple_of=64, say){dynamic}",
            )
        limit_s = options.get("time_limit_s", _LIMIT_S)
        side = {**options, "time_limit_s": min(limit_s, _SIDE_LIMIT_S), "compare_eager": False}
        if PlanSettings(wait=Wait.of(options.get("wait")), swap=options.get("swap", "exact")).goes_on:
            side |= {"wait": 0, "passes": 1}  # a better plan may replace it, for times that are measured in steps
        try:
            try:
                return make(**side)
            except LimitError:
                return make(**{**side, "time_limit_s": limit_s})
        except (BudgetError, LimitError) as error:
            raise type(error)(f"for a batch of {format_shapes(batch)}{self._share()}: {error}") from error

    def _share(self) -> str:
        """Return the part of a message on a budget that is a share."""
        if not isinstance(self._asked, Share) or not isinstance(self._budget, Bytes):
            return ""
        return f", whose budget is {self._asked} of the first batch's peak, {format_bytes(self._budget.size_bytes)}"


def check_options(options: Mapping[str, Any]) -> None:
    """Raise PlannerError unless ``planner.compile`` has these keyword arguments, apart from the budget."""
    refuse_unknown_options(options, _OPTIONS, "planner.compile")

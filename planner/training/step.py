"""What is called in the training loop."""

import os
from collections.abc import Callable
from typing import Any

from graphs.capture.signature import Batch, as_leaves
from graphs.errors import PlannerError
from graphs.io.files import check_writable, write_text
from graphs.ir import Graph
from graphs.plan import Plan
from planner.choices import with_recorded
from planner.report.chrome_trace import chrome_trace
from planner.report.page import page
from planner.report.timeline import Timeline


class PlannedStep:
    """A training step that runs as its plan says: ``loss = step(*batch); loss.backward()``.

    Where the step was planned for a mapping it is ``step(**batch)``.

    Attributes:
        plan: the schedule, what it was planned for, predicted and measured.
        measured: the graph that was planned, with the times of its ops; None if the plan was loaded from a cache.
    """

    def __init__(
        self,
        plan: Plan,
        run: Callable[..., Any],
        measured: Graph | None,
        refreshed: "Callable[[Batch], PlannedStep] | None" = None,
    ) -> None:
        """`refreshed` makes the step that a batch says anew how lossy it may be; None where nothing is lossy."""
        self.plan = plan
        self.measured = measured
        self._run = run
        self._refreshed = refreshed

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the loss of a batch, ready for ``backward()``; with what else the loss function returns, detached.

        Under ``torch.no_grad()`` the step evaluates: the loss of a batch of any size, in train or eval mode, by eager PyTorch.

        Raises:
            MismatchError: other shapes, dtypes or values than planned for, or the model's mode has changed.
        """
        return self._run(*args, **kwargs)

    def refresh_sensitivity(self, *args: object, **kwargs: object) -> None:
        """Measure anew how lossy compressed keeping is, on a batch and with the parameters as they are, and plan again with that.

        Times are not measured again. The batch is given as calls of the step are.

        Raises:
            PlannerError: the step was planned without the option ``compress``, from a cache, on several processes, or with
                ``replan=True``.
            InfeasibleError, LimitError, BudgetError: as ``planner.compile``.
        """
        if self._refreshed is None:
            raise PlannerError(
                "nothing is known of how lossy this step is: only a step that planner.compile has made in this process with "
                "options=['compress:4'], without replan=True, can be refreshed"
            )
        batch: Batch = kwargs or args
        step = self._refreshed(as_leaves(batch))
        self.plan, self.measured, self._run, self._refreshed = step.plan, step.measured, step._run, step._refreshed

    def report(self, path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None) -> None:
        """Write a page that shows what the plan does, and to `trace` the same as a Chrome trace: docs/report.md.

        Raises:
            OutputError: a file cannot be written.
            PlannerError: the plan was loaded from a cache, so that the times of its ops are not known.
        """
        if self.measured is None:
            raise PlannerError(
                "the plan was loaded from a cache, and its ops were not measured: there are no times to show; call "
                "planner.compile without cache= for a report"
            )
        timeline = Timeline(with_recorded(self.measured, self.plan.settings), self.plan)
        targets = {path: page} if trace is None else {path: page, trace: chrome_trace}
        for target in targets:
            check_writable(target)
        for target, make in targets.items():
            write_text(target, make(timeline))

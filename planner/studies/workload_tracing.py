"""Graphs of models that are named in one line. Imports torch when it traces."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.capture.workload import workload
from planner.capture.workload.workload import ModelSpec
from planner.settings.plan import PlanSettings

if TYPE_CHECKING:
    from planner.capture.workload.models import Workload
    from planner.graphs.ir import Graph
    from planner.progress import View


@dataclass(frozen=True, slots=True)
class Tracing:
    """Settings for building and tracing models.

    Attributes:
        settings: of the trace; with a roofline nothing is allocated.
        device, seed: as in ``workload.load``.
    """

    settings: PlanSettings = field(default_factory=PlanSettings)
    device: str = "cpu"
    seed: int = 0

    def load(self, model: ModelSpec) -> "Workload":
        """Return the model, its loss function and a batch; fake with a roofline.

        Raises:
            ModelError: the model cannot be built.
        """
        fake, as_on_cuda = self.settings.roofline is not None, self.settings.roofline not in (None, "cpu")
        return workload.load(model, device=self.device, seed=self.seed, fake=fake, as_on_cuda=as_on_cuda)

    def trace_graph(self, model: ModelSpec, *, on_progress: "View | None" = None) -> "Graph":
        """Return the graph of the training step of `model`; `on_progress` as in ``tracing.trace``.

        Raises:
            ModelError: the model cannot be built.
            TraceError: the step cannot be captured.
        """
        built = self.load(model)
        from planner.measure import tracing

        return tracing.trace_workload(built, replace(self.settings, name=str(model)), on_progress)

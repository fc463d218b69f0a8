"""Graphs of models that are named in one line. Imports torch when it traces."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.workload import workload
from planner.workload.workload import ModelSpec

if TYPE_CHECKING:
    from graphs.ir import Graph
    from planner.models import Workload
    from planner.progress import View


@dataclass(frozen=True, slots=True)
class Tracing:
    """Settings for building and tracing models.

    Attributes:
        device, seed: as in ``workload.load``.
        roofline, optimizer, accumulate, passes, measure_link, options, other_devices: as in ``tracing.trace``; with a roofline
            nothing is allocated.
    """

    device: str = "cpu"
    roofline: str | None = None
    optimizer: str = "none"
    accumulate: bool = False
    passes: int = 5
    seed: int = 0
    measure_link: bool = False
    options: tuple[str, ...] = ()
    other_devices: tuple[str, ...] = ()

    def load(self, model: ModelSpec) -> "Workload":
        """Return the model, its loss function and a batch; fake with a roofline.

        Raises:
            ModelError: the model cannot be built.
        """
        fake, as_on_cuda = self.roofline is not None, self.roofline not in (None, "cpu")
        return workload.load(model, device=self.device, seed=self.seed, fake=fake, as_on_cuda=as_on_cuda)

    def graph(self, model: ModelSpec, *, on_progress: "View | None" = None) -> "Graph":
        """Return the graph of the training step of `model`; `on_progress` as in ``tracing.trace``.

        Raises:
            ModelError: the model cannot be built.
            TraceError: the step cannot be captured.
        """
        built = self.load(model)
        from planner import tracing

        return tracing.trace(
            *built,
            optimizer=self.optimizer,
            accumulate=self.accumulate,
            roofline=self.roofline,
            passes=self.passes,
            measure_link=self.measure_link,
            name=str(model),
            options=self.options,
            other_devices=self.other_devices,
            on_progress=on_progress,
        )

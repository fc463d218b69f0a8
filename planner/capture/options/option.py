"""Options that are found among the calls of a captured step. The finders are imported lazily, since they need torch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from planner.graphs.ir import Graph
from planner.graphs.options.option import Feature, Option

if TYPE_CHECKING:
    from planner.capture.lowering.lower import Capture
    from planner.capture.replay import RealStep

# For options whose ops call operators of eager PyTorch.
EAGER_KERNELS = MappingProxyType(
    {Feature.INDUCTOR: "the option replaces kernels of eager PyTorch; leave it out, or use kernels='eager'"}
)


def import_late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls the function `name` of `module`, which is imported when it is first called."""
    return lambda *args: getattr(import_module(module), name)(*args)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOption(Option):
    """An option that is found in a captured step: its graph then contains it.

    Attributes:
        apply: returns the step with its ops, whose targets begin with the option's name: ``NAME.more``. Their times are not
            measured.
        useless_ops: returns the ids of its useless ops in a step with times.
        measure: returns the graph of a step with the uses of a limited resource, measured on the real step, or modelled if that
            is None; None if its ops use none.
    """

    apply: "Callable[[Capture], Capture]"
    useless_ops: "Callable[[Capture], Collection[int]]" = lambda _: ()
    measure: "Callable[[Capture, RealStep | None], Graph] | None" = None

    def accepts(self, capture: "Capture") -> str:
        """Return the reason for which the option cannot be applied to `capture`; "" if it can."""
        return self.describe_conflict_with(Feature.INDUCTOR) if capture.whole is not None else ""

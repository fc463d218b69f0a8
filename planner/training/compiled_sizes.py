"""Inductor compiles other kernels for each size, so that nothing of one size says what another one needs.

Each is compiled and measured for itself when it comes: kernel by kernel, on tensors that are made for it, so that the first
batch of a size stays within the budget too, though it may not fit with everything kept.
"""

from dataclasses import replace

from graphs.capture.lower import Capture
from graphs.capture.signature import Batch
from graphs.cost.link import MEASURED_LINK
from graphs.cost.scaling import Sizes
from graphs.ir import Graph
from planner.training.compiler import Compiler
from planner.training.dynamic import OtherSizes, solved_alone
from planner.training.inductor_compiler import InductorCompiler
from planner.training.step import PlannedStep


class CompiledSizes(OtherSizes):
    """Compiles each size as ``torch.compile`` does by default: bits of other variants are not compared with it at each."""

    def __init__(self, compiler: Compiler, batch: Batch, profiled: Capture, budget_bytes: int, max_plans: int) -> None:
        """For `profiled`, the step on the first `batch`; all sizes may vary, and no more is kept than the steps."""
        del batch, max_plans
        assert isinstance(compiler, InductorCompiler)
        self._compiler = compiler
        self._budget_bytes = budget_bytes
        provenance = profiled.graph.provenance
        self._link = {MEASURED_LINK: provenance[MEASURED_LINK]} if MEASURED_LINK in provenance else {}

    def step(self, batch: Batch) -> tuple[Capture, PlannedStep, Sizes]:
        """See ``OtherSizes``."""
        captured = self._compiler.capture_alone(batch)
        graph = captured.graph
        captured = replace(captured, graph=Graph(graph.ops, graph.tensors, graph.kept, {**graph.provenance, **self._link}))
        return captured, solved_alone(self._compiler, captured, batch, self._budget_bytes), ()

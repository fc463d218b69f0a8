"""The compiler of planned steps with Inductor's kernels: of several variants of a step, it keeps the fastest plan."""

import warnings
from dataclasses import dataclass, replace

from planner.capture.kernels.variants import CompileVariant
from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch
from planner.graphs.errors import BudgetError, EagerWarning, LimitError, TraceError
from planner.graphs.ir import Graph
from planner.plans.plan import Plan
from planner.plans.solve import compute_eager_peak_bytes
from planner.plans.summary import summarize
from planner.settings.budget import Budget, Bytes, Share
from planner.settings.option_settings import RECOMPUTATION
from planner.train.compile.compiler import Compiler
from planner.train.compile.step import PlannedStep

_WORTH_IT = 0.01  # of the step: cost of recomputation from which other variants are compiled


@dataclass(frozen=True, slots=True)
class InductorCompiler(Compiler):
    """A ``Compiler`` whose reference is ``torch.compile`` in place of eager PyTorch."""

    def _capture_here(self, batch: Batch) -> Capture:
        """Return the step on `batch` as ``torch.compile`` compiles it."""
        return self._capture(batch, CompileVariant.DEFAULT)

    def adapt_capture(self, plan: Plan, captured: Capture, batch: Batch) -> Capture:
        """Return the step on `batch` with the variant that `plan` was made for; see ``Compiler``."""
        variant = CompileVariant(plan.graph.provenance.variant)
        of_plan = captured if variant is CompileVariant.DEFAULT else self._compile_other(variant, captured, batch)
        return Compiler.adapt_capture(self, plan, of_plan, batch)

    def plan(self, captured: Capture, batch: Batch, budget: Budget) -> PlannedStep:
        """Return the fastest step on `batch` within the budget; `captured` is what ``capture`` returned, profiled.

        If the default variant of ``torch.compile`` fits without recomputation that costs time, it is returned. Otherwise other
        variants are compiled and planned, and each that gives the same bits is timed against ``torch.compile``.
        """
        whole_bytes = summarize(captured.graph).keep_everything_peak_bytes
        if isinstance(budget, Share):
            # Shares refer to the peak of eager PyTorch, whose kernels are measured for that.
            plain = replace(self.settings, options=RECOMPUTATION, measure_link=False)
            eager = replace(self, settings=plain).profile(self._capture(batch, None), batch)
            whole_bytes = compute_eager_peak_bytes(eager.graph, captured.graph, self.settings.memory)
            captured = _set_shares(whole_bytes, captured)
        wanted = Bytes(budget.resolve(whole_bytes))
        steps: list[PlannedStep] = []
        failure: BudgetError | LimitError | None = None
        try:
            steps.append(self.solve(captured, batch, wanted))
            if steps[0].plan.overhead <= _WORTH_IT:
                return steps[0]
        except (BudgetError, LimitError) as error:
            failure = error
        comparing = replace(self, compare_eager=True)
        for variant in _list_others(captured.graph) if self.wrapper.together.is_alone else ():  # else there is no reference
            try:
                other = _set_shares(whole_bytes, self.profile(self._compile_other(variant, captured, batch), batch))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", EagerWarning)  # a variant that differs is rejected
                    step = comparing.solve(other, batch, wanted)
            except (BudgetError, LimitError, TraceError):
                continue
            if step.plan.eager is not None and step.plan.eager.identical:
                steps.append(step)
        if not steps:
            assert failure is not None
            raise failure
        return min(steps, key=_compute_relative_time)

    def _compile_other(self, variant: CompileVariant, captured: Capture, batch: Batch) -> Capture:
        """Return the step compiled as another variant; its reference is still ``torch.compile``'s own."""
        return replace(self._capture(batch, variant), whole=captured.whole)


def _set_shares(whole_bytes: int, captured: Capture) -> Capture:
    """Return `captured` with the bytes that budgets given as shares refer to in its provenance."""
    graph = captured.graph
    return replace(captured, graph=replace(graph, provenance=graph.provenance.record(shares_of_bytes=whole_bytes)))


def _list_others(graph: Graph) -> list[CompileVariant]:
    """Return the variants that may be faster than the default one with this `graph`."""
    found = [CompileVariant.KEEP]
    if not any(op.random for op in graph.ops):  # with a memory budget, PyTorch draws other numbers in the backward pass
        found.insert(0, CompileVariant.BUDGET)
    if any(not (op.recomputable or op.mutates or op.random) for op in graph.ops):
        found.insert(0, CompileVariant.WHOLE)
    return found


def _compute_relative_time(step: PlannedStep) -> float:
    """Return the measured time of a step as a multiple of ``torch.compile``'s; the predicted seconds if it was not measured."""
    eager = step.plan.eager
    return step.plan.time_s if eager is None or eager.overhead is None else 1 + eager.overhead

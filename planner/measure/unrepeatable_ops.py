"""Ops whose bits differ between two executions although they do not declare it, mostly since they draw random numbers.

PyTorch's own random ops have the tag ``nondeterministic_seeded``. A custom operator may draw without declaring it: from
PyTorch's generators, NumPy's, Python's, or its own. Executing it twice finds that out.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch

from planner.capture.checksum import compute_checksum
from planner.capture.frontend.random_states import RandomStates
from planner.capture.lowering.lower import Capture
from planner.capture.rewrites.outputs import KNOWN_NAMESPACES
from planner.graphs.ir import Op
from planner.graphs.provenance import Provenance
from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private.core import OpOverload


def is_custom(capture: Capture, op: Op) -> bool:
    """Return True if `op` calls an operator that is not PyTorch's."""
    values = (statement.value for statement in capture.program.calls[op.id].statements)
    targets = (value.target for value in values if value is not None)
    return any(isinstance(target, OpOverload) and target.namespace not in KNOWN_NAMESPACES for target in targets)


def has_undeclared_draws(op: Op, states: RandomStates, device: torch.device) -> bool:
    """Return True if `op`, executed since the random states were `states`, has drawn from a generator without declaring it."""
    # A declared random op draws from the generator of its device, whose state is saved.
    return bool(states.find_changed() - ({device.type} if op.random else set()))


def compute_checksums(made: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the checksums of the outputs of an op."""
    return [int(compute_checksum(value)) for value in made if value is not None]


def mark_executed_once(capture: Capture, ops: Collection[int]) -> Capture:
    """Return `capture` with these ops of the program marked so that no schedule recomputes or reorders them."""
    if not ops:
        return capture
    graph = capture.graph
    marked = tuple(replace(op, recomputable=False, random=True) if op.id in ops else op for op in graph.ops)
    provenance = graph.provenance.record(unrepeatable_ops=sorted(ops))
    return replace(capture, graph=replace(graph, ops=marked, provenance=provenance))


def mark_recorded_ops(capture: Capture, provenance: Provenance) -> Capture:
    """Return `capture` with those ops marked as executed once that a profile of the same step recorded in `provenance`."""
    return mark_executed_once(capture, frozenset(provenance.unrepeatable_ops))


def mark_custom_ops(capture: Capture) -> Capture:
    """Return `capture` with all custom operators marked as executed once, where none is executed to check that."""
    custom = [op for op in capture.graph.program if is_custom(capture, op)]
    _warn(custom, "is not executed with a roofline, so that it is not known whether it draws random numbers")
    return mark_executed_once(capture, {op.id for op in custom})


def warn_of_unrepeatable_ops(ops: Iterable[Op]) -> None:
    """Warn about ops that cannot be recomputed."""
    _warn(
        [op for op in ops if op.recomputable],
        "returns different bits when it is executed again, for example because it draws random numbers",
        ". If all its random numbers come from PyTorch's generator for its device, define it with "
        "tags=(torch.Tag.nondeterministic_seeded,), and planner.compile can recompute it",
    )


def _warn(ops: Sequence[Op], why: str, advice: str = "") -> None:
    for target in dict.fromkeys(op.target for op in ops):
        same = [op for op in ops if op.target == target]
        where = f" in {same[0].module}" if same[0].module else ""
        more = f", and {len(same) - 1} others that call the same" if len(same) > 1 else ""
        warn_caller(
            f"op {same[0].name} ({target}){where}{more}: it {why}. It is computed once, and kept until it is read for the last "
            f"time{advice}",
        )

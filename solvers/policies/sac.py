"""Selective activation checkpointing (SAC, ``torch.utils.checkpoint`` with a policy per op): save lists.

The outputs of listed ops of the forward pass are saved; the rest of a region is computed again in the backward.
``sac`` saves matmuls, convolutions and attention, or a list of your own; ``sac-every-second`` skips every second
matmul (torchtitan's "selective op"); ``sac-attention`` saves attention only.

Regions are the numbered modules, as in ``checkpoint_blocks``, where there are any, and the forward pass as a whole.
A region is computed again at once, as in eager PyTorch, or each tensor when it is needed, as ``torch.compile`` does;
the fastest schedule that fits is taken.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import StrEnum

from graphs.ir import Graph, Op, Phase
from solvers.policies.checkpoint_blocks import block_of, levels
from solvers.policies.replay import Task, Trial, answer, failure, recompute_groups
from solvers.policies.torch_ops import ATTENTION, COMPUTE_INTENSIVE, MATMUL, is_one_of
from solvers.result import Progress, Result


class Rule(StrEnum):
    """What is saved, by the name in the registry."""

    LISTED = "sac"
    EVERY_SECOND = "sac-every-second"
    ATTENTION = "sac-attention"


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    tolerance: float = 1e-3,
    time_limit_s: float = 3600.0,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    rule: str = Rule.LISTED,
    save: Sequence[str] = (),
) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when what is saved does not fit, or no op is on the list.

    Args:
        rule: what is saved; see ``Rule``.
        save: for the rule ``sac``, targets of ops, such as ``aten.mm.default`` or ``mm``, instead of its own list.

    Raises:
        ValueError: no such rule.
    """
    task = Task(graph, budget_bytes, str(rule), tolerance, time_limit_s, on_progress, should_stop)
    settings = {"rule": str(rule), **({"save": list(save)} if save else {})}
    ops = saved_ops(graph, Rule(rule), frozenset(save))
    if not ops:
        why = f"no op of the forward pass is one of those that {rule} saves: planner info shows what ops there are"
        return failure(task, why, settings=settings)
    saved = frozenset(t for op in ops for t in op.outputs)
    trials = (
        Trial(recompute_groups(graph, groups, saved=saved, at_once=at_once), {"region": name, "at_once": at_once})
        for name, groups in regions(graph)
        for at_once in (True, False)
    )
    return answer(
        task,
        trials,
        what=f"saving the outputs of {len(ops)} ops",
        settings=settings,
    )


def saved_ops(graph: Graph, rule: Rule, save: frozenset[str] = frozenset()) -> list[Op]:
    """The forward ops whose outputs `rule` saves."""
    names = {Rule.LISTED: save or COMPUTE_INTENSIVE, Rule.EVERY_SECOND: COMPUTE_INTENSIVE, Rule.ATTENTION: ATTENTION}[rule]
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD and is_one_of(op, names)]
    if rule is not Rule.EVERY_SECOND:
        return ops
    matmuls = [op for op in ops if is_one_of(op, MATMUL)]
    skipped = {op.id for op in matmuls[1::2]}
    return [op for op in ops if op.id not in skipped]


def regions(graph: Graph) -> Iterator[tuple[str, list[Hashable]]]:
    """Names of ways to divide the forward pass, with the region of each op (None: not checkpointed)."""
    for level in range(1, levels(graph) + 1):
        yield f"blocks of level {level}", [block_of(op.module, level) or None for op in graph.ops]
    yield "forward pass", [op.phase for op in graph.ops]

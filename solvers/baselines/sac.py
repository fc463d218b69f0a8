"""Selective activation checkpointing (SAC, ``torch.utils.checkpoint`` with a policy per op): save lists.

The outputs of listed forward ops are saved; the rest of a region is recomputed in the backward pass. A list consists of kinds of
expensive ops: attention, matmuls, convolutions, of the last two all or every second one (torchtitan's "selective op" skips every
second matmul). ``sac-attention`` saves attention, ``sac-every-second`` all kinds but every second matmul, and ``sac`` tries all
such lists, including the empty one, or a given list.

Regions are blocks, as in ``checkpoint_blocks``, if there are any, and the forward pass as a whole. A region is recomputed at
once, as in eager PyTorch, or each tensor when it is needed, as ``torch.compile`` does; the fastest schedule that fits is
returned.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.graphs.ir import Graph, Op, Phase
from planner.solvers.baselines.common.blocks import find_blockings
from planner.solvers.baselines.common.recomputation import recompute_groups
from planner.solvers.baselines.common.torch_ops import (
    ATTENTION,
    COMPUTE_INTENSIVE,
    CONVOLUTION,
    MATMUL,
    UPSAMPLING,
    extract_base_name,
    is_one_of,
)
from planner.solvers.baselines.common.verdicts import Candidate, answer, build_failure
from planner.solvers.request import Request
from planner.solvers.result import Reason, Result


class SacRule(StrEnum):
    """The saved ops, by the name in the registry."""

    LISTED = "sac"
    EVERY_SECOND = "sac-every-second"
    ATTENTION = "sac-attention"


@dataclass(frozen=True, slots=True)
class SaveList:
    """A list of ops whose outputs are saved.

    Attributes:
        ops: names, or targets, of ops.
        halved: sets of them, of each of which the first, the third and so on are saved.
    """

    name: str
    ops: frozenset[str]
    halved: tuple[frozenset[str], ...] = ()

    def has(self, target: str) -> bool:
        """Return True if ops with `target` are listed."""
        return target in self.ops or extract_base_name(target) in self.ops


LISTS = {
    SacRule.LISTED: SaveList("attention + matmul + convolution", COMPUTE_INTENSIVE),
    SacRule.EVERY_SECOND: SaveList("attention + every second matmul + convolution", COMPUTE_INTENSIVE, (MATMUL,)),
    SacRule.ATTENTION: SaveList("attention", ATTENTION),
}
# PyTorch lists upsampling among compute-intensive ops, like convolutions.
_KINDS = {"attention": ATTENTION, "matmul": MATMUL, "convolution": CONVOLUTION | UPSAMPLING}
_HALVED = ("matmul", "convolution")


def save_lists(targets: Iterable[str]) -> list[SaveList]:
    """Return the lists of the kinds of ops in the graph: the longest first, last the empty one.

    Args:
        targets: of the forward ops, with repetitions.
    """
    names = [extract_base_name(target) for target in targets]
    lists = [SaveList("", frozenset())]
    for kind, ops in _KINDS.items():
        count = sum(name in ops for name in names)
        ways: list[tuple[str, frozenset[str], tuple[frozenset[str], ...]]] = [(kind, ops, ())] if count else []
        if count > 1 and kind in _HALVED:
            ways.append((f"every second {kind}", ops, (ops,)))
        lists = [
            *(_join_lists(known, *way) for known in lists for way in ways),
            *lists,
        ]
    return [replace(known, name=known.name or "nothing") for known in lists]


def _join_lists(known: SaveList, name: str, ops: frozenset[str], halved: tuple[frozenset[str], ...]) -> SaveList:
    return SaveList(f"{known.name} + {name}" if known.name else name, known.ops | ops, (*known.halved, *halved))


@dataclass(frozen=True, slots=True)
class SacParams:
    """Parameters of the method.

    Attributes:
        save: for the rule ``sac``, targets of ops, such as ``aten.mm.default`` or ``mm``, instead of its own lists.
    """

    save: tuple[str, ...] = ()


def solve(request: Request, *, rule: str = SacRule.LISTED) -> Result:
    """Return the fastest schedule that fits; LIMIT if none does, or the method does not apply.

    Args:
        request: its parameters are ``SacParams``.
        rule: the saved ops; see ``SacRule``.

    Raises:
        ValueError: no such rule.
    """
    save = frozenset(request.get_params(SacParams()).save)
    settings = {"rule": str(rule), **({"save": sorted(save)} if save else {})}
    if not list_saved_ops(request.graph, SacRule(rule), save):
        why = (
            f"{rule} does not apply: no op of the forward pass is one of those that {rule} saves; "
            "planner info shows what ops there are"
        )
        return build_failure(request, str(rule), why, Reason.INAPPLICABLE, settings=settings)
    return answer(
        request,
        str(rule),
        _generate_trials(request.graph, SacRule(rule), save),
        what="selective checkpointing",
        settings=settings,
    )


def _generate_trials(graph: Graph, rule: SacRule, save: frozenset[str]) -> Iterator[Candidate]:
    """Yield the schedules of every list in every region, lists that save the same ops once."""
    tuned = rule is SacRule.LISTED and not save
    forward = [op.target for op in graph.ops if op.phase is Phase.FORWARD]
    ways = list(generate_regions(graph))
    tried: set[frozenset[int]] = set()
    for save_list in save_lists(forward) if tuned else [_list_of(rule, save)]:
        saved = frozenset(t for op in select_listed_ops(save_list, graph) for t in op.outputs)
        if saved in tried:
            continue
        tried.add(saved)
        for settings, groups in ways:
            for at_once in (True, False):
                schedule = recompute_groups(graph, groups, saved=saved, at_once=at_once)
                yield Candidate(schedule, {"saves": save_list.name, **settings, "at_once": at_once})


def _list_of(rule: SacRule, save: frozenset[str]) -> SaveList:
    return SaveList(", ".join(sorted(save)), save) if rule is SacRule.LISTED and save else LISTS[rule]


def list_saved_ops(graph: Graph, rule: SacRule, save: frozenset[str] = frozenset()) -> list[Op]:
    """Return the forward ops whose outputs `rule` saves; for several lists, those of the longest."""
    return select_listed_ops(_list_of(rule, save), graph)


def select_listed_ops(save_list: SaveList, graph: Graph) -> list[Op]:
    """Return the forward ops whose outputs `save_list` saves."""
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD and save_list.has(op.target)]
    skipped = {op.id for half in save_list.halved for op in [op for op in ops if is_one_of(op, half)][1::2]}
    return [op for op in ops if op.id not in skipped]


def generate_regions(graph: Graph) -> Iterator[tuple[Mapping[str, object], Sequence[Hashable]]]:
    """Yield divisions of the forward pass, with the region of each op (None: not checkpointed)."""
    for way in find_blockings(graph):
        yield way.settings, way.blocks
    yield {"region": "forward pass"}, [op.phase for op in graph.ops]

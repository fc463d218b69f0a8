"""Chunks: long rows are computed in parts, so that only a part is in memory.

For each stretch of the step that is computed by rows (``chunks.stretches``), such as the loss head of a language model,
alternatives are added: one op for the forward pass; for the backward pass one that recomputes the long rows of the forward pass,
and one that reads them. Each is added with every chunk count in ``COUNTS``. Sums over rows are added up in another order, and
differ by rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from graphs.ir import Graph
from planner.capture.lowering.lower import Capture
from planner.capture.options.added import Additions
from planner.capture.options.chunks.body import Body, CombinedResult, InChunks, sliced
from planner.capture.options.chunks.stretches import Stretch, StretchFinder
from planner.capture.options.differing import differing
from planner.capture.rewrites.outputs import storage

COUNTS = (2, 4, 8, 16)
TARGET = "chunks"  # the prefix of the ops' targets


@dataclass(frozen=True, slots=True)
class _StandIn:
    """Alternatives for the ops of one pass in the stretch that begins at `seed`; `kind` names the alternative."""

    seed: str
    kind: str
    stretch: Stretch
    body: Body


def chunked(capture: Capture) -> Capture:
    """Return `capture` with alternatives for its long stretches in 2, 4, 8 and 16 chunks; their times are not measured."""
    finder, additions = StretchFinder(capture), Additions(capture)
    for found in [found for pair in finder.find() for found in _stand_ins(capture, finder, *pair)]:
        rows, sizes = found.stretch.rows, set[int]()
        for count in COUNTS:
            size = -(-rows // count)
            if count <= rows and size not in sizes:
                sizes.add(size)
                _add(additions, found, count, InChunks(rows, size, found.body.given, found.body.results, found.body.of))
    return additions.captured()


def _stand_ins(capture: Capture, finder: StretchFinder, forward: Stretch, backward: Stretch | None) -> Iterator[_StandIn]:
    seed = capture.graph.ops[min(forward.ops)].name
    if (found := _stand_in(capture, seed, "forward", forward, ())) is not None:
        yield found
    if backward is None:
        return
    again = _needed(finder, forward, backward)
    for kind, before in (("backward", again), ("backward_kept", ())):
        if (found := _stand_in(capture, seed, kind, backward, before)) is not None:
            yield found


def _stand_in(capture: Capture, seed: str, kind: str, stretch: Stretch, before: Sequence[fx.Node]) -> _StandIn | None:
    """Return the alternative for a stretch; None if rows of a result cannot be written by slices."""
    results = list(_results(capture.graph, capture, stretch))
    nodes = [*before, *(stretch.ops[op] for op in sorted(stretch.ops))]
    return _StandIn(seed, kind, stretch, Body(stretch, nodes, results)) if all(map(sliced, results)) else None


def _results(graph: Graph, capture: Capture, stretch: Stretch) -> Iterator[CombinedResult]:
    """Yield the results of `stretch` that are read elsewhere, except long rows."""
    for op in sorted(stretch.ops):
        node = stretch.ops[op]
        call = stretch.calls[node]
        for item, (t, path) in enumerate(capture.program.calls[op].outputs):
            result = CombinedResult(node, path, call.makes[item], call.mean and item == 0, call.elements)
            read = t in graph.kept or any(p not in stretch.ops for p in graph.consumers[t] if p < len(graph.program))
            if call.mean or (read and not stretch.makes_long(node, item, result.value)):
                yield result


def _needed(finder: StretchFinder, forward: Stretch, backward: Stretch) -> list[fx.Node]:
    """Return the ops of `forward` needed to recompute the long rows that `backward` reads, in order."""
    maker = {t: op for op in forward.ops for t in finder.graph.ops[op].outputs}
    waiting = [t for t in finder.long(forward) if any(p in backward.ops for p in finder.graph.consumers[t])]
    needed: set[int] = set()
    while waiting:
        op = maker.get(waiting.pop())
        if op is not None and op not in needed:
            needed.add(op)
            waiting += finder.graph.ops[op].inputs
    return [forward.ops[op] for op in sorted(needed)]


def _add(additions: Additions, found: _StandIn, count: int, called: InChunks) -> None:
    """Add the alternative `found` in `count` chunks."""
    capture, ops = additions.capture, tuple(sorted(found.stretch.ops))
    stood_for = [capture.graph.ops[op] for op in ops]
    made = [additions.tensor_of[storage(result.value)] for result in called.results]
    additions.add_op(
        called,
        [given.node for given in called.given],
        like=stood_for[0],
        name=f"{found.seed}_{found.kind}_in_{count}",
        target=f"{TARGET}.{found.kind}.{count}",
        outputs=made,
        replaces=ops,
        recomputable=all(p.recomputable for p in stood_for),
        differs=differing(capture, made, called.rounds((False,) * len(made))),
    )

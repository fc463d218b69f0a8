"""Chunks: long rows are computed in parts, so that only a part is in memory.

For each stretch of the step that is computed by rows (``chunks.stretches``), such as the loss head of a language model,
alternatives are added: one op for the forward pass; for the backward pass one that recomputes the long rows of the forward pass,
and one that reads them. Each is added with every chunk count in ``COUNTS``. Sums over rows are added up in another order, and
differ by rounding.

All counts but the first are needed. Solved to the optimum on the roofline of an H200, GPT-2 with 12 layers at half of its peak
takes 2.7% longer with 16 chunks alone, and 0.5% longer with 8 and 16; with a head of 100,000 classes it is 0.5% and 0.2%. The
solves of the ablation of options (results/options/ablation.md) are too short to find schedules with fewer than 16.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.options.additions import Additions
from planner.capture.options.chunks.body import Body, CombinedResult, InChunks, is_sliced
from planner.capture.options.chunks.stretches import Stretch, StretchFinder
from planner.capture.rewrites.outputs import get_storage
from planner.graphs.walks import walk

COUNTS = (2, 4, 8, 16)
TARGET = "chunks"  # the prefix of the ops' targets


def find_chunks(capture: Capture) -> Capture:
    """Return `capture` with alternatives for its long stretches in 2, 4, 8 and 16 chunks; their times are not measured."""
    finder, additions = StretchFinder(capture), Additions(capture)
    for forward, backward in finder.find():
        seed = capture.graph.ops[min(forward.ops)].name
        _add(additions, seed, "forward", forward, ())
        if backward is not None:
            _add(additions, seed, "backward", backward, _find_needed(finder, forward, backward))
            _add(additions, seed, "backward_kept", backward, ())
    return additions.build_capture()


def _add(additions: Additions, seed: str, kind: str, stretch: Stretch, before: Sequence[fx.Node]) -> None:
    """Add alternatives for the ops of `stretch`, in chunks, unless rows of a result cannot be written by slices.

    Args:
        seed: name of the first op of the stretch or, in the backward pass, of the stretch before.
        before: ops of the stretch before to recompute.
    """
    capture, ops = additions.capture, tuple(sorted(stretch.ops))
    results = list(_iterate_results(capture, stretch))
    if not all(map(is_sliced, results)):
        return
    body = Body(stretch, [*before, *(stretch.ops[op] for op in ops)], results)
    made = [additions.tensor_of[get_storage(result.value)] for result in results]
    sizes = {-(-stretch.rows // count): count for count in reversed(COUNTS) if count <= stretch.rows}
    for size, count in reversed(sizes.items()):
        additions.add_op(
            InChunks(stretch.rows, size, body),
            [given.node for given in body.given],
            like=capture.graph.ops[ops[0]],
            name=f"{seed}_{kind}_in_{count}",
            target=f"{TARGET}.{kind}.{count}",
            outputs=made,
            replaces=ops,
            recomputable=all(capture.graph.ops[op].recomputable for op in ops),
        )


def _iterate_results(capture: Capture, stretch: Stretch) -> Iterator[CombinedResult]:
    """Yield the results of `stretch` that are read elsewhere, except long rows."""
    graph = capture.graph
    for op in sorted(stretch.ops):
        node = stretch.ops[op]
        call = stretch.calls[node]
        for item, (t, path) in enumerate(capture.program.calls[op].outputs):
            result = CombinedResult(node, path, call.makes[item], call.mean and item == 0, call.elements)
            read = t in graph.kept or any(p not in stretch.ops for p in graph.consumers[t] if p < len(graph.program))
            if call.mean or (read and not stretch.has_long_rows(node, item, result.value)):
                yield result


def _find_needed(finder: StretchFinder, forward: Stretch, backward: Stretch) -> list[fx.Node]:
    """Return the ops of `forward` needed to recompute the long rows that `backward` reads, in order."""
    producer = {t: op for op in forward.ops for t in finder.graph.ops[op].outputs}
    read = [t for t in finder.find_long(forward) if any(p in backward.ops for p in finder.graph.consumers[t])]
    inputs = walk(read, lambda t: finder.graph.ops[producer[t]].inputs if t in producer else ())
    needed = {producer[t] for t in inputs if t in producer}
    return [forward.ops[op] for op in sorted(needed)]

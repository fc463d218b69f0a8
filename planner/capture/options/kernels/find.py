"""Kernels: ops of the program may be computed by other kernels, with other time and memory.

Each kind of op has a file with its alternatives. An alternative replaces one op of the program, or a few, and makes the same
tensors with the same layout. Measurements show which alternatives are faster or smaller; the others are removed
(``planner.capture.options.kernels.worth``).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.capture.lowering.lower import Capture
from planner.capture.options.additions import Additions
from planner.capture.options.kernels import attention, convolution, in_place
from planner.capture.options.kernels.alternative import Bundle, Calls, Own, ReplaceableOp
from planner.capture.rewrites.outputs import get_storage
from planner.graphs.ir import Op

TARGET = "kernels"  # the prefix of the ops' targets

KINDS: tuple[Callable[[ReplaceableOp], Iterator[Bundle]], ...] = (
    convolution.iterate_alternatives,
    attention.iterate_alternatives,
    in_place.iterate_alternatives,
)


def find_kernels(capture: Capture) -> Capture:
    """Return `capture` with alternative kernels of all ``KINDS``; their times are not measured."""
    calls, additions = Calls(capture), Additions(capture)
    for op in calls:
        if not op.is_bound and op.results:
            for alternatives in KINDS:
                for bundle in alternatives(op):
                    _add(additions, calls, op.graph_op, bundle)
    return additions.build_capture()


def _add(additions: Additions, calls: Calls, found: Op, bundle: Bundle) -> None:
    """Add the ops of `bundle`, which contains alternatives for `found`."""
    capture = additions.capture
    name = f"{found.name}_{bundle[0].name}"
    own = {
        made: additions.add_tensor(f"{name}_{made.name}", made.value)
        for alternative in bundle
        for made in alternative.makes
        if isinstance(made, Own)
    }

    for alternative in bundle:
        stood_for = sorted(calls.of(node).graph_op.id for node in alternative.nodes)
        like = capture.graph.ops[stood_for[0]]
        made = [
            own[value] if isinstance(value, Own) else additions.tensor_of[get_storage(value.value)] for value in alternative.makes
        ]
        additions.add_op(
            replace(alternative, bundle=name),
            [own[value] if isinstance(value, Own) else value for value in alternative.reads],
            like=like,
            name=f"{like.name}_{alternative.name}",
            target=f"{TARGET}.{alternative.name}",
            outputs=made,
            replaces=() if alternative.helper else stood_for,
        )

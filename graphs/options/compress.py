"""How lossy the whole of a step may be, said in bits: torch is not needed to solve for it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from graphs.ir import Graph

COMPRESS = "compress"  # the option, and the first word of what its ops call
KEEP = f"{COMPRESS}.keep"  # the first two of those that make what is kept
RESTORE = f"{COMPRESS}.restore"  # and of those that make of it what is read
REFERENCE_BITS = 4  # at which each tensor that can be compressed has an op
LEAST_BITS, MOST_BITS = 1, 8
VARIANCE = "gradient variance"  # the resource that is limited: predicted, as a part of the squared norm of the gradients
SENSITIVITY = "sensitivity"  # of the provenance: measured or modelled

# Of 256 normal numbers the range is this many standard deviations, on average; a rounding to steps of a length has a
# sixth of its square as variance, and float8 with 3 bits behind the first rounds a number by this part of it.
_RANGE = 5.6
_FLOAT8 = 0.026


def gradient_error(graph: Graph, computed: Collection[int]) -> float | None:
    """Return the predicted error of the gradients, as a part of their norm, by the ops `computed`; None if it has no limit."""
    limited = any(resource == VARIANCE for resource, _ in graph.limits)
    return math.sqrt(graph.used(VARIANCE, computed)) if limited else None


def with_variances(graph: Graph, variances: Mapping[int, float], how: str) -> Graph:
    """Return `graph` with the `variances` of ops by id; the others have none. `how` says where they are from."""
    ops = tuple(op.using(VARIANCE, variances.get(op.id, 0.0)) for op in graph.ops)
    return replace(graph, ops=ops, provenance={**graph.provenance, SENSITIVITY: how})


def within(graph: Graph, bits: int) -> Graph:
    """Return `graph` with the variance that all compressed at `bits` would have as its limit."""
    others = (pair for pair in graph.limits if pair[0] != VARIANCE)
    return replace(graph, limits=(*others, (VARIANCE, variance_at(graph, bits))))


def variance_at(graph: Graph, bits: int) -> float:
    """Predicted variance of the gradients, as a part of their squared norm, with all that can be kept compressed at `bits`.

    A stochastic rounding to steps of a length has a variance like the square of that length, and between the least and the
    largest of a group there are 2^bits - 1 steps.
    """
    finer = (((1 << REFERENCE_BITS) - 1) / ((1 << bits) - 1)) ** 2
    return finer * math.fsum(op.used(VARIANCE) for op in graph.ops if op.target == f"{RESTORE}.{REFERENCE_BITS}")


def modelled_variance(form: str) -> float:
    """Of normal numbers kept in this form (bits, or float8), as a part of their own variance."""
    return _RANGE**2 / 6 / ((1 << int(form)) - 1) ** 2 if form.isdecimal() else _FLOAT8**2

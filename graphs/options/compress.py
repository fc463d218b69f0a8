"""Compressed activations: the predicted gradient error of lossy ops, and its limit in bits."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from planner.graphs.ir import Graph

COMPRESS = "compress"  # the option, and the first part of the target of its ops
KEEP = f"{COMPRESS}.keep"  # prefix of the targets of ops that compress
RESTORE = f"{COMPRESS}.restore"  # prefix of the targets of ops that restore
REFERENCE_BITS = 4  # every compressible tensor has an op at this precision
LEAST_BITS, MOST_BITS = 1, 8
VARIANCE = "gradient variance"  # the limited resource, relative to the squared norm of the gradients

# The range of 256 normal numbers is this many standard deviations, on average; rounding to steps of length h has
# variance h^2 / 6, and float8 with 3 mantissa bits has this relative rounding error.
_RANGE = 5.6
_FLOAT8 = 0.026


def predict_gradient_error(graph: Graph, computed: Collection[int]) -> float | None:
    """Return the predicted relative error of the gradients if the ops `computed` are executed; None if it is unlimited."""
    limited = any(resource == VARIANCE for resource, _ in graph.limits)
    return math.sqrt(graph.used(VARIANCE, computed)) if limited else None


def set_variances(graph: Graph, variances: Mapping[int, float], how: str) -> Graph:
    """Return `graph` with the given gradient variances by op id, 0 for other ops; `how` states their origin."""
    ops = tuple(op.using(VARIANCE, variances.get(op.id, 0.0)) for op in graph.ops)
    return replace(graph, ops=ops, provenance=graph.provenance.record(sensitivity=how))


def limit_variance(graph: Graph, bits: int) -> Graph:
    """Return `graph` with the variance of compressing all tensors at `bits` as its limit."""
    others = (pair for pair in graph.limits if pair[0] != VARIANCE)
    return replace(graph, limits=(*others, (VARIANCE, predict_variance(graph, bits))))


def predict_variance(graph: Graph, bits: int) -> float:
    """Return the predicted relative variance of the gradients if all compressible tensors are compressed at `bits`.

    Stochastic rounding to steps of length h has a variance proportional to h^2, and the range of a group is divided into 2^bits -
    1 steps.
    """
    finer = (((1 << REFERENCE_BITS) - 1) / ((1 << bits) - 1)) ** 2
    return finer * math.fsum(op.used(VARIANCE) for op in graph.ops if op.target == f"{RESTORE}.{REFERENCE_BITS}")


def model_variance(form: str) -> float:
    """Return the relative variance of normal numbers compressed as `form`: a number of bits, or float8."""
    return _RANGE**2 / 6 / ((1 << int(form)) - 1) ** 2 if form.isdecimal() else _FLOAT8**2

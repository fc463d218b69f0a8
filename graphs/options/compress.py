"""How lossy the whole of a step may be, said in bits: torch is not needed to solve for it."""

import math

from graphs.ir import Graph

COMPRESS = "compress"  # the option, and the first word of what its ops call
KEEP = f"{COMPRESS}.keep"  # the first two of those that make what is kept
RESTORE = f"{COMPRESS}.restore"  # and of those that make of it what is read
REFERENCE_BITS = 4  # at which each tensor that can be compressed has an op
LEAST_BITS, MOST_BITS = 1, 8
SENSITIVITY = "sensitivity"  # of the provenance: measured or modelled

# Of 256 normal numbers the range is this many standard deviations, on average; a rounding to steps of a length has a
# sixth of its square as variance, and float8 with 3 bits behind the first rounds a number by this part of it.
_RANGE = 5.6
_FLOAT8 = 0.026


def variance_at(graph: Graph, bits: int) -> float:
    """Predicted variance of the gradients, as a part of their squared norm, with all that can be kept compressed at `bits`.

    A stochastic rounding to steps of a length has a variance like the square of that length, and between the least and the
    largest of a group there are 2^bits - 1 steps.
    """
    finer = (((1 << REFERENCE_BITS) - 1) / ((1 << bits) - 1)) ** 2
    return finer * math.fsum(op.variance for op in graph.ops if op.target == f"{RESTORE}.{REFERENCE_BITS}")


def modelled_variance(form: str) -> float:
    """Of normal numbers kept in this form (bits, or float8), as a part of their own variance."""
    return _RANGE**2 / 6 / ((1 << int(form)) - 1) ** 2 if form.isdecimal() else _FLOAT8**2

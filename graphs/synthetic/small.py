"""Small graphs from few parameters, with known optima."""

from planner.graphs.ir import Graph, Phase
from planner.graphs.synthetic.draft import Draft


def make_chain(length: int) -> Graph:
    """Return a chain: each op reads the output of the previous one; times and sizes are 1.

    Keeping everything needs 2 bytes (input and output of an op), which is the least feasible budget.
    """
    draft = Draft()
    last: tuple[int, ...] = ()
    for i in range(length):
        last = draft.add_op(f"f{i}", last, [1])
    return draft.build_graph(length=length)


def make_training_chain(layers: int) -> Graph:
    """Return a chain with forward f_1..f_n, backward g_n..g_1; g_i reads f_(i-1) and g_(i+1) (g_n reads f_n); n >= 3.

    Times and sizes are 1. Optima: 2 n seconds from n + 1 bytes on, 2 n + 1 with n bytes (f_1 is recomputed), and with 3 bytes,
    the least, 2 n + (n - 1)(n - 2) / 2: two tensors fit next to a gradient, so g_i recomputes f_1..f_(i-1).
    """
    draft = Draft()
    f: list[int] = []
    for i in range(layers):
        f += draft.add_op(f"f{i + 1}", f[-1:], [1])
    (g,) = draft.add_op(f"g{layers}", f[-2:], [1], phase=Phase.BACKWARD)
    for i in range(layers - 1, 0, -1):
        (g,) = draft.add_op(f"g{i}", [*f[max(0, i - 2) : i - 1], g], [1], phase=Phase.BACKWARD)
    return draft.build_graph(layers=layers)


def make_skips(depth: int) -> Graph:
    """Return a small U-Net: down d_1..d_n, up u_n..u_1, where u_i reads d_i and u_(i+1); sizes halve going down."""
    draft = Draft()
    down: list[int] = []
    for i in range(depth):
        down += draft.add_op(f"d{i + 1}", down[-1:], [2 ** (depth - i)])
    last = down[-1]
    for i in range(depth - 1, -1, -1):
        (last,) = draft.add_op(f"u{i + 1}", [down[i], last], [2 ** (depth - i)])
    return draft.build_graph(depth=depth)

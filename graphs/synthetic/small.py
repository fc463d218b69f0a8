"""Small graphs from few parameters, with known optima."""

from graphs.ir import Graph, Phase
from graphs.synthetic.draft import Draft


def chain(length: int) -> Graph:
    """Return a chain: each op reads the output of the previous one; times and sizes are 1.

    Keeping everything needs 2 bytes (input and output of an op), which is the least feasible budget.
    """
    draft = Draft()
    last: tuple[int, ...] = ()
    for i in range(length):
        last = draft.op(f"f{i}", last, [1])
    return draft.graph(length=length)


def training_chain(layers: int) -> Graph:
    """Return a chain with forward f_1..f_n, backward g_n..g_1; g_i reads f_(i-1) and g_(i+1) (g_n reads f_n); n >= 3.

    Times and sizes are 1. Optima: 2 n seconds from n + 1 bytes on, 2 n + 1 with n bytes (f_1 is recomputed), and with 3 bytes,
    the least, 2 n + (n - 1)(n - 2) / 2: two tensors fit next to a gradient, so g_i recomputes f_1..f_(i-1).
    """
    draft = Draft()
    f: list[int] = []
    for i in range(layers):
        f += draft.op(f"f{i + 1}", f[-1:], [1])
    (g,) = draft.op(f"g{layers}", f[-2:], [1], phase=Phase.BACKWARD)
    for i in range(layers - 1, 0, -1):
        (g,) = draft.op(f"g{i}", [*f[max(0, i - 2) : i - 1], g], [1], phase=Phase.BACKWARD)
    return draft.graph(layers=layers)


def diamond() -> Graph:
    """Return ops a -> b, c -> d, where d reads both; then e reads a and d. Sizes a 2, b 3, c 3, d 1, e 1; times 1, c 5.

    Optima: 9 seconds from 9 bytes on (d: a, b, c, d), 10 with 8 bytes (a is freed before d and recomputed for e). With 7 bytes,
    though no op needs more, there is none: the second of b and c needs a and the other one in memory.
    """
    draft = Draft()
    (a,) = draft.op("a", [], [2])
    (b,) = draft.op("b", [a], [3])
    (c,) = draft.op("c", [a], [3], time_s=5)
    (d,) = draft.op("d", [b, c], [1])
    draft.op("e", [a, d], [1])
    return draft.graph()


def two_outputs() -> Graph:
    """Return a graph with an op of two outputs: s makes x (4) and y (1); u reads x; w (workspace 4) reads y and u's output.

    Optima: 3 seconds from 7 bytes on (w: y, u, w's output of 1 and its workspace, 1 + 1 + 1 + 4); u needs x, y and its own
    output, 6. One tensor per op would keep x until w, 11 bytes. With 6 there is none.
    """
    draft = Draft()
    x, y = draft.op("s", [], [4, 1])
    (u,) = draft.op("u", [x], [1])
    draft.op("w", [y, u], [1], workspace_bytes=4)
    return draft.graph()


def kept_output() -> Graph:
    """Return a graph whose op a has a kept output and one that is not: recomputing a makes both again.

    a makes x (2, not kept) and y (1, kept); b (4) reads nothing; c (1) reads b; d (1) reads x and c. Times 1.
    Optima: 4 seconds from 8 bytes on (c: x, y, b, c). With 7 bytes 5: x is freed before b and recomputed before d, with y and c
    in memory: 1 + 1 + 2 + 1 = 5. With 5 bytes there is none: c and y need 5 + 1.
    """
    draft = Draft()
    x, y = draft.op("a", [], [2, 1])
    (b,) = draft.op("b", [], [4])
    (c,) = draft.op("c", [b], [1])
    draft.op("d", [x, c], [1])
    return draft.graph([y])


def skips(depth: int) -> Graph:
    """Return a small U-Net: down d_1..d_n, up u_n..u_1, where u_i reads d_i and u_(i+1); sizes halve going down."""
    draft = Draft()
    down: list[int] = []
    for i in range(depth):
        down += draft.op(f"d{i + 1}", down[-1:], [2 ** (depth - i)])
    last = down[-1]
    for i in range(depth - 1, -1, -1):
        (last,) = draft.op(f"u{i + 1}", [down[i], last], [2 ** (depth - i)])
    return draft.graph(depth=depth)

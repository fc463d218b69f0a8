"""Small graphs made from a few numbers, with known optima."""

from graphs.ir import Graph, Phase
from graphs.synthetic.draft import Draft


def chain(length: int) -> Graph:
    """Each op reads the output of the one before; unit times and sizes.

    Keeping everything takes 2 bytes (input and output of an op): that is the least and the optimum.
    """
    draft = Draft()
    last: tuple[int, ...] = ()
    for i in range(length):
        last = draft.op(f"f{i}", last, [1])
    return draft.graph(length=length)


def training_chain(layers: int) -> Graph:
    """Forward f_1..f_n, backward g_n..g_1; g_i reads f_(i-1) and g_(i+1) (g_n reads f_n); unit times and sizes; n >= 3.

    Optima: 2 n seconds from n + 1 bytes on, 2 n + 1 with n bytes (f_1 is made twice), and with 3 bytes, the least,
    2 n + (n - 1)(n - 2) / 2: beside a gradient there is room for two tensors, so g_i makes f_1..f_(i-1) again.
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
    """Ops a -> b, c -> d, where d reads both; then e reads a and d. Sizes a 2, b 3, c 3, d 1, e 1; times 1, c 5.

    Optima: 9 seconds from 9 bytes on (d: a, b, c, d), 10 with 8 bytes (a is freed before d and made again for e).
    With 7, though no op takes more, none: whichever of b and c comes second has a and the other beside it.
    """
    draft = Draft()
    (a,) = draft.op("a", [], [2])
    (b,) = draft.op("b", [a], [3])
    (c,) = draft.op("c", [a], [3], time_s=5)
    (d,) = draft.op("d", [b, c], [1])
    draft.op("e", [a, d], [1])
    return draft.graph()


def two_outputs() -> Graph:
    """An op whose outputs live apart: s makes x (4) and y (1); u reads x; w (workspace 4) reads y and u's output.

    Optima: 3 seconds from 7 bytes on (w: y, u, w's output of 1 and its workspace, 1 + 1 + 1 + 4); u takes
    x, y and its own output, 6. One op = one tensor would hold x until w, 11 bytes. With 6 none.
    """
    draft = Draft()
    x, y = draft.op("s", [], [4, 1])
    (u,) = draft.op("u", [x], [1])
    draft.op("w", [y, u], [1], workspace_bytes=4)
    return draft.graph()


def kept_output() -> Graph:
    """An op with a kept and a passing output: making it again makes the kept one a second time.

    a makes x (2, passing) and y (1, kept); b (4) reads nothing; c (1) reads b; d (1) reads x and c. Times 1.
    Optima: 4 seconds from 8 bytes on (c: x, y, b, c). With 7 bytes 5: x is freed before b and made again before
    d, beside y and c: 1 + 1 + 2 + 1 = 5. With 5 none: c alone takes 5 beside y.
    """
    draft = Draft()
    x, y = draft.op("a", [], [2, 1])
    (b,) = draft.op("b", [], [4])
    (c,) = draft.op("c", [b], [1])
    draft.op("d", [x, c], [1])
    return draft.graph([y])


def skips(depth: int) -> Graph:
    """A U-Net in small: down d_1..d_n, up u_n..u_1, where u_i reads d_i and u_(i+1); sizes halve going down."""
    draft = Draft()
    down: list[int] = []
    for i in range(depth):
        down += draft.op(f"d{i + 1}", down[-1:], [2 ** (depth - i)])
    last = down[-1]
    for i in range(depth - 1, -1, -1):
        (last,) = draft.op(f"u{i + 1}", [down[i], last], [2 ** (depth - i)])
    return draft.graph(depth=depth)

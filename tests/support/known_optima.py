"""Small graphs whose optimum is worked out by hand."""

from graphs.ir import Graph
from graphs.synthetic.small import chain, training_chain
from tests.support.small_graphs import diamond, kept_output, two_outputs

# A graph, a budget in bytes, and the seconds of the fastest schedule within it.
KNOWN_OPTIMA: tuple[tuple[Graph, int, float], ...] = (
    (chain(1), 1, 1),
    (chain(5), 2, 5),
    (training_chain(3), 4, 6),
    (training_chain(3), 3, 7),
    (training_chain(8), 8, 17),
    (diamond(), 9, 9),
    (diamond(), 8, 10),
    (two_outputs(), 7, 3),
    (kept_output(), 8, 4),
    (kept_output(), 7, 5),
    (kept_output(), 6, 5),
)

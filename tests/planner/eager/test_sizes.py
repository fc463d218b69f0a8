"""What is known of ops by their signatures."""

import pytest
import torch

from planner.eager.sizes import OutputSizes, lstm_workspace_bytes

_exp = torch.ops.aten.exp.default


def test_what_is_in_use_stays_known_and_the_rest_is_forgotten() -> None:
    sizes = OutputSizes(torch.device("cpu"), generation=4)
    learned = [sizes.learn((rows,), _exp, (torch.zeros(rows, 2),), {}) for rows in range(1, 11)]
    assert [known.out_bytes for known in learned] == [8 * rows for rows in range(1, 11)]
    assert [rows for rows in range(1, 11) if sizes.known((rows,))] == [9, 10]
    # Those of the generation before are found again, as they were.
    assert sizes.learn((8,), _exp, (torch.zeros(8, 2),), {}) is learned[7]
    assert sizes.known((8,)) is learned[7]
    # Older ones are learned again, under the same number.
    again = sizes.learn((4,), _exp, (torch.zeros(4, 2),), {})
    assert again is not learned[3]
    assert (again.out_bytes, again.number) == (learned[3].out_bytes, learned[3].number)


def test_no_more_than_two_generations_are_kept() -> None:
    sizes = OutputSizes(torch.device("cpu"), generation=4)
    for rows in range(1, 30):
        sizes.learn((rows,), _exp, (torch.zeros(rows, 2),), {})
        assert len(sizes._recent) <= 4 and len(sizes._older) <= 4


@pytest.mark.parametrize("sizes", [(8, 32, 64, 64), (16, 64, 128, 64), (5, 3, 7, 9), (100, 1, 10, 200), (7, 30, 300, 77)])
def test_the_guess_of_what_an_lstm_keeps_is_near_it(sizes: tuple[int, int, int, int]) -> None:
    """To the byte by the kernels of one machine; others may lay it out otherwise."""
    steps, batch, inputs, hidden = sizes
    weights = [torch.zeros(4 * hidden, inputs), torch.zeros(4 * hidden, hidden), torch.zeros(4 * hidden), torch.zeros(4 * hidden)]
    state = torch.zeros(batch, hidden)
    flags = (False, [], 2, hidden, 1, True, False, False, True)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(torch.zeros(steps, batch, inputs), *weights, state, state, *flags)
    assert 0.5 < workspace.nbytes / lstm_workspace_bytes(*sizes) < 2

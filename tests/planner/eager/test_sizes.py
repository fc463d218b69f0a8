"""What is known of ops by their signatures."""

import torch

from planner.eager.sizes import OutputSizes

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

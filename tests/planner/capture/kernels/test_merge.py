"""Launches that write one value: one op where that is possible, and once, in order, where it is not."""

from graphs.ir import Phase
from planner.capture.kernels.merge import Group, group_launches
from planner.capture.kernels.wrapper import Launch
from planner.capture.program.program import Call

WRITTEN = Call("over")


def launch(makes: int | None = None, *, reads: str = "", writes: str = "", phase: Phase = Phase.FORWARD) -> Launch:
    """A launch that makes a value, reads some and writes to some: ``reads="12"`` are values 1 and 2."""
    made = [] if makes is None else [makes]
    return Launch("kernel", phase, [], makes=made, reads=set(map(int, reads)), writes=set(map(int, writes)))


def parts(launches: list[Launch], static: tuple[int, ...] = ()) -> tuple[list[Group], list[list[int]]]:
    """The groups, and which launches are in them."""
    groups = group_launches(launches, static)
    return groups, [[next(i for i, each in enumerate(launches) if each is one) for one in group.launches] for group in groups]


def test_launches_that_write_values_of_their_own_stay_apart() -> None:
    groups, found = parts([launch(0), launch(1, reads="0"), launch(2, reads="01")])
    assert found == [[0], [1], [2]]
    assert not any(group.once or group.follows for group in groups)


def test_zeros_and_their_accumulation_merge_into_one_op() -> None:
    # 1: what is added; 2: zeros, 3: another kernel in between.
    groups, found = parts([launch(1), launch(2), launch(3, reads="1"), launch(reads="12", writes="2"), launch(4, reads="2")])
    assert found == [[0], [2], [1, 3], [4]]
    merged = groups[2]
    assert (merged.makes, merged.reads, merged.writes, merged.once, merged.follows) == ({2}, {1}, set(), False, set())


def test_all_parts_of_a_concatenation_are_one_op_where_nobody_reads_in_between() -> None:
    _, found = parts(
        [launch(1), launch(reads="01", writes="1"), launch(reads="01", writes="1"), launch(2, reads="1")], static=(0,)
    )
    assert found == [[0, 1, 2], [3]]


def test_parts_with_a_reader_in_between_are_executed_once_and_in_order() -> None:
    launches = [launch(1), launch(3, reads="1"), launch(2), launch(reads="21", writes="1"), launch(4, reads="1")]
    groups, found = parts(launches)
    assert found == [[0], [1], [2], [3], [4]]
    assert [group.once for group in groups] == [True, True, False, True, False]
    assert [group.follows for group in groups] == [set(), set(), set(), {0, 1}, {3}]


def test_random_ops_stay_in_order() -> None:
    def drawn(makes: int) -> Launch:
        return Launch("rand", Phase.FORWARD, [], makes=[makes], random=True)

    _, found = parts([drawn(1), launch(2), launch(reads="12", writes="1")])
    assert found == [[1], [0, 2]]
    groups, found = parts([drawn(1), drawn(2), launch(reads="12", writes="1")])
    assert found == [[0], [1], [2]]
    assert [group.random for group in groups] == [True, True, False]
    assert groups[2].follows == {0}


def test_launches_needed_in_between_are_not_merged() -> None:
    # What made 1 also made 2, which is read before 1 is written to again.
    both = Launch("kernel", Phase.FORWARD, [], makes=[1, 2])
    groups, found = parts([both, launch(3, reads="2"), launch(reads="13", writes="1"), launch(4, reads="1")])
    assert found == [[0], [1], [2], [3]]
    assert [group.once for group in groups] == [True, False, True, False]
    assert [group.follows for group in groups] == [set(), set(), {0}, {2}]


def test_readers_of_a_buffer_stay_before_its_update() -> None:
    # 0 is static: 1 is made of it, then it is overwritten, then 1 is written to again.
    groups, found = parts([launch(1, reads="0"), launch(reads="0", writes="0"), launch(reads="1", writes="1")], static=(0,))
    assert found == [[0], [1], [2]]
    assert [group.once for group in groups] == [True, False, True]
    assert groups[2].follows == {0}


def test_static_values_are_written_by_several_ops() -> None:
    groups, found = parts([launch(reads="0", writes="0"), launch(1, reads="0"), launch(reads="01", writes="0")], static=(0,))
    assert found == [[0], [1], [2]]
    assert not any(group.once or group.follows for group in groups)  # the graph orders them by what it mutates


def test_the_two_passes_are_not_merged() -> None:
    groups, found = parts([launch(1), launch(reads="1", writes="1", phase=Phase.BACKWARD)])
    assert found == [[0], [1]]
    assert all(group.once for group in groups)


def test_readers_between_two_writers_follow_the_first() -> None:
    launches = [
        launch(1),
        launch(2, reads="1"),
        launch(reads="1", writes="1"),
        launch(3, reads="1"),
        launch(reads="13", writes="1"),
    ]
    groups, found = parts(launches)
    assert found == [[0], [1], [2], [3], [4]]
    assert [group.once for group in groups] == [True] * 5
    assert [group.follows for group in groups] == [set(), set(), {0, 1}, {2}, {2, 3}]


def test_only_ops_of_one_launch_may_overwrite_their_inputs() -> None:
    first, second = launch(2, reads="1"), launch(reads="12", writes="2")
    first.over = [(2, 1, WRITTEN)]
    (group,), _ = parts([first, second], static=(1,))
    assert group.over == []
    alone, other = launch(3, reads="1"), launch(4, reads="1")
    alone.over = [(3, 1, WRITTEN)]
    groups, _ = parts([alone, other], static=(1,))
    assert [group.over for group in groups] == [[(3, 1, WRITTEN)], []]

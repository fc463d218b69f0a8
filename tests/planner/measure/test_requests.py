"""The requests of an op, from what the allocator was recorded to do."""

from planner.graphs.requests import WORKSPACE, MemoryRequest
from planner.runtime.allocator import Allocation, collect_requests


def entries(*sizes: tuple[int, int]) -> list[Allocation]:
    """Requests, and frees with negative sizes, each with its address."""
    return [Allocation(0, size, address) for address, size in sizes]


def test_consecutive_workspaces_are_separate_requests() -> None:
    trace = entries(
        (1, 100),
        (2, 30),
        (2, -30),
        (3, 50),
        (2, 40),
        (2, -40),
    )
    assert collect_requests(trace, {3: 0, 1: 1}) == (
        MemoryRequest(1),
        MemoryRequest(WORKSPACE, 30, 2),
        MemoryRequest(0),
        MemoryRequest(WORKSPACE, 40, 4),
    )


def test_memory_kept_by_a_library_is_not_a_request_of_the_op() -> None:
    trace = entries((7, 2**25), (1, 10), (2, 5), (2, -5))
    assert collect_requests(trace, {1: 0}) == (MemoryRequest(0), MemoryRequest(WORKSPACE, 5, 2))


def test_frees_of_older_memory_are_left_out() -> None:
    assert collect_requests(entries((9, -10), (1, 10)), {1: 0}) == (MemoryRequest(0),)


def test_simultaneous_workspaces_are_separate_requests() -> None:
    trace = entries((1, 10), (2, 20), (1, -10), (3, 5), (2, -20))
    assert collect_requests(trace, {3: 0}) == (MemoryRequest(WORKSPACE, 10, 2), MemoryRequest(WORKSPACE, 20, 3), MemoryRequest(0))

"""The requests of an op, from what the allocator was recorded to do."""

from graphs.requests import WORKSPACE, MemoryRequest
from planner.runtime.allocator import collect_requests


def entries(*actions: tuple[str, int, int]) -> list[dict[str, object]]:
    return [{"action": action, "addr": address, "size": size} for action, address, size in actions]


def test_consecutive_workspaces_are_separate_requests() -> None:
    trace = entries(
        ("alloc", 1, 100),
        ("segment_alloc", 2, 1000),
        ("alloc", 2, 30),
        ("free_requested", 2, 30),
        ("free_completed", 2, 30),
        ("alloc", 3, 50),
        ("alloc", 2, 40),
        ("free_completed", 2, 40),
    )
    assert collect_requests(trace, {3: 0, 1: 1}) == (
        MemoryRequest(1),
        MemoryRequest(WORKSPACE, 30, 2),
        MemoryRequest(0),
        MemoryRequest(WORKSPACE, 40, 4),
    )


def test_memory_kept_by_a_library_is_not_a_request_of_the_op() -> None:
    trace = entries(("alloc", 7, 2**25), ("alloc", 1, 10), ("alloc", 2, 5), ("free_completed", 2, 5))
    assert collect_requests(trace, {1: 0}) == (MemoryRequest(0), MemoryRequest(WORKSPACE, 5, 2))


def test_frees_of_older_memory_are_left_out() -> None:
    assert collect_requests(entries(("free_completed", 9, 10), ("alloc", 1, 10)), {1: 0}) == (MemoryRequest(0),)


def test_simultaneous_workspaces_are_separate_requests() -> None:
    trace = entries(("alloc", 1, 10), ("alloc", 2, 20), ("free_completed", 1, 10), ("alloc", 3, 5), ("free_completed", 2, 20))
    assert collect_requests(trace, {3: 0}) == (MemoryRequest(WORKSPACE, 10, 2), MemoryRequest(WORKSPACE, 20, 3), MemoryRequest(0))

"""Requests for memory that an op makes to the allocator while it runs."""

from typing import NamedTuple

WORKSPACE = -1  # in place of the position of an output


class MemoryRequest(NamedTuple):
    """A request for memory that an op makes while it runs.

    Attributes:
        output: position of the output that is allocated; -1 for a workspace.
        size_bytes: size of a workspace; 0 for an output, whose size is that of its tensor.
        until: index of the op's request before which the workspace is freed; the number of its requests if after all of them.
    """

    output: int
    size_bytes: int = 0
    until: int = 0

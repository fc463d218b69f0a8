"""What an op asks of the allocator while it runs."""

from typing import NamedTuple

WORKSPACE = -1  # in place of the position of an output


class MemoryRequest(NamedTuple):
    """A request for memory that an op makes while it runs.

    Attributes:
        output: position of the output that it is for; -1 for a workspace.
        size_bytes: of a workspace; 0 for an output, which has the size of its tensor.
        until: the workspace is freed before the op's request of this index; the number of its requests if it is the last to go.
    """

    output: int
    size_bytes: int = 0
    until: int = 0

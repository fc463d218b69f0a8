"""The kinds of memory that a budget can count."""

from enum import StrEnum

from planner.graphs.errors import UsageError, suggest


class CountedMemory(StrEnum):
    """The kind of device memory that a budget counts. Static memory is always included."""

    RESERVED = "reserved"  # by PyTorch's caching allocator with default settings, on CUDA
    RESERVED_EXPANDABLE = "reserved-expandable"  # with expandable_segments:True
    ALLOCATED = "allocated"  # bytes of tensors in use
    DEVICE = "device"  # reserved, and CUDA's context: all that a process takes of the device
    DEVICE_EXPANDABLE = "device-expandable"  # with expandable_segments:True

    @property
    def counts_context(self) -> bool:
        """True if CUDA's context is counted."""
        return self in (CountedMemory.DEVICE, CountedMemory.DEVICE_EXPANDABLE)

    @property
    def is_expandable(self) -> bool:
        """True if PyTorch's allocator is taken to have expandable segments."""
        return self in (CountedMemory.RESERVED_EXPANDABLE, CountedMemory.DEVICE_EXPANDABLE)

    @property
    def expandable(self) -> "CountedMemory":
        """The same with expandable segments."""
        return CountedMemory.DEVICE_EXPANDABLE if self.counts_context else CountedMemory.RESERVED_EXPANDABLE

    @property
    def taken(self) -> str:
        """The name of the column of counted bytes on CUDA, in tables."""
        return "device" if self.counts_context else "reserved"

    @property
    def said(self) -> str:
        """The counted memory in words, for use within a sentence."""
        if self is CountedMemory.ALLOCATED:
            return "allocated bytes"
        segments = " with expandable segments" if self.is_expandable else ""
        context = " and CUDA's context" if self.counts_context else ""
        return f"what PyTorch's allocator reserves{segments}{context}"

    @staticmethod
    def of(value: str | None) -> "CountedMemory | None":
        """Return the kind of user input; None stands for the default of the device.

        Raises:
            UsageError: there is no such kind.
        """
        if value is None:
            return None
        if value not in list(CountedMemory):
            raise UsageError(f"memory is {value!r}{suggest(str(value), CountedMemory)}: choose from {', '.join(CountedMemory)}")
        return CountedMemory(value)

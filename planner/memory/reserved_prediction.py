"""The memory that PyTorch's caching allocator reserves for a plan, as predicted."""

from dataclasses import dataclass

from planner.graphs.units import format_bytes


@dataclass(frozen=True, slots=True)
class Reserved:
    """Predicted bytes that PyTorch reserves on the device for training by a plan, by a model of its allocator.

    Attributes:
        total_bytes: most bytes reserved, of which all others are parts.
        allocated_bytes: most bytes in use at once, libraries included, rounded to blocks.
        eager_bytes: bytes that plain eager PyTorch reserves for the step, to which shares refer.
        library_bytes: workspaces that cuBLAS keeps, for each thread that multiplies matrices.
        optimizer_bytes: copies of parameters that the optimizer holds while it runs; zero if it needs none, or is not known.
        context_bytes: CUDA's context, beside what is reserved, if the budget counts it; else 0.
        pool_bytes: private pool of the CUDA graphs that the step is replayed by; zero without them.
        expandable: True for ``expandable_segments:True``, False for the default settings.
    """

    total_bytes: int
    allocated_bytes: int
    eager_bytes: int
    library_bytes: int = 0
    optimizer_bytes: int = 0
    context_bytes: int = 0
    pool_bytes: int = 0
    expandable: bool = False

    @property
    def device_bytes(self) -> int:
        """Reserved bytes, with CUDA's context if the budget counts it."""
        return self.total_bytes + self.context_bytes

    def list_lines(self) -> list[tuple[str, str]]:
        """Return the prediction as names and values, for people."""
        share = f", {self.total_bytes / self.allocated_bytes:.3f} times what is in use" if self.allocated_bytes else ""
        allocator = "expandable segments" if self.expandable else "PyTorch's default allocator"
        without = "" if self.context_bytes else "; CUDA's context is not counted"
        lines = [("reserved", f"{format_bytes(self.total_bytes)} by {allocator}{share}{without}")]
        if self.context_bytes:
            context = f"{format_bytes(self.context_bytes)}, with which the step takes {format_bytes(self.device_bytes)}"
            lines.append(("CUDA's context", context))
        if self.pool_bytes:
            lines.append(("of it CUDA graphs", f"{format_bytes(self.pool_bytes)} in a pool of their own"))
        if self.library_bytes:
            lines.append(("of it libraries", f"{format_bytes(self.library_bytes)} of workspaces that cuBLAS keeps"))
        if self.optimizer_bytes:
            lines.append(
                ("of it the optimizer", f"{format_bytes(self.optimizer_bytes)} while it runs, when activations are freed")
            )
        return lines

"""The layout of text for people: names with values, and tables."""

from collections.abc import Iterable, Sequence

from planner.graphs.escape import escape_text


def format_aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Return names and values as text in two columns."""
    pairs = list(lines)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int) -> str:
    """Return rows under a header as text; the first `numbers` columns are right-aligned."""
    cells = [tuple(header), *(tuple(map(escape_text, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            f"{cell:>{width}}" if i < numbers else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)

"""A graph as text: one screen of what it takes."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from graphs.escape import escape_text
from graphs.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from graphs.ir import Graph, Op, Phase

_LARGEST = 5


def format_graph(graph: "Graph") -> str:
    """Return a summary of `graph`: its ops, memory and time, and its largest tensors and slowest ops."""
    lines = list(_iterate_lines(graph))
    width = max(len(name) for name, _ in lines)
    largest = sorted(graph.tensors, key=lambda t: -t.size_bytes)[:_LARGEST]
    slowest = sorted(graph.ops, key=lambda op: -op.time_s)[:_LARGEST] if graph.time_s else []
    return "\n".join(
        (
            *(f"{name:<{width}}  {value}" for name, value in lines),
            "largest tensors",
            *(
                f"  {format_bytes(t.size_bytes):>10}  {escape_text(t.name)} {escape_text(t.dtype)}{list(t.shape)}"
                for t in largest
            ),
            *(["slowest ops"] if slowest else []),
            *(f"  {format_seconds(op.time_s):>10}  {escape_text(op.name)} ({escape_text(op.target)})" for op in slowest),
        )
    )


def render_graph(graph: "Graph") -> str:
    """Return the summary of `graph` as HTML for a notebook."""
    return f"<pre>{escape(format_graph(graph))}</pre>"


def _iterate_lines(graph: "Graph") -> Iterator[tuple[str, str]]:
    for key in ("model", "device", "inputs"):
        if key in graph.provenance:
            value = graph.provenance[key]
            yield key, escape_text(", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
    program, optional = graph.program, len(graph.ops) - len(graph.program)
    phases = tuple(dict.fromkeys(op.phase for op in program))
    counts = ", ".join(f"{sum(op.phase is phase for op in program):,} {phase}" for phase in phases)
    yield "ops", f"{len(program):,} ({counts})" + (f", and {optional:,} optional ones" if optional else "")
    yield "tensors", f"{len(graph.tensors):,}"
    times = ", ".join(f"{phase} {format_seconds(_time_s(program, phase))}" for phase in phases if _time_s(program, phase))
    yield "step time", f"{format_seconds(graph.time_s)} ({times})" if times else "not measured yet"
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in graph.static_bytes_by_kind.items() if size)
    yield "static memory", f"{format_bytes(graph.static_bytes)}" + (f" ({kinds})" if kinds else "")


def _time_s(ops: "tuple[Op, ...]", phase: "Phase") -> float:
    return sum(op.time_s for op in ops if op.phase is phase)

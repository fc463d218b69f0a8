"""Pages that are to be whole and to need nothing else, and plans with transfers that they are made of."""

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

from planner import solve
from planner.capture.options import apply_options
from planner.graphs.ir import Graph
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.schedule import Compute, Free, Schedule, Step
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.plan import Plan
from planner.plans.summary import summarize
from planner.show.facts.timeline import Timeline

_SCRIPT = re.compile(r"(<script\b[^>]*>).*?(</script>)", re.DOTALL)


class Whole(HTMLParser):
    """Fails where a tag is not closed, and collects what the page refers to, and its rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [name for name, _ in attrs if name in ("src", "href", "srcset", "data") or name.startswith("on")]
        if tag not in ("meta", "wbr", "br", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def without_scripts(text: str) -> str:
    """`text` with empty scripts: they hold the chart library, and the data as JSON."""
    return _SCRIPT.sub(r"\1\2", text)


def parsed(text: str) -> Whole:
    """`text`, of which every tag is closed."""
    page = Whole()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def assert_needs_nothing_else(text: str) -> None:
    """No part of the page is elsewhere; that its scripts load nothing is for a browser to say."""
    page, written = parsed(text), without_scripts(text)
    assert page.references == []
    assert not page.tags & {"link", "img", "iframe", "object"}
    assert "url(" not in written and "@import" not in written and "http" not in written
    assert "\x1b" not in written


def plan_of(graph: Graph, schedule: Schedule) -> Plan:
    """`schedule` as a plan for no less memory than it takes, solved by hand."""
    found = simulate(graph, schedule)
    others = {pool.name: peak for pool, peak in zip(graph.pools[1:], found.pool_peaks_bytes[1:], strict=True)}
    fixed = {"bound_s": None, "solver": "hand", "seconds": 0.0, "pool_peaks_bytes": others}
    return Plan(summarize(graph), schedule, found.peak_bytes, found.peak_bytes, found.time_s, **fixed)


ROUND_TRIP = "f1 >f1 f2 -f1 f3 f4 g4 -f3 -f4 <f1 g3 -f2 -g4 g2 -f1 -f1@host -g3 g1"


def chain(
    script: str = ROUND_TRIP, *, name: str = "f1", link: float = 0.5, host_bytes: int | None = 2, works: str = ""
) -> Timeline:
    """f1 to f4 and g4 to g1, a second and a byte each, by a script: ``>f1`` and ``<f1`` are its copies, ``-f1`` frees it.

    With ROUND_TRIP, compute: f1 0-1, f2 1-2, waits for the copy before f1 goes, f3 3-4, f4 4-5, g4 5-6, g3 6-7, waits for f1,
    g2 8-9, g1 9-10. Out 1-3; in is issued when f3 and f4 are gone, 6-8; then the copy on the host goes.

    Args:
        name: of what f1 makes.
        works: the op that takes a byte of workspace.
    """
    plain = make_training_chain(4)
    tensors = tuple(replace(t, name=name) if t.name == "f1" else t for t in plain.tensors)
    ops = tuple(replace(op, workspace_bytes=int(op.name == works)) for op in plain.ops)
    renamed = Graph(ops, tensors, plain.kept, plain.provenance)
    graph = apply_options(renamed, ["offload"], Surroundings(Link.even(link), host_bytes))
    step_of: dict[str, Step] = {op.name: Compute(op.id) for op in plain.ops}
    for t, host in zip(plain.tensors, graph.tensors[len(tensors) :], strict=False):
        out, back = host.producers[0], host.producers[0] + 1
        step_of |= {f">{t.name}": Compute(out), f"<{t.name}": Compute(back)}
        step_of |= {f"-{t.name}": Free(t.id), f"-{t.name}@host": Free(host.id)}
    return Timeline(graph, plan_of(graph, Schedule(tuple(step_of[word] for word in script.split()))))


@cache
def solved() -> tuple[Graph, Plan]:
    """A graph and a plan for it with a few copies, the same on every run."""
    graph = draw_training_step(5, 12)
    return graph, solve(graph, "75%", solver="capuchin-swap", options=["offload"], link=10e9, host_budget=10**12)

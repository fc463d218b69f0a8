"""The provenance of graphs: fields with types, and the mapping that files have."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from planner.graphs.errors import FormatError
from planner.graphs.io.graph_document import build_from_dict, convert_to_dict
from planner.graphs.optimizers import MeasuredOptimizer
from planner.graphs.provenance import Provenance, Times
from planner.graphs.synthetic.random_graphs import draw_graph

RECORDED: dict[str, Any] = {
    "threads": 2,
    "optimizer": {"name": "Own", "state": [4, 8], "temporaries": []},
    "times": "measured in training steps",
    "mine": [1, {"a": None}],
    "allocated_bytes": [[3, 512]],
    "options": ["chunks"],
}


def test_entries_have_types_and_files_have_them_as_they_were() -> None:
    graph = replace(draw_graph(1, 5), provenance=RECORDED)
    again = build_from_dict(json.loads(json.dumps(convert_to_dict(graph)))).provenance
    for found in (graph.provenance, again, pickle.loads(pickle.dumps(again)), Provenance.of(again)):
        assert json.dumps(dict(found)) == json.dumps(RECORDED)
        assert found.optimizer == MeasuredOptimizer("Own", (4, 8), ())
        assert (found.times, *found.allocated_bytes) == (Times.IN_STEPS, (3, 512))
        assert (found.model, found.accumulate, *found.options) == ("", False, "chunks")


def test_what_is_recorded_later_is_last() -> None:
    later = Provenance.of(RECORDED).record(model="m", times=Times.MODELLED)
    assert list(later) == [*RECORDED, "model"] and type(later["times"]) is str
    assert (later.model, later.times, later["mine"]) == ("m", Times.MODELLED, RECORDED["mine"])
    assert list(later.remove("threads")) == [*list(RECORDED)[1:], "model"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"times": "guessed"}, 'provenance.times is "guessed"'),
        ({"optimizer": "other"}, 'provenance.optimizer is "other"'),
        ({"allocated_bytes": [[1]]}, r"provenance.allocated_bytes\[0\] is \[1\]"),
        ({"options": "chunks"}, 'provenance.options is "chunks": expected `array`'),
        ({"shares_of_bytes": True}, "provenance.shares_of_bytes is true: expected `int"),
    ],
)
def test_an_entry_of_another_type_is_refused(entry: dict[str, object], said: str) -> None:
    with pytest.raises(FormatError, match=f"^g.json: {said}"):
        build_from_dict({**convert_to_dict(draw_graph(1, 5)), "provenance": entry}, source="g.json")
    with pytest.raises(FormatError, match=said):
        Provenance().record(**entry)

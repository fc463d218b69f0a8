"""Graphs at any batch size, and the error if the batch size is no option."""

from pathlib import Path

import pytest

from graphs.errors import PlannerError, UnknownOptionError, UsageError
from planner.capture.workload.workload import parse_spec
from planner.settings.plan import PlanSettings
from planner.studies.workload_sizes import SizedModel
from planner.studies.workload_tracing import Tracing

WAY_OUT = "name the one that is the batch size with --batch-option"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(
        "def build(width: int = 4):\n    raise AssertionError\n\n\n"
        "def load(batch: int = 4):\n    raise ValueError(\"the loader has no option 'batch'\")\n"
    )
    return path


@pytest.mark.parametrize(("spec", "option"), [("zoo:mlp", "size"), ("{source}:build", "batch")])
def test_an_option_that_there_is_not_is_told_with_the_way_out(spec: str, option: str, source: Path) -> None:
    sizes = SizedModel(parse_spec(spec.format(source=source)), option, Tracing(PlanSettings(roofline="cpu")), way_out=WAY_OUT)
    with pytest.raises(UsageError, match=rf"has no option '{option}': its options are .*{WAY_OUT}") as refused:
        sizes.trace_graph(8)
    assert isinstance(refused.value.__cause__, UnknownOptionError)
    assert refused.value.__cause__.option == option


@pytest.mark.parametrize(("spec", "option"), [("{source}:load", "batch"), ("{source}:load,size=3", "batch")])
def test_unrelated_option_error_is_raised_without_advice(spec: str, option: str, source: Path) -> None:
    sizes = SizedModel(parse_spec(spec.format(source=source)), option, Tracing(PlanSettings(roofline="cpu")), way_out=WAY_OUT)
    with pytest.raises(PlannerError, match="has no option") as refused:
        sizes.trace_graph(8)
    assert WAY_OUT not in str(refused.value)

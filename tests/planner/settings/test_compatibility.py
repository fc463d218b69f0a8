"""What the table of conflicts refuses is refused, wherever it is asked for; the command and the documentation show the table."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from graphs.errors import UsageError
from graphs.options.option import Feature, Need
from planner.capture.options import OPTIONS, needs
from planner.cli.main import main
from planner.settings.compatibility import Incompatibility, build_table, check_compatible, list_conflicts

X, Y = torch.ones(2, 4), torch.zeros(2, 3)


def compiled(name: str, **how: object) -> None:
    others = ["cpu:2"] if Need.DEVICES in needs((name,)) else []
    planner.compile(
        nn.Linear(4, 3), nn.MSELoss(), (X, Y), budget="100%", options=[OPTIONS[name].to_try], other_devices=others, **how
    )


def under_torch_compile(name: str, **how: object) -> None:
    options = {"budget": "100%", "options": [OPTIONS[name].to_try], **how}
    torch.compile(nn.Linear(4, 3), backend="planner", options=options)(X)


WAYS: dict[Feature, list[Callable[[str], None]]] = {
    Feature.TORCH_COMPILE: [under_torch_compile],
    Feature.VARYING_SIZES: [partial(compiled, dynamic=True)],
    Feature.INDUCTOR: [partial(compiled, kernels="inductor"), partial(under_torch_compile, kernels="inductor")],
}
OF_OPTIONS = [conflict for conflict in list_conflicts() if conflict.one in OPTIONS]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "feature"), [(one.one, one.other) for one in OF_OPTIONS if one.other in WAYS])
def test_no_step_is_made_with_an_option_that_the_table_refuses(name: str, feature: Feature) -> None:
    refusal = rf"the option .{name}. does not go with ({feature}|torch\.compile): .*leave .* out"
    for way in WAYS[feature]:
        with pytest.raises(Exception, match=refusal) as e:
            way(name)
        assert isinstance(getattr(e.value, "inner_exception", e.value), UsageError)


@pytest.mark.parametrize("conflict", list_conflicts(), ids=lambda one: f"{one.one}-{one.other}")
def test_each_conflict_of_the_table_is_one_clear_error(conflict: Incompatibility) -> None:
    with pytest.raises(UsageError, match=re.escape(str(conflict))):
        check_compatible({conflict.one, conflict.other})
    check_compatible({conflict.one})
    check_compatible({conflict.other})


def test_the_documentation_shows_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options" / "index.md").read_text()
    for row in build_table():
        assert f"| {' | '.join(row)} |" in page


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{things} with {other}: {reason}" in printed for things, other, reason in build_table())

"""Parameters of the exact solver from a TOML file."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planner.graphs.errors import UsageError
from planner.solvers.eviction.rules import EvictionRule
from planner.solvers.windows.params import BoundParams, WindowsParams

DEFAULTS = WindowsParams()
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "solver-parameters.md"


def read(text: str, folder: Path) -> WindowsParams:
    file = folder / "params.toml"
    file.write_text(text)
    return WindowsParams.from_toml(file)


def test_values_replace_defaults(tmp_path: Path) -> None:
    text = """
        [bound]
        first_slice = 3
        most_bytes = 1000
        [first_schedule]
        rules = [{size = 0.5, gradients_stay = true}, {}]
        imitated = ["dtr"]
        [neighbourhoods]
        windows = 60
    """
    rules = (EvictionRule(size=0.5, gradients_stay=True), EvictionRule())
    expected = replace(
        DEFAULTS,
        bound=replace(DEFAULTS.bound, first_slice=3.0, most_bytes=1000),
        first_schedule=replace(DEFAULTS.first_schedule, rules=rules, imitated=("dtr",)),
        neighbourhoods=replace(DEFAULTS.neighbourhoods, windows=60),
    )
    assert read(text, tmp_path) == expected
    assert read("", tmp_path) == DEFAULTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bounds]", "there is no 'bounds' at the top: choose from bound, first_schedule,"),
        ("[bound]\nslice = 1.0", "there is no 'slice' in bound: choose from first_slice, longer,"),
        ("bound = 3", "bound is 3: must be a table with any of first_slice,"),
        ("[bound]\nfirst_slice = '2'", "bound.first_slice is '2': must be a number, 0 or more"),
        ("[bound]\nfirst_slice = -2.0", "bound.first_slice is -2.0: must be a number, 0 or more"),
        ("[bound]\nfirst_slice = nan", "bound.first_slice is nan: must be a number, 0 or more"),
        ("[bound]\nfirst_slice = true", "bound.first_slice is True: must be a number, 0 or more"),
        ("[bound]\nsmall_ops = 30.0", "bound.small_ops is 30.0: must be a whole number, 0 or more"),
        ("[first_schedule]\nimitated = 1", "first_schedule.imitated is 1: must be an array"),
        ("[first_schedule]\nrules = [{price = 1}]", "there is no 'price' in first_schedule.rules[0]: choose from cost, size,"),
        ("[first_schedule]\nimitated = ['none']", "first_schedule.imitated has 'none': choose from keep-everything,"),
        ("[bound", "is not TOML: "),
    ],
)
def test_invalid_parameters_raise_with_their_name(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"params\.toml:? " + re.escape(message)):
        read(text, tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowsParams(bound=BoundParams(first_slice=-5.0)), "bound.first_slice is -5.0: must be a number, 0 or more"),
        (lambda: WindowsParams(bound=BoundParams(first_slice=-5)), "bound.first_slice is -5: must be a number, 0 or more"),
        (lambda: WindowsParams(bound=BoundParams(first_slice=0.0)), "bound.first_slice is 0: must be above 0"),
        (lambda: WindowsParams(bound=BoundParams(longer=0.5)), "bound.longer is 0.5: must be at least 1"),
        (lambda: WindowsParams(bound=BoundParams(max_states="many")), "bound.max_states is 'many': must be a whole number"),
        (lambda: WindowsParams(bound={}), "bound is {}: must be BoundParams"),
        (
            lambda: WindowsParams(first_schedule=replace(DEFAULTS.first_schedule, imitated=["dtr"])),
            "imitated is ['dtr']: must be a tuple",
        ),
        (
            lambda: WindowsParams(first_schedule=replace(DEFAULTS.first_schedule, imitated=("windows",))),
            "first_schedule.imitated has 'windows': choose from keep-everything,",
        ),
        (
            lambda: WindowsParams(first_schedule=replace(DEFAULTS.first_schedule, rules=(EvictionRule(size=-1.0),))),
            "first_schedule.rules[0].size is -1.0: must be a number, 0 or more",
        ),
    ],
)
def test_wrong_values_raise_when_parameters_are_made(make: Callable[[], WindowsParams], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        WindowsParams.from_toml(tmp_path / "none.toml")


def test_the_page_has_the_defaults(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml title=\"params.toml\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert read(text, tmp_path) == DEFAULTS
    given = {line.split(" = ")[0] for line in text.splitlines() if " = " in line and not line.startswith(" ")}
    assert given == {name for group in DEFAULTS.export().values() for name in group}


def test_few_parameters_are_left_to_users() -> None:
    assert sum(len(group) for group in DEFAULTS.export().values()) <= 20

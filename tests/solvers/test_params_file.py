"""Parameters of solvers in TOML files."""

from pathlib import Path

import pytest

from graphs.errors import FormatError
from solvers.params_file import read_params
from solvers.windows.params import BoundParams, WindowsParams


def test_what_a_file_does_not_name_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "params.toml"
    path.write_text("[bound]\nsmall_ops = 12\n\n[first_schedule]\nimitated = ['dtr']\nrules = [{size = 0.5}]\n")
    found, default = read_params(path, WindowsParams), WindowsParams()
    assert found.bound == BoundParams(small_ops=12)
    assert found.first_schedule.imitated == ("dtr",)
    assert [rule.size for rule in found.first_schedule.rules] == [0.5]
    assert found.portfolio == default.portfolio
    path.write_text("")
    assert read_params(path, WindowsParams) == default


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[bounds]", "there is no parameter bounds; choose of bound, first_schedule"),
        ("[bound]\nslice = 1", "there is no parameter bound.slice; choose of first_slice"),
        ("[bound]\nsmall_ops = 'many'", "Expected `int`, got `str`"),
        ("bound = 1", "Expected `object`, got `int`"),
        ("[bound", "Expected"),
    ],
)
def test_what_is_no_parameter_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "params.toml"
    path.write_text(text)
    with pytest.raises(FormatError, match=f"{path} holds no WindowsParams: .*{said}"):
        read_params(path, WindowsParams)

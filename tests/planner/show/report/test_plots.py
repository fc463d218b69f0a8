"""Figures: units that fit, axes on which all points can be told apart, and legends that cover nothing."""

from pathlib import Path
from typing import Any

import pytest

from planner.show.views import figures
from planner.show.views.figures import (
    add_legend,
    choose_size_unit,
    create_figure,
    pick_shades,
    scale_y_axis,
    set_title,
    time_unit,
)
from planner.studies import comparison_plots
from planner.studies.comparison_rows import ComparisonRow
from planner.studies.rows import read_rows

pytest.importorskip("matplotlib")

RESULTS = Path(__file__).parents[4] / "results" / "compare"


@pytest.mark.parametrize(
    ("size_bytes", "unit"), [(16_000_000, "MB"), (1_000_000_000, "GB"), (999_999_999, "MB"), (5_000, "kB"), (0, "B")]
)
def test_units_of_memory_fit(size_bytes: int, unit: str) -> None:
    scale, name = choose_size_unit(size_bytes)
    assert name == unit and (size_bytes == 0 or 1 <= size_bytes / scale < 1000)


@pytest.mark.parametrize(("time_s", "unit"), [(2.0, "s"), (0.016, "ms"), (3e-5, "us"), (0.0, "us")])
def test_units_of_time_fit(time_s: float, unit: str) -> None:
    assert time_unit(time_s)[1] == unit


def test_one_large_value_does_not_squash_the_others() -> None:
    axes = create_figure().add_subplot()
    values = [0.0, 1.0, 2.0, 3.0, 400.0]
    axes.plot(range(5), values)
    scale_y_axis(axes, values)
    assert axes.get_yscale() == "symlog"
    heights = [axes.transData.transform((0, value))[1] for value in values]
    assert (heights[3] - heights[0]) / (heights[4] - heights[0]) > 0.2
    plain = create_figure().add_subplot()
    scale_y_axis(plain, [1.0, 2.0, 3.0])
    assert plain.get_yscale() == "linear"


def test_shades_are_in_the_order_of_lightness() -> None:
    def lightness(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    found = [lightness(color) for color in pick_shades(6)]
    assert found == sorted(found) and len(set(found)) == 6
    assert len(pick_shades(1)) == 1


def test_the_legend_covers_nothing() -> None:
    figure = create_figure()
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], label="a line")
    add_legend(figure, axes)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())


def test_titles_are_for_people_and_as_they_are() -> None:
    axes = create_figure().add_subplot()
    set_title(axes, "zoo:gpt2,layers=4,width=$x$")
    assert axes.get_title() == "gpt2, layers=4, width=$x$"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, in place of their files."""
    found: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: found.append(figure))
    return found


def test_ours_stands_in_front_and_the_axis_is_theirs(drawn: list[Any]) -> None:
    rows = read_rows(RESULTS / "cpu" / "gpt2" / "rows.csv", ComparisonRow)
    comparison_plots.plot_overhead(rows, Path("overhead.png"))
    (axes,) = drawn[0].axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    ours = lines["remat-planner"]
    assert all(ours.get_linewidth() > line.get_linewidth() for line in lines.values() if line is not ours)
    assert axes.get_xlabel() == "peak memory in MB"
    # The slowest method is at the edge, and said to be above it.
    slowest = max(row.time_s / row.base_s for row in rows if row.time_s and row.base_s)
    assert axes.get_ylim()[1] < slowest and f"above the axis, up to {slowest:.2f}x" in lines
    named = [label for label in lines if label != "None" and not label.startswith("_")]
    assert named[0] == "remat-planner" and len(named) <= 8


def test_methods_are_named_for_people(drawn: list[Any]) -> None:
    comparison_plots.plot_memory(read_rows(RESULTS / "cpu" / "gpt2" / "rows.csv", ComparisonRow), Path("memory.png"))
    (axes,) = drawn[0].axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names[0] == "remat-planner" and "keep everything" in names and "windows" not in names

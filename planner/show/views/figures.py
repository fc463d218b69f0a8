"""The parts of figures: colours, units of axes, titles, legends, files."""

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from planner.graphs.errors import PlannerError, UsageError
from planner.graphs.escape import escape_text
from planner.graphs.io.files import check_writable, write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE_WIDTH, _TITLE_LINES = 90, 3
# Colours for colour-blind readers (Okabe and Ito), by their meaning.
COLORS = {
    "ours": "#0072B2",
    "whole": "#555555",
    "blocks": "#D55E00",
    "budget": "#CC3311",
    "second": "#E69F00",
    "third": "#009E73",
}
_SQUASHED = 6  # times the median: a value above that hides the others
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def choose_size_unit(largest_bytes: float) -> tuple[float, str]:
    """Return the bytes and the name of the unit for an axis of memory, such that 16 MB is not shown as 0.016 GB."""
    return next(((scale, name) for scale, name in _SIZES if largest_bytes >= scale), (1.0, "B"))


def time_unit(largest_s: float) -> tuple[float, str]:
    """Return the seconds of the unit for an axis of time, and its name."""
    return next(((scale, name) for scale, name in _TIMES if largest_s >= scale), _TIMES[-1])


def check_plot(path: Path) -> None:
    """Raise if a figure cannot be written to `path`; called before the work begins.

    Raises:
        OutputError: the folder is not there or not writable.
        UsageError: the name's ending is no format of figures.
        PlannerError: matplotlib is not installed.
    """
    check_writable(path)
    formats = create_figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise UsageError(f"{path} does not end in a format of figures: choose one of {', '.join(sorted(formats))}")


def scale_y_axis(axes: "Axes", values: Sequence[float]) -> None:
    """Start the y axis at 0; if one value is far above the others, make it logarithmic above the median of `values`."""
    positive = sorted(value for value in values if value > 0)
    middle = positive[len(positive) // 2] if positive else 0.0
    if positive and positive[-1] > _SQUASHED * middle:
        from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

        axes.set_yscale("symlog", linthresh=middle, linscale=1.5)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.axhline(middle, color="0.85", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)


def pick_shades(count: int) -> list[str]:
    """Return `count` colours from dark to light for ordered values; they differ in lightness only."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    viridis = colormaps["viridis"]
    return [to_hex(viridis(0.85 * i / max(1, count - 1))) for i in range(count)]


def add_legend(figure: "Figure", axes: "Axes", *, columns: int = 3) -> None:
    """Put the legend of `axes` below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:  # nothing is drawn if no method fits
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)


def set_title(axes: "Axes", title: str) -> None:
    """Set `title` as plain text: dollar signs start no formula, and long titles are cut."""
    spaced = escape_text(title).removeprefix("zoo:").replace(",", ", ")
    lines = textwrap.wrap(spaced, _TITLE_WIDTH, max_lines=_TITLE_LINES, placeholder=" ...")
    axes.set_title("\n".join(lines), parse_math=False, usetex=False, fontsize="medium")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure atomically; raise an OutputError if it cannot be written."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn for it
        figure.savefig(content, format=path.suffix.removeprefix(".").lower(), dpi=120)
    write_bytes(path, _reduce_colors(content) if path.suffix.lower() == ".png" else content.getvalue())


def _reduce_colors(png: io.BytesIO) -> bytes:
    """Return `png` with a palette of 256 colours, about a quarter of the size."""
    from PIL import Image  # a dependency of matplotlib

    reduced = io.BytesIO()
    with Image.open(png) as image:
        image.convert("RGB").quantize(256).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


@contextmanager
def draw_figure(path: Path, title: str, *, columns: int = 3) -> Iterator["Axes"]:
    """Yield the axes of a new figure, which is written to `path` with its title and a legend of so many columns."""
    figure = create_figure()
    axes = figure.add_subplot()
    yield axes
    set_title(axes, title)
    add_legend(figure, axes, columns=columns)
    save_figure(figure, path)


def can_plot() -> bool:
    """Return True if matplotlib is installed; it is not imported."""
    return find_spec("matplotlib") is not None


def create_figure() -> "Figure":
    """Return a new figure of the common size; raise a PlannerError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlannerError("plots need matplotlib: pip install 'remat-planner[plots]'") from error
    return Figure(figsize=(9, 5), layout="constrained")

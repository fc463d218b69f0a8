"""The figures of the report page, drawn by Bokeh: memory over the step, other streams, and the trade-off curve.

The page gets the moments and lives themselves; ``page.js`` adds up those in view, so that zooming shows every op.

Moments and lives are handed to the page, not sums for each zoom, so that a step of thousands of ops stays exact at every scale.
Bokeh's hover tool knows only pointers: for fingers the page has tips of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from planner.graphs.errors import PlannerError
from planner.graphs.escape import escape_text
from planner.graphs.ir import Op
from planner.graphs.schedule import Compute
from planner.graphs.units import format_bytes, format_seconds
from planner.show.facts.addresses import StepAddresses
from planner.show.facts.baselines import Baseline
from planner.show.facts.columns import COLUMNS, compute_memory_columns
from planner.show.facts.lifetimes import Life
from planner.show.facts.step import StepFacts
from planner.show.facts.timeline import block
from planner.show.report.describe import format_capacity, format_name
from planner.show.report.lanes import Bar, list_bars, list_lanes
from planner.show.report.module_groups import group_modules
from planner.show.views.figures import choose_size_unit, time_unit

if TYPE_CHECKING:
    from bokeh.document import Document
    from bokeh.model import Model
    from bokeh.models import Range1d
    from bokeh.plotting import figure

    from planner.studies.curve import CurveRow

_Model = TypeVar("_Model", bound="Model")
_BINS = 900  # columns of the memory chart at any zoom
_HEADROOM = 1.08
_FAR = 2.2  # times the plan's peak: the memory of baselines is cut off there
_NEAR_CAPACITY = 4  # times the peak of another pool: a capacity further away is not drawn
_BASELINE_POINTS = 4000
_MEMORY_HEIGHT, _LANE_HEIGHT, _POOL_HEIGHT, _ADDRESSES_HEIGHT, _CURVE_HEIGHT = 340, 28, 120, 300, 280
_LEFT, _RIGHT = 84, 16  # pixels left and right of the plots, so that all share one time axis
_OUTSIDE = "outside modules"
_BASELINE_COLORS = ("whole", "blocks")
# Dark to light and on to red, by module in the order of the forward pass: lightness tells them apart without hue.
_PALETTE = (
    *("#6b4596", "#5a4fa3", "#4a62b0", "#31688e", "#26828e", "#1f9e89", "#35b779"),
    *("#6ece58", "#a0da39", "#d6d02c", "#e3a505", "#d9822b", "#b5532d", "#8c2f39"),
)


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the legend.

    Attributes:
        color: CSS colour.
        group: index of its group of modules; None for other marks.
        kind: ``area``, ``line`` (dashed) or ``dots``.
    """

    color: str
    text: str
    group: int | None = None
    kind: str = "area"


@dataclass(frozen=True, slots=True)
class Charts:
    """The figures as a Bokeh document, their legend, and captions: of the memory of other pools, and of addresses."""

    document: "Document"
    keys: tuple[Key, ...]
    pools: tuple[str, ...]
    addresses: tuple[str, ...]


def draw_charts(facts: StepFacts, curve: Sequence["CurveRow"] = ()) -> Charts:
    """Return the figures of a step, with the trade-off `curve` if there is one.

    The roots of the document are named ``memory``, ``lanes``, ``pool0`` and so on, ``addresses0`` and so on, and ``curve``.

    Raises:
        PlannerError: Bokeh is not installed.
    """
    try:
        from bokeh.document import Document
        from bokeh.events import DocumentReady
        from bokeh.models import CustomJS
    except ImportError as error:
        raise PlannerError("the report page needs Bokeh: pip install 'remat-planner[plots]'") from error
    drawing = _Drawing(facts)
    drawing.draw_memory()
    drawing.draw_lanes()
    pools = drawing.draw_pools()
    addresses = drawing.draw_addresses()
    if curve:
        drawing.draw_curve(curve)
    document = Document()
    for root in drawing.roots:
        document.add_root(root)
    code = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    document.js_on_event(DocumentReady, CustomJS(args=drawing.build_arguments(), code=code))
    keys = (
        *(Key(color, name, i) for i, (name, color) in enumerate(zip(drawing.groups, drawing.colors, strict=True))),
        Key("var(--static)", "static memory: parameters, inputs, optimizer state"),
        Key("var(--workspace)", "workspace"),
        Key("var(--backward)", "backward pass"),
        Key("var(--budget)", "budget", kind="line"),
        *_list_reserved_keys(facts.reserved),
        *(
            Key(f"var(--{c})", f"{one.name}: {format_bytes(one.peak_bytes)}, {format_seconds(one.time_s)}", kind="line")
            for c, one in zip(_BASELINE_COLORS, facts.baselines, strict=False)
        ),
    )
    return Charts(document, keys, pools, addresses)


@dataclass
class _Drawing:
    """Builder of the figures; collects what ``page.js`` needs of them."""

    facts: StepFacts
    roots: "list[figure]" = field(default_factory=list)
    themed: "list[Model]" = field(default_factory=list)
    handles: dict[str, Any] = field(default_factory=dict)
    boxes: list[Any] = field(default_factory=list)  # plots, each with the sources of its boxes or points

    def __post_init__(self) -> None:
        self.timeline = timeline = self.facts.timeline
        self.lives = self.facts.lives
        self.bars: tuple[Bar, ...] = list_bars(timeline)
        self.lanes = list_lanes(timeline, self.bars)
        homes = (self._find_home_op(life) for life in self.lives.lives)
        groups = group_modules([_block(op) for op in (*timeline.graph.program, *homes)])
        self.groups = tuple(dict.fromkeys(groups.values()))
        self.colors = _pick_colors(len(self.groups))
        self.group_of = {name: self.groups.index(group) for name, group in groups.items()}
        # If all ops take no time, the step is drawn by moments of equal width.
        self.timed = timeline.time_s > 0
        span_s = timeline.time_s if self.timed else float(len(self.lives.moments))
        self.time_scale, self.time_unit = time_unit(span_s) if self.timed else (1.0, "ops")
        self.span = span_s / self.time_scale
        self.starts = [m.start_s / self.time_scale if self.timed else float(i) for i, m in enumerate(self.lives.moments)]

    def draw_memory(self) -> None:
        """Draw memory by module, baselines, and the bytes reserved after each step of the schedule, if known."""
        from bokeh.models import BoxAnnotation, ColumnDataSource, Range1d, Span

        plan, others = self.timeline.plan, self.facts.baselines
        reserved = () if self.facts.reserved is None else self.facts.reserved.by_step
        near_budget = plan.budget_bytes if plan.budget_bytes < _FAR * plan.peak_bytes else 0
        own_bytes = max(near_budget, plan.peak_bytes, *reserved[-1:], 1)
        top_bytes = _HEADROOM * max(own_bytes, min(max(one.peak_bytes for one in others), _FAR * own_bytes))
        self.size_scale, self.size_unit = choose_size_unit(top_bytes)
        self.x_range = Range1d(0, self.span, bounds=(0, self.span))
        top = top_bytes / self.size_scale
        plot = self._create_figure_over_time(
            "memory", _MEMORY_HEIGHT, Range1d(0, top, bounds=(0, top)), f"memory in {self.size_unit}"
        )
        backward = self._time(self.timeline.backward_s)
        plot.add_layout(
            self._register_colors(BoxAnnotation(left=backward, level="underlay", line_alpha=0), fill_color="backward")
        )
        # page.js fills them in; without a point, BokehJS would never stop drawing such areas.
        bands = ColumnDataSource({"x": [0.0], **{f"y{i}": [0.0] for i in range(len(self.groups) + 3)}})
        names = ("static", *self.groups, "workspace")
        for i in range(len(names)):
            area = plot.varea_step("x", f"y{i}", f"y{i + 1}", source=bands, step_mode="after", name=f"band{i}")
            if 0 < i < len(names) - 1:
                area.glyph.fill_color = self.colors[i - 1]
            else:
                self._register_colors(area.glyph, fill_color=names[i])
        for color, one in zip(_BASELINE_COLORS, others, strict=False):
            line = plot.step(*self._compute_baseline_line(one), mode="after", line_dash="dashed", line_width=1.5, name=color)
            self._register_colors(line.glyph, line_color=color)
        if reserved:
            changes = [k for k in range(len(reserved)) if not k or reserved[k] != reserved[k - 1]]
            xs = [*([*self.starts, self.span][self.lives.at_step[k]] for k in changes), self.span]
            ys = [reserved[k] / self.size_scale for k in (*changes, changes[-1])]
            line = plot.step(xs, ys, mode="after", line_width=1.5, line_dash="dotted", name="reserved")
            self._register_colors(line.glyph, line_color="reserved")
        marks = ColumnDataSource({"xs": [], "ys": []})
        marked = plot.patches("xs", "ys", source=marks, fill_alpha=0.35, line_width=1.5, name="marks")
        self._register_colors(marked.glyph, fill_color="mark", line_color="mark")
        budget = Span(location=plan.budget_bytes / self.size_scale, dimension="width", line_dash=[6, 4], line_width=2)
        plot.add_layout(self._register_colors(budget, line_color="budget"))
        reader = Span(location=0, dimension="height", line_width=2, visible=False)
        plot.add_layout(self._register_colors(reader, line_color="mark"))
        self.handles |= {"memory": plot, "bands": bands, "marks": marks, "reader": reader}

    def draw_lanes(self) -> None:
        from bokeh.models import ColumnDataSource, FixedTicker, Range1d

        if not self.lanes:
            return
        count = len(self.lanes)
        plot = self._create_figure_over_time("lanes", 24 + _LANE_HEIGHT * count, Range1d(-0.5, count - 0.5), None)
        plot.yaxis.ticker = FixedTicker(ticks=list(range(count)))
        plot.yaxis.major_label_overrides = {count - 1 - i: name for i, name in enumerate(self.lanes)}
        plot.ygrid.visible = False
        plot.xaxis.visible = False
        for i, name in enumerate(self.lanes):
            own = [k for k, bar in enumerate(self.bars) if bar.lane == name]
            left, right = zip(*(self._compute_sides(self.bars[k]) for k in own), strict=True)
            source = ColumnDataSource({"left": left, "right": right, "y": [count - 1 - i] * len(own)})
            drawn = plot.hbar(y="y", left="left", right="right", height=0.7, source=source, line_width=1, name=f"lane{i}")
            color = {"recompute": "again", "wait": "wait"}.get(name, "transfer")
            self._register_colors(drawn.glyph, fill_color=color, line_color=color)
        self.handles["lanes"] = plot

    def draw_pools(self) -> tuple[str, ...]:
        """Draw the memory of each used pool except the device, and return a caption for each."""
        from bokeh.models import Range1d, Span

        peaks = zip(self.timeline.graph.pools[1:], self.timeline.simulation.pool_peaks_bytes[1:], strict=True)
        captions = []
        for index, (pool, peak_bytes) in enumerate((pool, peak) for pool, peak in peaks if peak):
            capacity_bytes = pool.capacity_bytes
            near = capacity_bytes is not None and capacity_bytes <= _NEAR_CAPACITY * peak_bytes
            most = capacity_bytes if near and capacity_bytes is not None else peak_bytes
            scale, unit = choose_size_unit(most)
            plot = self._create_figure_over_time(f"pool{index}", _POOL_HEIGHT, Range1d(0, _HEADROOM * most / scale), unit)
            sizes = np.array(compute_memory_columns(self.timeline, pool)) / scale
            edges = np.linspace(0, self.span, COLUMNS + 1)
            area = plot.varea_step(edges, np.zeros(COLUMNS + 1), np.append(sizes, sizes[-1]), step_mode="after")
            self._register_colors(area.glyph, fill_color="elsewhere")
            if near:
                line = Span(location=most / scale, dimension="width", line_dash=[6, 4], line_width=2)
                plot.add_layout(self._register_colors(line, line_color="budget"))
            captions.append(f"{format_name(pool.name)} memory: at most {format_bytes(peak_bytes)}, {format_capacity(pool)}")
        return tuple(captions)

    def draw_addresses(self) -> tuple[str, ...]:
        """Draw where tensors lie over the step, as the allocator puts them and as planned; return a caption for each."""
        reserved, planned = self.facts.reserved, self.facts.planned
        drawn = [] if reserved is None else [(reserved, _describe_places(reserved))]
        if planned is not None:
            size = format_bytes(planned.total_bytes)
            drawn.append((planned, f"as they could be planned in one arena: {size}, with static memory outside of it"))
        drawn = [(addresses, caption) for addresses, caption in drawn if addresses.stays]
        for index, (addresses, _) in enumerate(drawn):
            self._draw_addresses(f"addresses{index}", addresses)
        return tuple(caption for _, caption in drawn)

    def _draw_addresses(self, name: str, addresses: StepAddresses) -> None:
        from bokeh.models import ColumnDataSource, Range1d, Span

        scale, unit = choose_size_unit(addresses.total_bytes)
        top = addresses.total_bytes / scale
        plot = self._create_figure_over_time(name, _ADDRESSES_HEIGHT, Range1d(0, top, bounds=(0, top)), f"addresses in {unit}")
        edges = [*([*self.starts, self.span][moment] for moment in self.lives.at_step), self.span]
        homes = {life.tensor.name: self.group_of[_block(self._find_home_op(life))] for life in self.lives.lives}
        for border in addresses.borders:
            plot.add_layout(
                self._register_colors(Span(location=border / scale, dimension="width", line_width=0.5), line_color="line")
            )
        sources = []
        for group in (*range(len(self.groups)), None):
            own = [stay for stay in addresses.stays if homes.get(stay.tensor) == group]
            if not own:
                continue
            columns = {
                "left": [edges[stay.first_step] for stay in own],
                "right": [edges[stay.end_step] for stay in own],
                "bottom": [stay.address / scale for stay in own],
                "top": [(stay.address + stay.size_bytes) / scale for stay in own],
                "title": [escape_text(stay.tensor) or "workspace" for stay in own],
                "said": [format_bytes(stay.size_bytes) for stay in own],
            }
            sources.append(ColumnDataSource(columns))
            boxes = plot.quad("left", "right", "top", "bottom", source=sources[-1], line_width=0.5)
            if group is None:
                self._register_colors(boxes.glyph, fill_color="workspace", line_color="page")
            else:
                boxes.glyph.fill_color = self.colors[group]
                self._register_colors(boxes.glyph, line_color="page")
        self.boxes.append([plot, sources])

    def draw_curve(self, curve: Sequence["CurveRow"]) -> None:
        from bokeh.models import ColumnDataSource
        from bokeh.plotting import figure

        plan = self.timeline.plan
        scale, unit = choose_size_unit(max(p.budget_bytes for p in curve))
        plot = figure(name="curve", height=_CURVE_HEIGHT, sizing_mode="stretch_width", tools="", toolbar_location=None)
        plot.min_border_left, plot.min_border_right = _LEFT, _RIGHT
        plot.xaxis.axis_label, plot.yaxis.axis_label = f"budget ({curve[0].memory}) in {unit}", "overhead in %"
        series = tuple(dict.fromkeys(point.options for point in curve))
        sources = []
        for options, color in zip(series, ("curve", "transfer"), strict=False):
            own = [point for point in curve if point.options == options]
            bounds = [(p.budget_bytes / scale, 100 * p.bound_overhead) for p in own if p.bound_overhead is not None]
            if bounds:
                xs, ys = map(np.array, zip(*bounds, strict=True))
                shade = plot.varea_step(xs, np.zeros(len(xs)), ys, step_mode="before", fill_alpha=0.25)
                self._register_colors(shade.glyph, fill_color="soft")
            solved = [(p.budget_bytes / scale, 100 * p.overhead) for p in own if p.overhead is not None]
            if solved:
                xs, ys = map(np.array, zip(*solved, strict=True))
                line = plot.step(
                    xs, ys, mode="after", line_width=2, legend_label=f"with {options}" if options else "recomputation"
                )
                columns = {
                    "left": xs,
                    "right": xs,
                    "bottom": ys,
                    "top": ys,
                    "title": [f"budget {x:.2f} {unit}" for x in xs],
                    "said": [f"overhead {y:.2f}%" for y in ys],
                }
                sources.append(ColumnDataSource(columns))
                dots = plot.scatter("left", "top", source=sources[-1], size=7)
                self._register_colors(line.glyph, line_color=color)
                self._register_colors(dots.glyph, fill_color=color, line_color=color)
        chosen = plot.scatter(
            [plan.budget_bytes / scale], [100 * max(0.0, plan.overhead)], marker="star", size=18, legend_label="this plan"
        )
        self._register_colors(chosen.glyph, fill_color="budget", line_color="budget")
        plot.y_range.start = 0
        plot.legend.location = "top_right"
        self._register_colors(plot.legend[0], background_fill_color="page", label_text_color="text", border_line_color="line")
        self._set_frame_colors(plot)
        self.roots.append(plot)
        self.boxes.append([plot, sources])

    def build_arguments(self) -> dict[str, Any]:
        """Return the arguments of the function in ``page.js``."""
        return {"lanes": None, **self.handles, "boxes": self.boxes, "themed": self.themed, "data": self._build_data()}

    def _build_data(self) -> dict[str, Any]:
        """Return moments, tensor lives (by group and birth) and bars as columns; each text is stored once."""
        moments = self.lives.moments
        lives = sorted(self.lives.lives, key=lambda life: (self.group_of[_block(self._find_home_op(life))], life.born))
        places = {id(life): place for place, life in enumerate(lives)}
        texts: dict[str, int] = {"": 0}

        def build_column(values: Iterable[str]) -> "np.ndarray[Any, Any]":
            return np.array([texts.setdefault(escape_text(value), len(texts)) for value in values], dtype=np.int32)

        again = {self.lives.at_step[e.step] for e in self.timeline.executions if e.again}
        found = {
            "starts": np.array([*self.starts, self.span]),
            "totals": np.array([m.size_bytes / self.size_scale for m in moments]),
            "ops": build_column("" if m.op is None else m.op.name for m in moments),
            "group": np.array([self.group_of[_block(self._find_home_op(life))] for life in lives], dtype=np.int32),
            "born": np.array([life.born for life in lives], dtype=np.int32),
            "dies": np.array([life.dies for life in lives], dtype=np.int32),
            "again": np.array([life.born in again for life in lives], dtype=np.int32),
            "bytes": np.array([life.tensor.size_bytes for life in lives], dtype=np.float64),
            "name": build_column(life.tensor.name for life in lives),
            "shape": build_column(f"{life.tensor.dtype}{list(life.tensor.shape)}" for life in lives),
            "module": build_column(self._find_home_op(life).module.removeprefix("model.") for life in lives),
            "producer": build_column(life.producer.name for life in lives),
            "reader": build_column("" if life.last_reader is None else life.last_reader.name for life in lives),
        }
        sides = [self._compute_sides(bar) for bar in self.bars]
        bar_columns = {
            "bar_lane": np.array([len(self.lanes) - 1 - self.lanes.index(bar.lane) for bar in self.bars], dtype=np.int32),
            "bar_left": np.array([left for left, _ in sides]),
            "bar_right": np.array([right for _, right in sides]),
            "bar_title": build_column(bar.title for bar in self.bars),
            "bar_said": build_column(bar.said for bar in self.bars),
            "bar_purpose": build_column(bar.purpose for bar in self.bars),
            "bar_reader": np.array([-1.0 if bar.reader_s is None else self._time(bar.reader_s) for bar in self.bars]),
            "bar_lives": [[places[id(life)] for life in own] for own in self._iterate_bar_lives()],
        }
        return {
            **found,
            **bar_columns,
            "texts": list(texts),
            "groups": [escape_text(name) for name in self.groups],
            "static": self.timeline.graph.static_bytes / self.size_scale,
            "size_scale": self.size_scale,
            "time_unit": self.time_unit,
            "bins": _BINS,
        }

    def _find_home_op(self, life: Life) -> Op:
        """Return the first op that makes the tensor: the tensor belongs to that op's module, even if another op recomputes it."""
        return self.timeline.graph.ops[life.tensor.producers[0]]

    def _iterate_bar_lives(self) -> Iterator[list[Life]]:
        """Yield for each bar its tensors on the device: the outputs of its op, or else the inputs."""
        by_tensor: dict[int, list[Life]] = {}
        for life in self.lives.lives:
            by_tensor.setdefault(life.tensor.id, []).append(life)
        steps = self.timeline.plan.schedule.steps
        for bar in self.bars:
            step = None if bar.step is None else steps[bar.step]
            if bar.step is None or not isinstance(step, Compute):
                yield []
                continue
            op, now = self.timeline.graph.ops[step.op], self.lives.at_step[bar.step]
            made = [life for t in op.outputs for life in by_tensor.get(t, ()) if life.born == now]
            yield made or [life for t in op.inputs for life in by_tensor.get(t, ()) if life.born <= now <= life.dies]

    def _compute_sides(self, bar: Bar) -> tuple[float, float]:
        if self.timed or bar.step is None:
            return self._time(bar.start_s), self._time(bar.end_s)
        moment = float(self.lives.at_step[bar.step])
        return moment, moment + 1

    def _time(self, time_s: float) -> float:
        return time_s / self.time_scale if self.timed else 0.0

    def _compute_baseline_line(self, one: Baseline) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """Return the times and memory of a baseline as a line; many points are thinned to the maxima of neighbours."""
        sizes = np.array(one.memory_bytes) / self.size_scale
        times = np.array(one.times_s) / self.time_scale if self.timed else np.arange(len(sizes), dtype=float)
        firsts = np.arange(0, len(sizes), -(-len(sizes) // _BASELINE_POINTS))
        end = one.time_s / self.time_scale if self.timed else float(len(sizes))
        xs, ys = times[firsts], np.maximum.reduceat(sizes, firsts)
        return np.append(xs, min(end, self.span)), np.append(ys, ys[-1])

    def _create_figure_over_time(self, name: str, height: int, y_range: "Range1d", label: str | None) -> "figure":
        """Return a new figure over the time of the step; all figures share this axis."""
        from bokeh.models import BoxZoomTool, WheelZoomTool
        from bokeh.plotting import figure

        plot = figure(
            name=name,
            height=height,
            sizing_mode="stretch_width",
            x_range=self.x_range,
            y_range=y_range,
            tools=[BoxZoomTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers="ctrl")],
            toolbar_location=None,
        )
        plot.toolbar.active_scroll = plot.toolbar.tools[1]
        plot.min_border_left, plot.min_border_right = _LEFT, _RIGHT
        if label is not None:
            plot.yaxis.axis_label = label
            plot.yaxis.ticker.desired_num_ticks = 5
        plot.xaxis.axis_label = f"time in {self.time_unit}" if self.timed else "executions"
        self._set_frame_colors(plot)
        self.roots.append(plot)
        return plot

    def _set_frame_colors(self, plot: "figure") -> None:
        """Set the colours of everything around the data."""
        plot.background_fill_color = plot.border_fill_color = None
        self._register_colors(plot, outline_line_color="line")
        for axis in plot.axis:
            axis.minor_tick_line_color = None
            axis.axis_label_text_font_style = "normal"
            colors = ("axis_label_text_color", "major_label_text_color", "major_tick_line_color", "axis_line_color")
            self._register_colors(axis, **dict.fromkeys(colors, "soft"))
        for grid in plot.grid:
            self._register_colors(grid, grid_line_color="line")

    def _register_colors(self, model: "_Model", **colors: str) -> "_Model":
        """Register colours of `model` by name, so that ``page.js`` can set them for the light and the dark theme."""
        model.tags = [colors]
        self.themed.append(model)
        return model


def _block(op: Op) -> str:
    return block(op.module) or _OUTSIDE


def _pick_colors(count: int) -> tuple[str, ...]:
    """Return `count` colours of the palette, as far apart as possible."""
    last = len(_PALETTE) - 1
    return tuple(_PALETTE[round(i * last / max(1, count - 1)) if count > 1 else 3] for i in range(count))


def _list_reserved_keys(addresses: StepAddresses | None) -> tuple[Key, ...]:
    """Return the entry for the bytes that the caching allocator reserves; none on the CPU and in an arena."""
    if addresses is None or not addresses.by_step:
        return ()
    size = format_bytes(addresses.total_bytes)
    text = f"reserved by PyTorch's caching allocator in the third step, by a model of it: {size}"
    return (Key("var(--reserved)", text, kind="dots"),)


def _describe_places(addresses: StepAddresses) -> str:
    count, total = len(addresses.borders), format_bytes(addresses.total_bytes)
    if not count:
        return f"as they are planned in the arena of the step: {total}, with requests of up to 1 MiB outside of it"
    return f"as PyTorch's caching allocator puts them: {count:,} segments of {total} in all, with static memory in the gaps"

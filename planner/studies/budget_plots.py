"""Figures of overhead against budget: of a curve, and of advice."""

from typing import TYPE_CHECKING

from planner.show.views.figures import COLORS, add_legend, choose_size_unit, create_figure, scale_y_axis, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from planner.studies.advice import Advice
    from planner.studies.curve import Curve


def plot_curve(curve: "Curve") -> "Figure":
    """Return the figure of overhead against budget; the area below the bound is shaded."""
    figure = create_figure()
    axes = figure.add_subplot()
    parts = (curve,) if curve.without is None else (curve.without, curve)
    scale, unit = choose_size_unit(max(p.budget_bytes for part in parts for p in part.points))
    for part, color in zip(parts, (COLORS["ours"], COLORS["blocks"]), strict=False):
        bounded = [(p.budget_bytes / scale, 100 * o) for p in part.points if (o := part.overhead(p.bound_s)) is not None]
        solved = [(p.budget_bytes / scale, 100 * o) for p in part.points if (o := part.overhead(p.time_s)) is not None]
        kind = f" with {', '.join(part.options)}" if part.options else ""
        if bounded:
            xs, ys = zip(*bounded, strict=True)
            # A bound holds at all smaller budgets: between two points, that of the larger one holds.
            label = f"proved impossible in this order{kind}"
            axes.fill_between(xs, ys, step="pre", color=color if part.options else "0.6", alpha=0.3, linewidth=0, label=label)
        if solved:
            xs, ys = zip(*solved, strict=True)
            # A schedule fits all larger budgets: between two points, that of the smaller one holds.
            axes.step(xs, ys, where="post", color=color, marker="o", markersize=5, linewidth=2, label=f"remat-planner{kind}")
    for i, budget in enumerate(p.budget_bytes / scale for p in curve.points if p.status == "infeasible"):
        axes.axvline(budget, color=COLORS["budget"], linestyle=":", linewidth=1.2, label=None if i else "infeasible")
    axes.set(xlabel=f"budget ({curve.memory}) in {unit}", ylabel="overhead in %")
    axes.margins(x=0.02)
    scale_y_axis(axes, [100 * o for part in parts for p in part.points if (o := part.overhead(p.time_s)) is not None])
    set_title(axes, curve.name)
    add_legend(figure, axes)
    return figure


def plot_advice(advice: "Advice") -> "Figure":
    """Return the figure of overhead against budget: recomputation alone as a line, each option as a point."""
    figure = create_figure()
    axes = figure.add_subplot()
    scale, unit = choose_size_unit(advice.eager_bytes)
    prices = [(p.budget_bytes / scale, 100 * p.overhead) for p in (advice.least, *advice.between) if p.overhead is not None]
    xs, ys = zip(*prices, (advice.eager_bytes / scale, 0.0), strict=True)
    axes.step(xs, ys, where="post", color=COLORS["ours"], marker="o", linewidth=2, label="recomputation alone")
    for option in advice.options:
        if option.ops and option.price.overhead is not None:
            place = option.price.budget_bytes / scale, 100 * option.price.overhead
            axes.plot(*place, marker="D", linewidth=0, label=f"with {option.name}")
    for size_bytes, label in ((advice.available_bytes, "available"), (advice.recommended.budget_bytes, "recommended")):
        if size_bytes is not None and size_bytes <= 2 * advice.eager_bytes:
            style = "--" if label == "available" else "-"
            axes.axvline(size_bytes / scale, color=COLORS["budget"], linestyle=style, linewidth=1.2, label=label)
    axes.set(xlabel=f"budget ({advice.memory}) in {unit}", ylabel="overhead in %")
    axes.set_ylim(bottom=0)
    set_title(axes, advice.device)
    add_legend(figure, axes)
    return figure

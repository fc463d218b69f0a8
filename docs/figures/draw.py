"""Draws the figures of the documentation, from plans that it makes: ``make figures``. Takes some seconds."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import planner
from graphs.ir import Graph, Phase
from graphs.schedule import Compute, Free, Schedule
from graphs.simulate import simulate
from graphs.synthetic.small import training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from planner.views.figures import save_figure

HERE = Path(__file__).parent
# The calls of docs/architecture.md, in their order: where, what it is called with, and what comes of it.
SOLVE_WALK = (
    ("planner.cli.solve", "arguments", "a graph read from a file"),
    ("planner.solving", "graph, budget, SolveSettings", "a Request in program order, then in another"),
    ("solvers.registry", "the name of a method", "solve(request)"),
    ("solvers.windows.driver", "Search", "stages of strategies, until solved or stopped"),
    ("solvers.windows.incumbent", "an order of executions", "the best schedule, the bound"),
    ("graphs.simulate", "graph, schedule", "peak and time, or an error"),
    ("planner.plans.plan", "Result, GraphSummary", "the plan"),
)
COMPILE_WALK = (
    ("planner.training.compile", "model, loss, batch, budget", "TraceSettings, SolveSettings, RunSettings"),
    ("planner.training.planning", "settings that go together", "a Compiler for each size of batch"),
    ("planner.capture.trace", "TrainingStep, batch", "Capture: graph, program, guards"),
    ("planner.profiling.profile", "Capture", "times, workspaces and sizes"),
    ("planner.search", "graph, budget", "the first plan; better ones while it trains"),
    ("planner.runtime.code", "graph, program, schedule", "a pass forward, a pass backward"),
    ("planner.passes.writer", "Compute and Free", "an FX graph, and its code"),
    ("planner.runtime.executor", "a batch", "loss and gradients"),
)

FORWARD, BACKWARD, AGAIN, GREY = "#3f51b5", "#00897b", "#e65100", "#9e9e9e"


def main() -> None:
    """Draw all of them."""
    draw_memory(HERE / "memory.png")
    draw_schedules(HERE / "schedule.png")
    draw_steps(HERE / "pipeline.png")
    draw_walk(HERE / "walk-solve.png", SOLVE_WALK)
    draw_walk(HERE / "walk-compile.png", COMPILE_WALK)


def draw_memory(path: Path) -> None:
    """Memory over the step of a transformer, keeping everything and by a plan."""
    graph = transformer(TransformerSize(layers=4, vocabulary=8000))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    kept = planner.solve(graph, "100%", solver="keep-everything")
    plan = planner.solve(graph, "60%", work_limit=20)
    for name, drawn, color in (("keeping everything", kept, GREY), ("the plan", plan, FORWARD)):
        times, memory = _memory(graph, drawn.schedule)
        label = f"{name}: {drawn.peak_bytes / 1e9:.2f} GB, {1e3 * drawn.time_s:.1f} ms"
        axes.plot([1e3 * t for t in times], [b / 1e9 for b in memory], color=color, label=label, linewidth=1.2)
    axes.axhline(
        plan.budget_bytes / 1e9, color=AGAIN, linestyle="--", linewidth=1, label=f"budget: {plan.budget_bytes / 1e9:.2f} GB"
    )
    axes.set(xlabel="time in the training step, ms", ylabel="memory, GB", ylim=(0, None), xlim=(0, None))
    axes.legend(loc="lower center", frameon=False)
    save_figure(figure, path)


def _memory(graph: Graph, schedule: Schedule) -> tuple[list[float], list[int]]:
    """When each execution begins and ends, and the memory during it."""
    clock, times, memory = 0.0, [], []
    for step, held in zip(schedule.steps, simulate(graph, schedule).memory_bytes, strict=True):
        if isinstance(step, Compute):
            times += [clock, clock + graph.ops[step.op].time_s]
            memory += [held, held]
            clock = times[-1]
    return times, memory


def draw_schedules(path: Path) -> None:
    """Which tensors of a chain of layers are in memory when, keeping everything and by a plan for less."""
    graph = training_chain(6)
    plans = [planner.solve(graph, budget, solver=solver) for budget, solver in ((7, "keep-everything"), (4, "windows"))]
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    for axes, plan, name in zip(figure.subplots(2, 1, sharex=True), plans, ("keeping everything", "the plan"), strict=True):
        _draw_schedule(axes, graph, plan.schedule)
        more = f", {plan.recomputed} ops recomputed" if plan.recomputed else ""
        axes.set_title(f"{name}: {plan.peak_bytes} tensors at most{more}", loc="left", fontsize=10)
    axes.set_xlabel("ops in order of execution")
    save_figure(figure, path)


def _draw_schedule(axes: Axes, graph: Graph, schedule: Schedule) -> None:
    since: dict[int, int] = {}
    executed: set[int] = set()
    turn = -1

    def bar(tensor: int) -> None:
        begin = since.pop(tensor)
        axes.barh(tensor, turn + 1 - begin, left=begin, height=0.8, color="#c5cae9", linewidth=0)

    for step in schedule.steps:
        if isinstance(step, Free):
            bar(step.tensor)
            continue
        turn, op = turn + 1, graph.ops[step.op]
        color = AGAIN if step.op in executed else BACKWARD if op.phase is Phase.BACKWARD else FORWARD
        executed.add(step.op)
        for tensor in op.outputs:
            since.setdefault(tensor, turn)
            axes.barh(tensor, 1, left=turn, height=0.8, color=color, linewidth=0, zorder=2)
    for tensor in list(since):
        bar(tensor)
    axes.set_yticks(range(len(graph.tensors)), [tensor.name for tensor in graph.tensors], fontsize=7)
    axes.invert_yaxis()
    for name, color in (("forward", FORWARD), ("backward", BACKWARD), ("recomputed", AGAIN), ("in memory", "#c5cae9")):
        axes.barh(0, 0, color=color, label=name)
    axes.legend(loc="lower left", frameon=False, fontsize=8)


def draw_steps(path: Path) -> None:
    """From a model to a planned step."""
    boxes = (
        ("Capture", "model, loss, batch:\nDynamo, AOTAutograd", "planner.capture"),
        ("Profile", "time, workspace and\nsizes of each op", "planner.profiling"),
        ("Solve", "integer program,\nschedule and bound", "solvers"),
        ("Judge", "plays the schedule,\nrefuses what is wrong", "graphs.simulate"),
        ("Run", "straight-line code\nbehind autograd", "planner.runtime"),
    )
    figure = Figure(figsize=(9, 1.9), layout="constrained")
    axes = figure.subplots()
    for i, (title, what, where) in enumerate(boxes):
        axes.add_patch(FancyBboxPatch((i, 0), 0.72, 1, boxstyle="round,pad=0.04", facecolor="#e8eaf6", edgecolor=FORWARD))
        axes.text(i + 0.36, 0.83, title, ha="center", va="center", weight="bold", fontsize=11)
        axes.text(i + 0.36, 0.48, what, ha="center", va="center", fontsize=8)
        axes.text(i + 0.36, 0.12, where, ha="center", va="center", fontsize=8, family="monospace", color=FORWARD)
        if i:
            axes.add_patch(FancyArrowPatch((i - 0.24, 0.5), (i - 0.04, 0.5), arrowstyle="-|>", mutation_scale=12, color=GREY))
    axes.set(xlim=(-0.08, len(boxes) - 0.2), ylim=(-0.1, 1.1))
    axes.axis("off")
    save_figure(figure, path)


def draw_walk(path: Path, calls: tuple[tuple[str, str, str], ...]) -> None:
    """From one module to the next, downwards: what each is called with, and what comes of it."""
    figure = Figure(figsize=(9, 0.62 * len(calls)), layout="constrained")
    axes = figure.subplots()
    for i, (where, given, made) in enumerate(calls):
        y = -float(i)
        axes.add_patch(
            FancyBboxPatch((3.2, y - 0.28), 2.6, 0.56, boxstyle="round,pad=0.04", facecolor="#e8eaf6", edgecolor=FORWARD)
        )
        axes.text(4.5, y, where, ha="center", va="center", fontsize=9, family="monospace", color=FORWARD)
        axes.text(3.0, y, given, ha="right", va="center", fontsize=9)
        axes.text(6.0, y, made, ha="left", va="center", fontsize=9)
        if i:
            axes.add_patch(FancyArrowPatch((4.5, y + 0.72), (4.5, y + 0.3), arrowstyle="-|>", mutation_scale=10, color=GREY))
    axes.set(xlim=(0.2, 9.2), ylim=(0.45 - len(calls), 0.45))
    axes.axis("off")
    save_figure(figure, path)


if __name__ == "__main__":
    main()

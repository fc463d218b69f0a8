"""Draws the figures of the documentation, from plans that it makes: ``make figures``. Takes some seconds."""

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import planner
from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import Compute, Free, Schedule
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.show.views.figures import save_figure

HERE = Path(__file__).parent


class Call(NamedTuple):
    """A call of docs/architecture.md; its caller is the last one before it that is less deep.

    Attributes:
        depth: number of calls around it.
        module: where the called function is; several modules of a caller stand in the order in which it calls them.
        function: the name that the caller calls; several are separated by commas.
        result: what comes of it.
        passed_by: the module that passes the function to the caller as an argument; "" if the caller imports the module.
    """

    depth: int
    module: str
    function: str
    result: str
    passed_by: str = ""

    @property
    def functions(self) -> list[str]:
        """The called functions."""
        return self.function.split(", ")


SOLVE_WALK = (
    Call(0, "planner.cli.solve", "run", "a graph read from a file"),
    Call(1, "planner.plans.solve", "solve", "the graph with its options, a budget in bytes"),
    Call(2, "planner.memory.reserved_budget", "solve_counted", "one solve; more if reserved memory counts"),
    Call(
        3,
        "planner.memory.allocated_budget",
        "_solve_in_order",
        "a solve in the requested order of ops",
        passed_by="planner.plans.solve",
    ),
    Call(4, "planner.solvers.order.solve", "solve_in_best_order", "in program order, then in another"),
    Call(5, "planner.solvers.registry", "_solve", "a method by its name", passed_by="planner.memory.allocated_budget"),
    Call(6, "planner.solvers.windows", "solve", "the exact solver"),
    Call(7, "planner.solvers.windows.driver", "run", "stages of strategies"),
    Call(8, "planner.solvers.windows.strategies.first_schedules", "step", "orders of executions, by rules"),
    Call(8, "planner.solvers.windows.strategies.refinement", "step", "the bound; further windows"),
    Call(9, "planner.solvers.windows.relaxation.models", "build_relaxation", "the rows"),
    Call(9, "planner.solvers.highs", "solve_program", "solutions, and a bound"),
    Call(9, "planner.solvers.windows.decoding.decode", "decode", "an order of executions"),
    Call(9, "planner.solvers.windows.search", "offer", "the trial of an order"),
    Call(10, "planner.solvers.windows.decoding.decode", "try_out", "its schedule"),
    Call(11, "planner.graphs.simulate", "simulate", "peak and time"),
    Call(10, "planner.solvers.windows.incumbent", "take", "the best schedule so far"),
    Call(7, "planner.solvers.result", "Result", "schedule and bound"),
    Call(8, "planner.graphs.simulate", "simulate", "the judge, which raises if the schedule is invalid"),
    Call(2, "planner.plans.plan", "Plan", "the plan"),
)
COMPILE_WALK = (
    Call(0, "planner.train.compile.compile", "compile", "PlanSettings"),
    Call(1, "planner.train.compile.planning", "step", "a plan from the cache, or a new one"),
    Call(2, "planner.train.compile.compiler", "capture, make", "the following, in this order"),
    Call(3, "planner.train.distributed.wrappers", "capture", "the module, and its memory on this process"),
    Call(4, "planner.measure.tracing", "capture_step", "the step, without times"),
    Call(5, "planner.capture.trace", "capture", "the graph, its program, guards"),
    Call(6, "planner.capture.frontend.joint", "capture_joint_graph", "the joint graph, and guards"),
    Call(6, "planner.capture.rewrites.layouts", "record_eager_layouts", "the same ops as eager PyTorch"),
    Call(6, "planner.capture.lowering.lower", "lower", "ops, and the calls of each"),
    Call(3, "planner.measure.tracing", "profile_capture", "the step, with times"),
    Call(4, "planner.measure.profile", "profile", "times, workspaces and sizes"),
    Call(4, "planner.capture.options.traced", "add_traced", "the options that are found in it"),
    Call(3, "planner.plans.search", "find_first_plan", "a plan that is good enough to start with"),
    Call(4, "planner.plans.solve", "solve_graph", "a plan: see the figure above"),
    Call(3, "planner.runtime.executor", "Executor", "the step, ready to run"),
    Call(4, "planner.runtime.code", "compile_schedule", "a forward and a backward pass"),
    Call(5, "planner.capture.program.writer", "write", "the steps of the schedule, on each device"),
    Call(6, "planner.capture.program.builder", "execute", "nodes of an FX graph"),
    Call(5, "planner.capture.program.builder", "finish", "a function, and its code"),
    Call(3, "planner.measure.pool_memory", "measure_peak", "the peak of a step"),
    Call(3, "planner.train.compile.compare_eager", "compare_with_eager", "equal bits, or a warning"),
    Call(3, "planner.train.compile.step", "PlannedStep", "the result of planner.compile"),
    Call(0, "planner.train.compile.step", "__call__", "each step of the training loop"),
    Call(1, "planner.train.compile.improvement", "begin_step", "a better plan, if one was found"),
    Call(1, "planner.runtime.executor", "__call__", "the loss, by the passes", passed_by="planner.train.compile.compiler"),
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
    graph = make_training_chain(6)
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
        ("Profile", "time, workspace and\nsizes of each op", "planner.measure"),
        ("Solve", "integer program,\nschedule and bound", "planner.solvers"),
        ("Judge", "plays the schedule,\nrefuses what is wrong", "planner.graphs.simulate"),
        ("Run", "straight-line code\nbehind autograd", "planner.runtime"),
    )
    figure = Figure(figsize=(9, 1.9), layout="constrained")
    axes = figure.subplots()
    for i, (title, what, where) in enumerate(boxes):
        axes.add_patch(FancyBboxPatch((i, 0), 0.72, 1, boxstyle="round,pad=0.04", facecolor="#e8eaf6", edgecolor=FORWARD))
        axes.text(i + 0.36, 0.83, title, ha="center", va="center", weight="bold", fontsize=11)
        axes.text(i + 0.36, 0.48, what, ha="center", va="center", fontsize=8)
        axes.text(i + 0.36, 0.12, where, ha="center", va="center", fontsize=7, family="monospace", color=FORWARD)
        if i:
            axes.add_patch(FancyArrowPatch((i - 0.24, 0.5), (i - 0.04, 0.5), arrowstyle="-|>", mutation_scale=12, color=GREY))
    axes.set(xlim=(-0.08, len(boxes) - 0.2), ylim=(-0.1, 1.1))
    axes.axis("off")
    save_figure(figure, path)


def draw_walk(path: Path, calls: tuple[Call, ...]) -> None:
    """Draw calls as a tree, in their order from top to bottom; dashed where the function was passed as an argument."""
    indent, row, letter = 0.32, 0.36, 0.078  # inches
    figure = Figure(figsize=(8.6, row * len(calls)), layout="constrained")
    axes = figure.subplots()
    callers: dict[int, float] = {}  # by depth, where the latest box is
    for i, call in enumerate(calls):
        left, y, width = indent * call.depth, -row * i, letter * len(call.module)
        box = FancyBboxPatch((left, y - 0.1), width, 0.2, boxstyle="round,pad=0.04", facecolor="#e8eaf6", edgecolor=FORWARD)
        axes.add_patch(box)
        axes.text(left + width / 2, y, call.module, ha="center", va="center", fontsize=8.5, family="monospace", color=FORWARD)
        functions = ", ".join(f"{name}()" for name in call.functions)
        axes.text(left + width + 0.12, y, f"{functions}: {call.result}", ha="left", va="center", fontsize=8.5)
        if call.depth:
            stem, top = left - indent + 0.12, callers[call.depth - 1] - 0.14
            color, style, layer = (AGAIN, "--", -1) if call.passed_by else (GREY, "-", 0)
            axes.plot((stem, stem, left - 0.1), (top, y, y), color=color, linestyle=style, linewidth=1, zorder=layer)
            axes.add_patch(FancyArrowPatch((left - 0.12, y), (left - 0.03, y), arrowstyle="-|>", mutation_scale=8, color=color))
        callers[call.depth] = y
    axes.set(xlim=(-0.1, 8.4), ylim=(-row * len(calls) + 0.15, 0.2))
    axes.axis("off")
    save_figure(figure, path)


if __name__ == "__main__":
    main()

"""Solvers by name. To add a method, add one file and one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module

from planner.graphs.checks import check_plain
from planner.graphs.errors import PlannerError, UsageError, quote, suggest
from planner.graphs.ir import Graph
from planner.graphs.options.offload import remove_offload
from planner.solvers.request import Request
from planner.solvers.result import Result

Solver = Callable[[Request], Result]  # returns a schedule within the budget, or the reason why there is none


@dataclass(frozen=True, slots=True)
class Entry:
    """A solver's module (imported on demand), a line about it, and arguments of its `solve`.

    `params` is the class of its parameters, as ``module:class``.

    Flags state the graphs that it accepts: with `transfers`, those with transfers to the host; with `alternatives`, those with
    optional ops of the program's device; with `devices`, those with other devices. Others accept plain graphs only. With
    `only_transfers` it requires transfers to the host; with `only_devices` it requires other devices and accepts no other
    options. With `large_programs` it solves integer or linear programs of the whole graph, and may take its whole time limit; its
    module has a function ``measure_program``, which returns the size of that of a graph and a budget.
    """

    module: str
    description: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    params: str = ""
    transfers: bool = False
    alternatives: bool = False
    only_transfers: bool = False
    devices: bool = False
    only_devices: bool = False
    large_programs: bool = False


def _make_baseline(module: str, description: str, rule: str = "", *, params: str = "") -> Entry:
    module, arguments = f"planner.solvers.baselines.{module}", {"rule": rule} if rule else {}
    return Entry(module, description, arguments, f"{module}:{params}" if params else "")


def _make_dtr(description: str, rule: str = "") -> Entry:
    return _make_baseline("dtr", description, rule, params="DtrParams")


def _make_offloading(module: str, description: str) -> Entry:
    return replace(_make_baseline(module, description), transfers=True, only_transfers=True)


def _make_xengine(description: str, rule: str = "") -> Entry:
    baseline = _make_baseline("xengine", description, rule, params="XEngineParams")
    return replace(baseline, devices=True, only_devices=True, large_programs=True)


SOLVERS: dict[str, Entry] = {
    "windows": Entry(
        "planner.solvers.windows",
        "optimal schedule with a proof: a MILP of windows, refined where memory is tight (HiGHS)",
        params="planner.solvers.windows.params:WindowsParams",
        transfers=True,
        alternatives=True,
        devices=True,
    ),
    "keep-everything": _make_baseline("keep_everything", "keep everything: no recomputation"),
    "checkmate": replace(
        _make_baseline(
            "checkmate",
            "the reference: Checkmate's program as published, for small graphs (MILP, PuLP)",
            params="CheckmateParams",
        ),
        large_programs=True,
    ),
    "rounding": replace(
        _make_baseline("rounding", "Checkmate's linear relaxation, rounded in two phases (PuLP)", params="RoundingParams"),
        large_programs=True,
    ),
    "checkpoint-blocks": _make_baseline(
        "checkpoint_blocks", "recompute the forward of each block before its backward, for the blocks that fit best"
    ),
    "chen-sqrt": _make_baseline("chen", "recompute about sqrt(n) segments (Chen et al.)"),
    "chen-greedy": _make_baseline(
        "chen", "recompute segments that end after a number of bytes, the best that is found", "chen-greedy"
    ),
    "griewank": _make_baseline("griewank", "binomial checkpointing of a chain (revolve)"),
    "rotor": _make_baseline("rotor", "the optimal schedule of a chain (dynamic programme)"),
    "sac": _make_baseline(
        "sac", "selective checkpointing: the best list of matmuls, convolutions and attention to save", params="SacParams"
    ),
    "sac-every-second": _make_baseline(
        "sac",
        "selective checkpointing: save convolutions, attention and every second matmul",
        "sac-every-second",
        params="SacParams",
    ),
    "sac-attention": _make_baseline("sac", "selective checkpointing: save attention only", "sac-attention", params="SacParams"),
    "memory-budget": _make_baseline("memory_budget", "PyTorch's Memory Budget API: a knapsack over saved bytes"),
    "dtr": _make_dtr("DTR online: evict by cost of the equivalence class / (bytes x staleness)"),
    "dtr-full": _make_dtr("DTR online, with the exact cost of the evicted neighbourhood", "dtr-full"),
    "dtr-local": _make_dtr("DTR online, with a tensor's own cost only", "dtr-local"),
    "lru": _make_dtr("online: evict the least recently read tensor", "lru"),
    "largest": _make_dtr("online: evict the largest tensor", "largest"),
    "msps": _make_dtr("online: evict by (cost, evicted ancestors included) / bytes (MSPS)", "msps"),
    "dtr-random": _make_dtr("online: evict at random", "dtr-random"),
    "megengine": _make_baseline(
        "megengine",
        "MegEngine online: DTR with costs in bytes, without small tensors; best of some settings",
        params="MegEngineParams",
    ),
    "megengine-static": _make_baseline(
        "megengine",
        "MegEngine for a known step: evict by next use; best of some settings",
        "megengine-static",
        params="MegEngineParams",
    ),
    "save-on-cpu": _make_offloading("save_on_cpu", "offload all saved tensors, and wait for copies (PyTorch's save_on_cpu)"),
    "offload-activations": _make_offloading(
        "offload_activations", "offload all saved tensors during the computation (torchtune)"
    ),
    "deepspeed-offload": _make_offloading(
        "deepspeed_offload", "offload all large tensors, then keep the largest ones that fit (DeepSpeed)"
    ),
    "sac-and-offload": _make_offloading(
        "sac_and_offload", "selective checkpointing; saved tensors are offloaded one layer later (torchtitan)"
    ),
    "capuchin-swap": _make_offloading("capuchin_swap", "swap in order of measured free time (Capuchin)"),
    "delta": _make_offloading("delta", "DELTA online: evict the largest and stalest tensors, by a swap or for recomputation"),
    "auto-perf-maxing": _make_offloading(
        "auto_perf_maxing", "an LP chooses a fraction for each layer, an ILP its tensors, in rounds (torchtitan)"
    ),
    "poet": replace(
        _make_offloading("poet", "POET's program: recompute or page, transfers take no time; small graphs (MILP, HiGHS)"),
        large_programs=True,
    ),
    "monet": replace(
        _make_baseline("monet", "MONeT's program: recompute the forward pass, choose kernels; small graphs (HiGHS)"),
        alternatives=True,
        large_programs=True,
    ),
    "xengine": _make_xengine("XEngine's program for several devices: least sum of times; small graphs (HiGHS)"),
    "xengine-overlapped": _make_xengine(
        "XEngine's program: least makespan of devices that run in parallel; small graphs (HiGHS)", "xengine-overlapped"
    ),
}


def estimate_program_time_s(name: str, graph: Graph, budget_bytes: int) -> float:
    """Return about the least seconds in which the program of the solver `name` can have a solution; 0 if that is not known."""
    entry = check_solver(name)
    if not entry.large_programs:
        return 0.0
    size = import_module(entry.module).measure_program(graph, budget_bytes, **entry.arguments)
    needed_s: float = 0.0 if size is None else size.needed_s
    return needed_s


def check_solver(name: str) -> Entry:
    """Return the entry of the solver `name`.

    Raises:
        UsageError: unknown name; says which was probably meant.
    """
    if name not in SOLVERS:
        described = (known for known, entry in SOLVERS.items() if name and name.lower() in entry.description.lower())
        meant = suggest(name, SOLVERS) or next((f" (did you mean {known}?)" for known in described), "")
        raise UsageError(f"there is no solver {name!r}{meant}: `planner solvers` lists them all")
    return SOLVERS[name]


def check_params(name: str, params: object) -> None:
    """Raise a UsageError unless `params` is None, for the defaults, or of the class of the solver's parameters."""
    entry = check_solver(name)
    if params is None:
        return
    if not entry.params:
        raise UsageError(f"params is {quote(params)}, but the solver {name!r} has no parameters: leave params out")
    module, kind = entry.params.split(":")
    if not isinstance(params, getattr(import_module(module), kind)):
        raise UsageError(f"params is {quote(params)}: must be {kind} ({module}), or None for its defaults")


def check_takes(name: str, *, transfers: bool, devices: bool, named: str) -> None:
    """Raise a PlannerError if the solver `name` does not support some options of a graph.

    Args:
        transfers: True if one of them offloads to the host.
        devices: True if one of them runs ops on other devices.
        named: all of them, for the message.
    """
    entry = check_solver(name)
    if devices != entry.devices and (devices or entry.only_devices):
        does = "does not place ops on other devices" if devices else "only places ops on other devices"
        raise PlannerError(f"the solver {name!r} {does}: use the solver 'windows', or other options than {named}")
    if not entry.only_devices and not entry.transfers and not (entry.alternatives and not transfers):
        does = "transfers nothing" if entry.alternatives else "recomputes only"
        raise PlannerError(f"the solver {name!r} {does}: leave the options out, or use the solver 'windows'")


def get_solver(name: str) -> Solver:
    """Return the `solve` function of the solver `name`, which raises GraphError for graphs that the solver does not support.

    Raises:
        UsageError: unknown name.
    """
    return partial(_solve, name, import_module(check_solver(name).module).solve)


def _solve(name: str, function: Callable[..., Result], request: Request) -> Result:
    entry = SOLVERS[name]
    check_params(name, request.params)
    if not entry.alternatives and not entry.devices:
        check_plain(remove_offload(request.graph)[0] if entry.transfers else request.graph)
    return function(request, **entry.arguments)

"""Solvers by name. Adding a method is adding one file and one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from graphs.checks import check_plain
from graphs.errors import PlannerError
from graphs.options.offload import without_copies
from solvers.request import Request
from solvers.result import Result

Solver = Callable[[Request], Result]  # finds a schedule within the budget, or says why there is none


@dataclass(frozen=True, slots=True)
class Entry:
    """A solver's module (imported when asked for), one line about it, and options that its `solve` is called with.

    With `copies` it takes graphs that offer round trips to the host, with `choices` such with optional ops beside the
    program's, with `places` those that offer other devices; all others refuse graphs with choices. With `offloads` it does
    nothing without round trips, with `only_places` nothing without devices, and with anything besides. With `large_programs`
    it solves integer or linear programs of the whole graph, and may take as long as it is given.
    """

    module: str
    description: str
    options: Mapping[str, object] = field(default_factory=dict)
    copies: bool = False
    choices: bool = False
    offloads: bool = False
    places: bool = False
    only_places: bool = False
    large_programs: bool = False


CHEN = "solvers.policies.chen"
DTR = "solvers.policies.dtr"
MEGENGINE = "solvers.policies.megengine"
SAC = "solvers.policies.sac"
XENGINE = "solvers.xengine"


def _offload(module: str, description: str, *, large_programs: bool = False) -> Entry:
    return Entry(f"solvers.policies.offload.{module}", description, copies=True, offloads=True, large_programs=large_programs)


SOLVERS: dict[str, Entry] = {
    "windows": Entry(
        "solvers.windows",
        "optimal schedule with a proof: windows refined where memory is tight (MILP, HiGHS)",
        copies=True,
        choices=True,
        places=True,
    ),
    "keep-everything": Entry("solvers.policies.keep_everything", "keep everything: no recomputation"),
    "checkmate": Entry(
        "solvers.checkmate",
        "the reference: Checkmate's program as published, for small graphs (MILP, PuLP)",
        large_programs=True,
    ),
    "rounding": Entry("solvers.rounding", "Checkmate's linear relaxation, rounded in two phases (PuLP)", large_programs=True),
    "checkpoint-blocks": Entry(
        "solvers.policies.checkpoint_blocks", "recompute each block's forward before its backward, blocks being what fits best"
    ),
    "chen-sqrt": Entry(CHEN, "recompute about sqrt(n) segments (Chen et al.)"),
    "chen-greedy": Entry(CHEN, "recompute segments that end after a number of bytes, searched", {"rule": "chen-greedy"}),
    "griewank": Entry("solvers.policies.griewank", "binomial checkpointing of a chain (revolve)"),
    "rotor": Entry("solvers.policies.rotor", "the optimal schedule of a chain (dynamic programme)"),
    "sac": Entry(SAC, "selective checkpointing: of the lists of matmuls, convolutions and attention the best"),
    "sac-every-second": Entry(
        SAC, "selective checkpointing: save all of these but every second matmul", {"rule": "sac-every-second"}
    ),
    "sac-attention": Entry(SAC, "selective checkpointing: save attention only", {"rule": "sac-attention"}),
    "memory-budget": Entry("solvers.policies.memory_budget", "PyTorch's Memory Budget API: a knapsack over saved bytes"),
    "dtr": Entry(DTR, "DTR online: evict by cost of the equivalence class / (bytes x staleness)"),
    "dtr-full": Entry(DTR, "DTR online, with the exact cost of the evicted neighbourhood", {"rule": "dtr-full"}),
    "dtr-local": Entry(DTR, "DTR online, with a tensor's own cost only", {"rule": "dtr-local"}),
    "lru": Entry(DTR, "online: evict what was read least recently", {"rule": "lru"}),
    "largest": Entry(DTR, "online: evict the largest", {"rule": "largest"}),
    "msps": Entry(DTR, "online: evict by cost with evicted ancestors / bytes (MSPS)", {"rule": "msps"}),
    "dtr-random": Entry(DTR, "online: evict at random", {"rule": "dtr-random"}),
    "megengine": Entry(MEGENGINE, "MegEngine online: DTR with costs by bytes and small tensors spared, settings tried"),
    "megengine-static": Entry(
        MEGENGINE, "MegEngine with the step known: by next use, settings tried", {"rule": "megengine-static"}
    ),
    "save-on-cpu": _offload("save_on_cpu", "offload all that is saved, and wait (PyTorch's save_on_cpu)"),
    "offload-activations": _offload("offload_activations", "offload all that is saved, beside the computation (torchtune)"),
    "deepspeed-offload": _offload("deepspeed", "offload all that is large, keep the largest that there is room for (DeepSpeed)"),
    "sac-and-offload": _offload("sac_and_offload", "selective checkpointing, what is saved offloaded a layer late (torchtitan)"),
    "capuchin-swap": _offload("capuchin", "swap in order of measured free time (Capuchin)"),
    "delta": _offload("delta", "DELTA online: evict the largest and stalest, swapped or recomputed"),
    "auto-perf-maxing": _offload("auto_perf", "fractions of layers by an LP, tensors by an ILP each, in rounds (torchtitan)"),
    "poet": _offload(
        "poet", "POET's program: recompute or page, paging at no time; for small graphs (MILP, HiGHS)", large_programs=True
    ),
    "monet": Entry(
        "solvers.policies.monet",
        "MONeT's program: recompute the forward pass, choose kernels; small (HiGHS)",
        choices=True,
        large_programs=True,
    ),
    "xengine": Entry(
        XENGINE,
        "the reference on several devices: XEngine's program, a serial sum; small graphs (HiGHS)",
        places=True,
        only_places=True,
        large_programs=True,
    ),
    "xengine-overlapped": Entry(
        XENGINE,
        "the same for the makespan of devices that work side by side",
        {"overlapped": True},
        places=True,
        only_places=True,
        large_programs=True,
    ),
}


def get_solver(name: str) -> Solver:
    """The `solve` function of the solver called `name`, which refuses a graph with choices that solvers do not know.

    Raises:
        PlannerError: no such solver; names those there are.
    """
    if name not in SOLVERS:
        raise PlannerError(f"there is no solver {name!r}: choose one of {', '.join(SOLVERS)}")
    entry = SOLVERS[name]
    function = import_module(entry.module).solve

    def solve(request: Request) -> Result:
        if not entry.choices and not entry.places:
            check_plain(without_copies(request.graph)[0] if entry.copies else request.graph)
        result: Result = function(request, **entry.options)
        return result

    return solve

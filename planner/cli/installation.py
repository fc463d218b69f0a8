"""Facts about the installation, machine and model that show whether a step can be planned."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from planner.capture.workload.workload import ModelSpec
from planner.graphs.errors import PlannerError, TraceError
from planner.graphs.ir import Graph
from planner.graphs.units import format_bytes, format_seconds
from planner.measure.link_rates import link_alone
from planner.measure.machine import describe_machine
from planner.measure.tracing import trace
from planner.memory.free_memory import free_bytes
from planner.native.library import describe_library
from planner.plans.summary import summarize
from planner.settings.plan import PlanSettings
from planner.studies.workload_tracing import Tracing
from planner.torch_private.capture import find_graph_breaks

_NEEDED = ("remat-planner", "torch", "highspy", "PuLP", "scipy", "numpy")
_OPTIONAL = ("transformers", "accelerate", "lightning", "matplotlib", "bokeh", "dask")


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report of ``planner doctor``.

    Attributes:
        topic: ``versions``, ``packages``, ``device``, ``link`` or ``model``.
        name, value: the subject of the check, and its result.
        problem: the problem and its solution; empty if there is none.
    """

    topic: str
    name: str
    value: str
    problem: str = ""


def iterate_facts(model: ModelSpec | None = None) -> Iterator[Fact]:
    """Yield the facts one by one, as they are found.

    Args:
        model: a model to capture as well; no memory is allocated for it, unless the capture fails.
    """
    yield from _iterate_versions()
    yield from _iterate_packages()
    yield from _iterate_devices()
    if model is not None:
        yield from _iterate_capture_facts(model)


def _iterate_versions() -> Iterator[Fact]:
    yield Fact("versions", "python", platform.python_version())
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            yield Fact("versions", name, torch.__version__ if name == "torch" else version(name))
        except PackageNotFoundError:
            missing = f"{name} is not installed: pip install {name}" if name in _NEEDED else ""
            yield Fact("versions", name, "not installed", missing)


def _iterate_packages() -> Iterator[Fact]:
    yield Fact("packages", "planner", str(Path(__file__).parents[1]))
    yield Fact("packages", "C++ library", describe_library())


def _iterate_devices() -> Iterator[Fact]:
    cpu = torch.device("cpu")
    yield Fact("device", "cpu", f"{describe_machine()}, {torch.get_num_threads()} threads for PyTorch")
    yield Fact("device", "cpu memory", f"{format_bytes(free_bytes(cpu))} free for this process")
    built = torch.version.cuda
    if not torch.cuda.is_available():
        without = "this PyTorch is built without CUDA" if built is None else f"PyTorch is built for CUDA {built} and finds no GPU"
        yield Fact("device", "cuda", without)
        yield _link(cpu)
        return
    for index in range(torch.cuda.device_count()):
        device, found = torch.device("cuda", index), torch.cuda.get_device_properties(index)
        yield Fact("device", str(device), f"{found.name}, compute capability {found.major}.{found.minor}, CUDA {built}")
        total = format_bytes(found.total_memory)
        yield Fact("device", f"{device} memory", f"{format_bytes(free_bytes(device))} of {total} free for this process")
        yield _link(device)


def _link(device: torch.device) -> Fact:
    rates = link_alone(device)
    out, back = format_bytes(rates.out_bytes_per_s), format_bytes(rates.in_bytes_per_s)
    return Fact("link", str(device), f"{out}/s to host memory, {back}/s from it")


def _iterate_capture_facts(model: ModelSpec) -> Iterator[Fact]:
    try:
        graph = _trace_graph(model)
    except TraceError as error:
        yield Fact("model", str(model), "cannot be captured as one graph", str(error))
        yield from _iterate_breaks(model)
    except PlannerError as error:
        yield Fact("model", str(model), "cannot be built", str(error))
    else:
        summary = summarize(graph)
        peak, time = format_bytes(summary.keep_everything_peak_bytes), format_seconds(summary.time_s)
        yield Fact("model", str(model), f"one graph of {summary.ops:,} ops, peak {peak}; {time} by the roofline of a CPU")


def _trace_graph(model: ModelSpec) -> Graph:
    """Return the graph of `model`, with times by a roofline."""
    with suppress(TraceError):  # a step may branch on data, whose values fake tensors do not have
        return Tracing(PlanSettings(roofline="cpu")).trace_graph(model)
    return trace(*Tracing().load(model), roofline="cpu")


def _iterate_breaks(model: ModelSpec) -> Iterator[Fact]:
    """Yield the places where ``torch.compile`` breaks the graph, as ``torch.compile(backend="planner")`` allows."""
    module, _, batch = Tracing().load(model)
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch[:-1]), {})
    for number, (where, reason) in enumerate(find_graph_breaks(module, args, kwargs), start=1):
        yield Fact("model", f"graph break {number}", f"{where}: {reason}")

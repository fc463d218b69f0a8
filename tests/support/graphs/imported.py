"""Small graphs in other projects' formats, logs as simrd reads them, and the instances that others have published."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.graphs.importers import simrd
from planner.graphs.ir import Graph

CHECKMATE: dict[str, Any] = {
    "name": "small",
    "cost": [100, 250, 0, 50],
    "memory": [4, 2, 0, 1],
    "parents": [[], [0], [1, 0], [2, 0]],
    "loss": 1,
    "fixed_memory": 10,
    "reference": [
        {"device_GB": 1, "budget": 6, "gurobi_seconds": 3, "gurobi_cost": 500},
        {"device_GB": 2, "budget": 5, "gurobi_seconds": 86401, "gurobi_cost": 600},
    ],
}
TRAINING: dict[str, Any] = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "two layers"},
    "nodes": [
        {"name": "f", "backward": False, "cost_cpu": 3, "cost_ram": 100, "id": 0},
        {"name": "g", "backward": False, "cost_cpu": 4, "cost_ram": 50, "id": 1},
        {"name": "g_backward", "backward": True, "cost_cpu": 8, "cost_ram": 100, "id": 2},
    ],
    "links": [{"source": 0, "target": 1}, {"source": 1, "target": 2}, {"source": 0, "target": 2}],
}
LAYERED: dict[str, Any] = {
    "directed": True,
    "graph": {"name": "layered", "order": [2, 0, 1]},
    "nodes": [{"name": i, "out_cost": 10 * i, "duration": i, "param_cost": 1} for i in range(3)],
    "links": [{"0": 2, "1": 0}, {"0": 0, "1": 1}, {"0": 2, "1": 1}],
}


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def constant(name: str, size: int) -> list[dict[str, Any]]:
    return [{"INSTRUCTION": "CONSTANT", "NAME": name}, {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}]


def call(name: str, arguments: str, results: dict[str, tuple[int, int]], time_ns: int = 1000) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"INSTRUCTION": "CALL", "NAME": name, "ARGS": arguments.split(), "RESULT": list(results), "TIME": str(time_ns)}
    ]
    for result, (size, alias) in results.items():
        lines.append({"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(size)})
        lines.append({"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(alias)})
    return lines


def mutate(name: str, arguments: str, time_ns: int = 1000) -> list[dict[str, Any]]:
    return [{"INSTRUCTION": "MUTATE", "NAME": name, "ARGS": arguments.split(), "MUTATE": [0], "TIME": str(time_ns)}]


def release(*names: str) -> list[dict[str, Any]]:
    return [{"INSTRUCTION": "RELEASE", "NAME": name} for name in names]


def copy(kind: str, dst: str, src: str) -> list[dict[str, Any]]:
    return [{"INSTRUCTION": kind, "DST": dst, "SRC": src}]


def annotate(what: str) -> list[dict[str, Any]]:
    return [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": what}]


SMALL_LOG = [
    *constant("before", 7),
    *annotate("START"),
    *constant("w", 100),
    *constant("x", 10),
    *call("t", "w", {"wt": (100, 0)}, 300),
    *call("mm", "x wt", {"h": (40, -1)}),
    *call("view", "h", {"hv": (40, 0)}, 20),
    *copy("COPY", "saved", "h"),  # the storage of h lives on when hv is overwritten
    *mutate("relu_", "hv"),
    *constant("step", 8),
    *call("dropout", "hv", {"d": (40, -1), "mask": (5, -1)}),
    *annotate("BACKWARD"),
    *release("mask", "before"),
    *call("dropout_backward", "d", {"g": (40, -1)}),
    *release("d", "hv", "h"),
    *call("mm", "g x", {"gw": (100, -1)}),
    *release("saved", "g"),
]


def write_log(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def log_peak_bytes(lines: list[dict[str, Any]]) -> int:
    """Most memory that a log accounts for: sizes come at MEMORY, storages go with their last reference."""
    start = next(i for i, line in enumerate(lines) if line.get("ANNOTATION") == "START")
    size: dict[int, int] = {}
    references: dict[int, int] = {}
    pinned: set[int] = set()
    names: dict[str, int] = {}
    memory = peak = 0

    def new(name: str, size_bytes: int) -> None:
        nonlocal memory
        names[name] = storage = len(size)
        size[storage], references[storage] = size_bytes, 1
        memory += size_bytes

    def drop(storage: int) -> None:
        nonlocal memory
        references[storage] -= 1
        if not references[storage] and storage not in pinned:
            memory -= size[storage]

    arguments: list[str] = []
    pending = 0
    for line in lines[start + 1 :]:
        match line["INSTRUCTION"]:
            case "CONSTANT":
                new(line["NAME"], 0)
                pinned.add(names[line["NAME"]])
            case "MEMORY" if names.get(line["NAME"]) in pinned:
                size[names[line["NAME"]]] = int(line["MEMORY"])
                memory += int(line["MEMORY"])
            case "CALL":
                arguments = line["ARGS"]
            case "MEMORY":
                pending = int(line["MEMORY"])
            case "ALIAS" if line["ALIAS"] == "-1":
                new(line["NAME"], pending)
            case "ALIAS":
                names[line["NAME"]] = names[arguments[int(line["ALIAS"])]]
                references[names[line["NAME"]]] += 1
            case "MUTATE":
                written = [(line["ARGS"][i], names[line["ARGS"][i]]) for i in line["MUTATE"]]
                for name, storage in written:
                    new(name, size[storage])
                peak = max(peak, memory)
                for _, storage in written:
                    drop(storage)
            case "COPY":
                names[line["DST"]] = names[line["SRC"]]
                references[names[line["SRC"]]] += 1
            case "COPY_FROM":
                old, names[line["DST"]] = names[line["DST"]], names[line["SRC"]]
                references[names[line["SRC"]]] += 1
                drop(old)
            case "RELEASE" if line["NAME"] in names:
                drop(names[line["NAME"]])
        peak = max(peak, memory)
    return peak


INSTANCES = Path(__file__).parents[3] / ".." / "shared" / "instances"


def public(name: str) -> Path:
    path = INSTANCES / name
    if not path.exists():
        pytest.skip(f"the public instances are not here: no {path}")
    return path


def public_log(name: str, *, views: bool = False) -> Graph:
    """A log of those published with DTR."""
    return simrd.read(public(f"simrd/{name}.log.gz"), name=name, views=views)

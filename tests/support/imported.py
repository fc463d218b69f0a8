"""Small graphs in other people's formats."""

import json
from pathlib import Path
from typing import Any

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

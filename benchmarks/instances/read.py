"""Read an instance. Needs nothing but Python: copy this file and ``check.py`` next to your solver."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace


def read(path: str | Path) -> SimpleNamespace:
    """Return an instance, with the attributes of README.md: `ops`, `tensors`, `kept`, `static_bytes`, `known`, `name`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        instance = SimpleNamespace(**json.load(file))
    ops = [SimpleNamespace(**{"mutates": [], "recomputable": True, "random": False, **op}) for op in instance.ops]
    return SimpleNamespace(**{**vars(instance), "ops": ops, "known": [SimpleNamespace(**known) for known in instance.known]})


def list_names(folder: str | Path = Path(__file__).parent) -> list[str]:
    """Return the names of the instances in a folder."""
    return sorted(path.name.removesuffix(".json.gz") for path in Path(folder).glob("*.json.gz"))

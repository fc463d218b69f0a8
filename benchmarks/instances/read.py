"""Read an instance. Needs nothing but Python: copy this file and ``check.py`` to wherever your solver is."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace


def read(path: str | Path) -> SimpleNamespace:
    """An instance, with what README.md describes as attributes: `ops`, `tensors`, `kept`, `static_bytes`, `known`, `name`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        instance = SimpleNamespace(**json.load(file))
    ops = [SimpleNamespace(**{"mutates": [], "recomputable": True, "random": False, **op}) for op in instance.ops]
    return SimpleNamespace(**{**vars(instance), "ops": ops, "known": [SimpleNamespace(**known) for known in instance.known]})


def names(folder: str | Path = Path(__file__).parent) -> list[str]:
    """The instances in a folder."""
    return sorted(path.name.removesuffix(".json.gz") for path in Path(folder).glob("*.json.gz"))

"""Attributes of objects by name, for rows of a CSV and for JSON."""

from typing import Any


def select_attributes(source: object, *names: str) -> dict[str, Any]:
    """Return the attributes `names` of `source`, in this order."""
    return {name: getattr(source, name) for name in names}

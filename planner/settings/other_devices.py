"""Devices apart from the main one: their names and their measurements. Never imports torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from planner.graphs.errors import GraphError, MismatchError, UsageError
from planner.graphs.options.surroundings import OtherDevice

DEVICES_KEY = "devices"  # key in the provenance of a graph and in the settings of plans
_NAME = re.compile(r"(cpu|cuda)(?::([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device of this machine, as users name it.

    Attributes:
        name: ``cpu``, ``cpu:2`` for two threads of it, ``cuda``, or ``cuda:1`` for the second GPU.
        torch_device: its name in PyTorch.
        threads: number of threads of a CPU's operators; None for PyTorch's default.
    """

    name: str
    torch_device: str
    threads: int | None = None


def parse_device(name: str) -> NamedDevice:
    """Return the device with this `name`; raise a UsageError if no device can have it."""
    match = _NAME.fullmatch(name.strip())
    if match is None or match[0] == "cpu:0":
        raise UsageError(
            f"there is no device {name!r}: write cpu, cpu:2 for two threads of it, cuda, or cuda:1 for the second GPU"
        )
    kind, number = match[1], match[2]
    if kind == "cpu":
        return NamedDevice(match[0], "cpu", None if number is None else int(number))
    return NamedDevice(match[0], match[0])


def encode_devices(devices: Sequence[OtherDevice]) -> list[dict[str, object]]:
    """Return devices as stored in the provenance of graphs and in the settings of plans."""
    return [msgspec.to_builtins(device) for device in devices]


def decode_devices(said: Mapping[str, object]) -> tuple[OtherDevice, ...]:
    """Return the devices stored in a provenance or in the settings of a plan; () if there are none.

    Raises:
        MismatchError: their values cannot be measurements.
    """
    try:
        return msgspec.convert(said.get(DEVICES_KEY, ()), tuple[OtherDevice, ...])
    except (msgspec.ValidationError, GraphError) as error:
        raise MismatchError(
            f"the measurements on other devices are not in the form that a trace writes ({error}): the file was edited; trace "
            "the step again with other_devices= (--other-devices)"
        ) from None

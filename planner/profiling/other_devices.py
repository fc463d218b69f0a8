"""Other devices beside the main one: how they are named, and what was measured of them. Never imports torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from graphs.errors import GraphError, MismatchError, UsageError
from graphs.options.surroundings import OtherDevice

DEVICES_KEY = "devices"  # in the provenance of a graph, and in the settings of plans
_NAME = re.compile(r"(cpu|cuda)(?::([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device of this machine, as users name it.

    Attributes:
        name: ``cpu``, ``cpu:2`` for two threads of it, ``cuda``, or ``cuda:1`` for the second GPU.
        torch_device: what PyTorch calls it.
        threads: of a CPU, that its operators run on; None for as many as PyTorch's default.
    """

    name: str
    torch_device: str
    threads: int | None = None


def named_device(name: str) -> NamedDevice:
    """The device that is called `name`.

    Raises:
        UsageError: none can be.
    """
    match = _NAME.fullmatch(name.strip())
    if match is None or match[0] == "cpu:0":
        raise UsageError(
            f"there is no device {name!r}: write cpu, cpu:2 for two threads of it, cuda, or cuda:1 for the second GPU"
        )
    kind, number = match[1], match[2]
    if kind == "cpu":
        return NamedDevice(match[0], "cpu", None if number is None else int(number))
    return NamedDevice(match[0], match[0])


def recorded_devices(devices: Sequence[OtherDevice]) -> list[dict[str, object]]:
    """As the provenance of graphs and the settings of plans have them."""
    return [msgspec.to_builtins(device) for device in devices]


def known_devices(said: Mapping[str, object]) -> tuple[OtherDevice, ...]:
    """The devices that a provenance, or the settings of a plan, name; none where they name none.

    Raises:
        MismatchError: they cannot be what was measured.
    """
    try:
        return msgspec.convert(said.get(DEVICES_KEY, ()), tuple[OtherDevice, ...])
    except (msgspec.ValidationError, GraphError) as error:
        raise MismatchError(
            f"what is said of other devices is not what a trace measures ({error}): the file was edited; trace the step again "
            "with other_devices= (--other-devices)"
        ) from None

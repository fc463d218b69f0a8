"""Channels between the pools of a step: threads between memories of the CPU, streams from and to CUDA devices."""

from typing import Any

import torch

from planner.capture.lowering.statics import compute_allocated_bytes
from planner.graphs.pools import DEVICE_TO_HOST, HOST_TO_DEVICE
from planner.runtime.transfers.cuda_channels import StreamChannel, create_host_memory
from planner.runtime.transfers.host_memory import HostMemory, HostTensor
from planner.runtime.transfers.thread_channels import ThreadChannel
from planner.runtime.transfers.transfers import DeviceMemory, PoolMemory, Transfer


def open_channel(
    stream: str, source: torch.device, target: torch.device, memory: PoolMemory, *, timed: bool = False
) -> StreamChannel | ThreadChannel:
    """Return the channel that the `stream` of a graph names, to the `memory` of the device `target`."""
    name = stream.replace("_", " ")
    cuda = next((device for device in (source, target) if device.type == "cuda"), None)
    return ThreadChannel(name, memory) if cuda is None else StreamChannel(name, cuda, memory, timed=timed)


class HostChannels:
    """The host memory of one device, and the channels to it and back. Several executors may share them.

    Attributes:
        by_stream: the two channels, by stream of a graph.
    """

    def __init__(self, device: torch.device, host_bytes: int | None = None, *, timed: bool = False) -> None:
        """Open channels between `device` and `host_bytes` of host memory, None for no limit; if `timed`, copies record ends."""
        host = torch.device("cpu")
        self.memory = create_host_memory(device, host_bytes) if device.type == "cuda" else HostMemory(host_bytes)
        self.by_stream = {
            DEVICE_TO_HOST: open_channel(DEVICE_TO_HOST, device, host, self.memory, timed=timed),
            HOST_TO_DEVICE: open_channel(HOST_TO_DEVICE, host, device, DeviceMemory(device), timed=timed),
        }

    def offload(self, tensor: torch.Tensor, made_by: Transfer | None = None) -> tuple[HostTensor, Transfer]:
        """Issue the copy of `tensor`; return the tensor on the host, and the transfer, to be finished before `tensor` goes."""
        transfer = self.by_stream[DEVICE_TO_HOST].transfer()
        transfer.send(tensor, made_by)
        return transfer.take(compute_allocated_bytes(tensor.untyped_storage().nbytes(), tensor.device)), transfer

    def reload(self, host: HostTensor) -> tuple[Any, Transfer]:
        """Issue the copy of `host`; return the memory taken for it, and the transfer, which has the tensor when it arrives."""
        transfer = self.by_stream[HOST_TO_DEVICE].transfer()
        transfer.send(host)
        return transfer.take(len(host.bytes.room)), transfer

    def copy_again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> Transfer:
        """Copy `tensor`, uint8[n], to `host` or back, where memory exists on both sides: nothing is allocated."""
        transfer = self.by_stream[DEVICE_TO_HOST if out else HOST_TO_DEVICE].transfer()
        source, target = (tensor, host) if out else (host, tensor)
        transfer.send(source)
        transfer.set_target(target)
        return transfer

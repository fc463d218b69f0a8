"""Private names of ``torch.distributed``, which not every build of PyTorch has."""

from torch.distributed.distributed_c10d import (
    _get_default_store as get_default_store,  # what all processes read and write
    _get_object_coll_device as collective_device,  # the device of numbers that a group exchanges
)

"""The C++ library copies tensors, and reads their versions, as PyTorch does."""

import torch
from torch import nn

from planner.native.library import wait_for_library
from planner.runtime.unseen_writes import get_version


def test_copies_and_versions_are_those_of_pytorch() -> None:
    library = wait_for_library()
    with torch.inference_mode():
        inference = torch.ones(2)
    imaginary = torch.full((2,), 1j)
    tensors = [
        *(torch.arange(6.0).view(2, 3).add_(1), torch.arange(6).view(2, 3).t(), torch.ones(3)[::2], torch.tensor(3)),
        *(imaginary.conj(), imaginary.conj().imag, inference, nn.Parameter(torch.rand(3)), torch.empty(0)),
    ]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    library.copy_all(tensors, copies)
    assert all(torch.equal(copy, tensor) and not copy.requires_grad for copy, tensor in zip(copies, tensors, strict=True))
    assert library.list_versions(tensors) == [get_version(tensor) for tensor in tensors]

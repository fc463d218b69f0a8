"""What PyTorch's own tests are made of; needs the package expecttest."""

from torch.testing._internal.common_methods_invocations import op_db  # samples of each operator

__all__ = ["op_db"]

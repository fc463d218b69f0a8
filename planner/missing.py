"""What to install where a package is missing: one line, whichever import finds out."""

from collections.abc import Iterator
from contextlib import contextmanager

_TORCH = "pip install 'torch>=2.11,<2.15', or as pytorch.org says for your GPU"
_WAYS = {
    "torch": f"planner needs PyTorch, which is not installed here: {_TORCH}",
    "transformers": "planner.huggingface needs Transformers: pip install 'remat-planner[huggingface]'",
    "accelerate": "planner.huggingface needs Accelerate: pip install 'remat-planner[huggingface]'",
    "lightning": "planner.lightning needs Lightning: pip install 'remat-planner[lightning]'",
    "pytorch_lightning": "planner.lightning needs Lightning: pip install 'remat-planner[lightning]'",
}


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """Return what to do about a package that is not installed; None if it is none that users choose to install."""
    return _WAYS.get((error.name or "").split(".")[0])


@contextmanager
def told() -> Iterator[None]:
    """Inside, a missing package is an ImportError that says what to install.

    Raises:
        ImportError: PyTorch or the package of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (way := how_to_install(error)) is None:
            raise
        raise ImportError(way, name=error.name) from None

"""Messages about packages that are not installed: what to install, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

_TORCH = "pip install 'torch>=2.11,<2.15', or as pytorch.org says for your GPU"
_ADVICE = {
    "torch": f"planner needs PyTorch, which is not installed here: {_TORCH}",
    "transformers": "planner.huggingface needs Transformers: pip install 'remat-planner[huggingface]'",
    "accelerate": "planner.huggingface needs Accelerate: pip install 'remat-planner[huggingface]'",
    "lightning": "planner.lightning needs Lightning: pip install 'remat-planner[lightning]'",
    "pytorch_lightning": "planner.lightning needs Lightning: pip install 'remat-planner[lightning]'",
}


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """Return a message with the command that installs a missing package; None for packages that users never install."""
    return _ADVICE.get((error.name or "").split(".")[0])


@contextmanager
def explain_missing_packages() -> Iterator[None]:
    """Turn the error of a missing package into an ImportError that tells what to install.

    Raises:
        ImportError: PyTorch or the package of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (advice := how_to_install(error)) is None:
            raise
        raise ImportError(advice, name=error.name) from None

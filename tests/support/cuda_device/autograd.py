"""Backward passes in a thread of their own, which has the caller's settings: as autograd runs them on a device."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.support.cuda_device.machine import Machine
from tests.support.cuda_device.tensors import OnDevice

_AUTOCAST = ("cpu", "cuda")


class DeviceThread:
    """The thread of the devices' backward passes; it ends with ``end``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, in this thread, with the caller's settings."""
        if threading.current_thread() is self._thread:
            return run()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="backward passes of the stand-in", daemon=True)
            self._thread.start()
        ended, found = threading.Event(), list[Any]()
        settings = _Settings(self._machine)

        def job() -> None:
            try:
                found.append((settings.applied(run), None))
            except BaseException as error:  # noqa: BLE001  # raised where it was called
                found.append((None, error))
            finally:
                ended.set()

        self._jobs.put(job)
        del job
        ended.wait()
        made, error = found.pop()
        if error is not None:
            raise error
        return made

    def end(self) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        self._machine.passes.add(threading.get_ident())
        while (job := self._jobs.get()) is not None:
            job()
            del job


class _Settings:
    """What PyTorch carries over to its threads."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._grad = torch.is_grad_enabled()
        self._casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST}
        self._modes = _get_current_dispatch_mode_stack()
        self._device, self._streams = machine.device, machine.currents()

    def applied(self, run: Callable[[], Any]) -> Any:
        self._machine.device = self._device
        currents = self._machine._currents()
        currents.clear()
        currents.update(self._streams)
        for mode in self._modes:
            torch._C._push_on_torch_dispatch_stack(mode)
        for kind, (enabled, dtype) in self._casts.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        try:
            with torch.set_grad_enabled(self._grad):
                return run()
        finally:
            for _ in self._modes:
                torch._C._pop_torch_dispatch_stack(None)


def engine(original: Callable[..., Any], thread: DeviceThread) -> Callable[..., Any]:
    """Stands for ``_engine_run_backward``, the `original`."""

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(output, OnDevice) for output in outputs):
            return thread.run(lambda: original(outputs, *args, **kwargs))
        return original(outputs, *args, **kwargs)

    return run_backward

"""A stand-in for the driver of a GPU, for code that asks the active driver about a device while kernels are
simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SimulatedDriver:
    """Answers what host code asks before a launch; there is nothing to load or to time."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return divmod(self.target.arch, 10) if isinstance(self.target.arch, int) else (0, 0)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        pass


def once(call: Callable[[], Any], quantiles: tuple[float, ...] = (), **_: Any) -> list[float]:
    """A benchmarker that runs the call and times nothing: all configurations tie, so the first one wins."""
    call()
    return [0.0] * max(1, len(quantiles))


class DriverOfThread:
    """The active driver is one for the process; this one is `simulated` for a thread that simulates and the real one
    for the others."""

    def __init__(self, simulated: Callable[[], SimulatedDriver | None], real: Callable[[], Any]) -> None:
        self._simulated, self._real = simulated, real

    def __getattr__(self, name: str) -> Any:
        driver = self._simulated()
        return getattr(self._real() if driver is None else driver, name)

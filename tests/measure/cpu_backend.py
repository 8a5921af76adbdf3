"""The measuring backend in Triton's interpreter: all of it but the clock and the graphs.

Run as a program: reads requests, one JSON object a line, and answers as a worker does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from moetune.measure import layer, timing, worker
from moetune.measure.protocol import DeviceFacts
from tests.measure.interpreted import patch_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

L2_BYTES = 1 << 12


class RunNow:
    """A graph that launches when it is replayed: one microsecond a launch, and one for each separator."""

    def __init__(self, launch: Callable[[int], None], count: int, _: object = None) -> None:
        self._launch, self._count = launch, count

    def sample_us(self, count: int) -> list[float]:
        for number in range(self._count):
            self._launch(number)
        each = 1.0 if self._launch.__name__ == "separate" else 2.0
        return [each * self._count] * count


class CpuBackend(layer.GpuBackend):
    """The backend on the CPU, which has a tiny L2."""

    def __init__(self) -> None:
        class Properties:
            L2_cache_size = L2_BYTES

        self._device = torch.device("cpu")
        self._properties: Any = Properties()
        self._compilations = layer.Compilations()
        self._data = None
        self._workload = None
        self._routed = {}
        self._aligned = {}
        self._tick = None
        self._between_us = {}
        self._busy_until = 0.0

    def facts(self) -> DeviceFacts:
        return DeviceFacts("CPU", "CPU", "9.0", 1, L2_BYTES, 1 << 32, 1 << 32, torch.__version__, "3.6.0")

    def healthy(self) -> bool:
        return True


def stand_in() -> None:
    """Put what the CPU can do in the place of what only a GPU can."""
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda: None
    cuda.mem_get_info = lambda _: (1 << 40, 1 << 40)
    cuda.memory_allocated = lambda _: 0
    short: Any = layer
    short.least_launches = lambda *_: 2
    awake: Any = timing
    awake.wake = awake.new_pool = lambda: None
    once: Any = RunNow
    timing.capture = once


def main() -> None:
    patch_interpreter()
    stand_in()
    worker.serve(CpuBackend(), sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()

"""The measuring process on a real GPU, in which two configs do what a candidate must never do.

The config that MOETUNE_TEST_HANG names spins for a minute instead of being timed, the one of
MOETUNE_TEST_WILD writes far beyond its memory.
"""

# Kernel parameters are Triton's tensors and constants: they have no Python types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moetune.measure.layer import GpuBackend
from moetune.measure.worker import run

if TYPE_CHECKING:
    from moetune.measure.protocol import Timed, TimeTask

_SPIN_CYCLES = 1_700_000_000  # a second on an H200


@triton.jit
def _write_wildly(pointer, distance, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK).to(tl.int64) + distance
    tl.store(pointer + offsets, offsets.to(tl.float32))


class FaultyGpu(GpuBackend):
    """A GPU that two configs misuse."""

    def time(self, task: TimeTask) -> Timed:
        """See `Backend`."""
        config = str(task.task.launch.config)
        if config == os.environ.get("MOETUNE_TEST_HANG"):
            for _ in range(60):
                torch.cuda._sleep(_SPIN_CYCLES)
            torch.cuda.synchronize()
        if config == os.environ.get("MOETUNE_TEST_WILD"):
            _write_wildly[(1,)](torch.empty(1024, device="cuda"), 1 << 40, 1024)
            torch.cuda.synchronize()
        return super().time(task)


if __name__ == "__main__":
    run(FaultyGpu)

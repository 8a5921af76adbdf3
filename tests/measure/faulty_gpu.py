"""The measuring process on a real GPU, in which some configs do what a candidate must never do.

The config that MOETUNE_TEST_HANG names spins for a minute instead of being timed, that of MOETUNE_TEST_WILD
writes far beyond its memory, that of MOETUNE_TEST_WRONG computes wrong numbers. With that of
MOETUNE_TEST_GONE the GPU disappears: the process ends, and while the file MOETUNE_TEST_GONE_FILE exists no
process finds a GPU.
"""

# Kernel parameters are Triton's tensors and constants: they have no Python types.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from moetune.measure.layer import GpuBackend
from moetune.measure.worker import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.measure.protocol import Checked, CheckTask, Timed, TimeTask

_SPIN_CYCLES = 1_700_000_000  # a second on an H200


@triton.jit
def _write_wildly(pointer, distance, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK).to(tl.int64) + distance
    tl.store(pointer + offsets, offsets.to(tl.float32))


class FaultyGpu(GpuBackend):
    """A GPU that some configs misuse."""

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
        if config == os.environ.get("MOETUNE_TEST_GONE"):
            Path(os.environ["MOETUNE_TEST_GONE_FILE"]).touch()
            os._exit(1)
        return super().time(task)

    def check(self, task: CheckTask) -> Checked:
        """See `Backend`."""
        data = self._opened()
        if str(task.task.launch.config) != os.environ.get("MOETUNE_TEST_WRONG"):
            return super().check(task)
        with patch.object(data, "launch", _a_tenth_more(data.launch)):
            return super().check(task)


def _a_tenth_more(launch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given, **named: launch(*given, **named).mul_(1.1)


if __name__ == "__main__":
    if Path(os.environ.get("MOETUNE_TEST_GONE_FILE", "/nonexistent")).exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run(FaultyGpu)

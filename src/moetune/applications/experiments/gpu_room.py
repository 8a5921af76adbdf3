"""The GPUs of an experiment: nobody else's process on them before a start, nothing left after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.experiments.arm_errors import CannotStopError, ForeignProcessError
from moetune.applications.experiments.processes import command_of
from moetune.applications.nvml import detect_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moetune.applications.nvml import Detected, GpuProcess

FREED_S = 60.0
"""The driver takes a while to give back the memory of a process that was killed."""

_POLL_S = 0.5
_SLACK_BYTES = 512 << 20
"""What a driver may hold more after a first use (page tables, persistence)."""


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """How the GPUs were before a start.

    Attributes:
        used_bytes: memory in use, by UUID; empty on a machine without GPUs.
        detect: asks the driver.
        name: the command of a process.
    """

    used_bytes: dict[str, int]
    detect: Callable[[], Detected] = detect_gpus
    name: Callable[[int], str] = command_of

    @classmethod
    def take(
        cls,
        gpus: Sequence[int],
        detect: Callable[[], Detected] = detect_gpus,
        name: Callable[[int], str] = command_of,
    ) -> GpuRoom:
        """Look at the GPUs before a start.

        Args:
            gpus: indices in the driver's order; none: all.
            detect: asks the driver.
            name: the command of a process.

        Raises:
            ForeignProcessError: when a process computes on one of them.
        """
        devices = [device for device in detect().devices if not gpus or device.index in gpus]
        foreign = [
            f"GPU {device.index} ({device.name}): {_text(process, name)}"
            for device in devices
            for process in device.processes
        ]
        if foreign:
            raise ForeignProcessError(
                "somebody else computes on the GPUs that the server needs: " + "; ".join(foreign[:8]),
                "end these processes, or name other GPUs in the plan: server.gpus, and CUDA_VISIBLE_DEVICES"
                " in server.environment",
            )
        return cls({device.uuid: device.memory_used_bytes or 0 for device in devices}, detect, name)

    def wait_until_freed(self, limit_s: float = FREED_S) -> None:
        """Wait until the GPUs are as they were.

        Raises:
            CannotStopError: when they are not, in time.
        """
        if not self.used_bytes:
            return
        deadline = time.monotonic() + limit_s
        while kept := self._kept():
            if time.monotonic() > deadline:
                raise CannotStopError(
                    f"memory of GPUs is not free {limit_s:g} s after the server ended: "
                    + "; ".join(kept[:8]),
                    "nvidia-smi shows what holds it; end that, then run the same command again",
                )
            time.sleep(_POLL_S)

    def _kept(self) -> list[str]:
        kept = []
        for device in self.detect().devices:
            if device.uuid not in self.used_bytes:
                continue
            board = f"GPU {device.index} ({device.name})"
            more = (device.memory_used_bytes or 0) - self.used_bytes[device.uuid]
            if device.processes:
                texts = [_text(process, self.name) for process in device.processes]
                kept.append(f"{board}: {', '.join(texts)}")
            elif more > _SLACK_BYTES:
                kept.append(
                    f"{board}: {more / (1 << 30):.1f} GiB more than before the start, held by nobody seen"
                )
        return kept


def _text(process: GpuProcess, name: Callable[[int], str]) -> str:
    """A process on a GPU, for people."""
    command = name(process.pid) or "not to be seen from here, in another container perhaps"
    memory = f", {process.memory_bytes / (1 << 30):.1f} GiB" if process.memory_bytes else ""
    return f"process {process.pid} ({command}{memory})"

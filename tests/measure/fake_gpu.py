"""Processes that stand for the GPU and for the compiler, and really do what they are told to do wrong.

`python -m tests.measure.fake_gpu gpu UUID` is a measuring process with times made up, or taken from a
landscape; `... compiler` is a compiling one. What they do to which config stands in the file that
FAKE_GPU names: `{"faults": {"up 64x64x64 g1 w4 s3": "hang"}, "landscape": PATH, "log": PATH, "gone": PATH}`.
`"sorted": {"up": 1.1, "down": 0.8, "between_us": 3.0}` is what rows in sorted order do to the times, `"tma"`
in it what descriptors do to those of up.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask
from moetune.domain.landscape import read_landscape
from moetune.domain.resources import shared_memory_bytes
from moetune.measure.protocol import (
    PROTOCOL,
    Checked,
    CheckTask,
    DeviceFacts,
    LayerTask,
    LayerTimed,
    Opened,
    Peaks,
    PeakTask,
    Timed,
    TimeTask,
    Workload,
)
from moetune.measure.worker import run
from moetune.measure.workload import NotColdError

if TYPE_CHECKING:
    from moetune.domain.config import KernelConfig
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel

NOISE = 0.002


class OutOfMemoryError(RuntimeError):
    """As torch's, which is a RuntimeError too."""


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """As Triton's."""


def settings() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["FAKE_GPU"]).read_text())
    return found


def fault_of(kernel: Kernel, config: KernelConfig) -> str:
    fault: str = settings().get("faults", {}).get(f"{kernel} {config}", "")
    return fault


def made_up_us(kernel: Kernel, m: int, config: KernelConfig) -> float:
    """Few rows want small tiles, many large ones; no two configs are alike."""
    wanted = 16 if m <= 64 else 64 if m <= 1024 else 128
    misfit = abs(math.log2(config.block_size_m / wanted)) + 0.5 * abs(math.log2(config.block_size_n / 128))
    odd = abs(math.log2(config.block_size_k / 64)) + abs(config.num_stages - 3) + (config.num_warps != 4)
    base = (20.0 if kernel == "up" else 12.0) + m / 20
    return base * (1 + 0.2 * misfit + 0.05 * odd + config.group_size_m / 2000)


class FakeGpu:
    """See `moetune.measure.worker.Backend`."""

    def __init__(self) -> None:
        self._settings = settings()
        self._log("start")
        time.sleep(self._settings.get("slow start", 0.0))
        if Path(self._settings.get("gone", "/nonexistent")).exists():
            raise RuntimeError("No CUDA GPUs are available")
        if Path(self._settings.get("once", "/nonexistent") + sys.argv[-1]).exists():
            raise RuntimeError("No CUDA GPUs are available")
        path = self._settings.get("landscape")
        self._landscape = read_landscape(Path(path)) if path else None
        self._healthy = True
        self._rng = random.Random(os.getpid())
        self._clock = 1.0

    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            "NVIDIA H200",
            sys.argv[-1],
            "9.0",
            132,
            60 << 20,
            141 << 30,
            140 << 30,
            "fake",
            "3.6.0",
            self._settings.get("protocol", PROTOCOL),
        )

    def healthy(self) -> bool:
        return self._healthy

    def open(self, workload: Workload) -> Opened:
        self._log("open", ms=list(workload.ms), recording=workload.recording)
        if self._settings.get("no room"):
            raise OutOfMemoryError("the problem needs 999 MiB, the GPU has 1 MiB free")
        return Opened(1 << 30, 1, 1)

    def _log(self, what: str, **values: Any) -> None:
        if "log" in self._settings:
            with Path(self._settings["log"]).open("a") as file:
                file.write(
                    json.dumps({"what": what, "pid": os.getpid(), "gpu": sys.argv[-1], **values}) + "\n"
                )

    def _launch_us(self, launch: Launch, m: int) -> float:
        """Of a kernel; rows in sorted order make it faster or slower."""
        in_order = launch.sorted_input or launch.sorted_output
        given = self._settings.get("sorted", {})
        factor = given.get(launch.kernel, 1.0) if in_order else 1.0
        if launch.kernel == "up" and launch.weights_by_tma:
            factor *= given.get("tma", 1.0)
        return factor * self._true_us(launch.kernel, m, replace(launch.config, use_tma=False))

    def _true_us(self, kernel: Kernel, m: int, config: KernelConfig) -> float:
        if self._settings.get("flat"):
            return 50.0
        if self._landscape is None:
            slow: float = settings().get("slow", {}).get(str(config), 1.0)
            return made_up_us(kernel, m, config) * slow
        ms = sorted(at for of_kernel, at in self._landscape.times_us if of_kernel == kernel)
        below = max((at for at in ms if at <= m), default=ms[0])
        above = min((at for at in ms if at >= m), default=ms[-1])
        times = [self._landscape.times_us[kernel, at].get(config) for at in (below, above)]
        if times[0] is None or times[1] is None:
            raise OutOfResources("out of resource: shared memory")
        share = 0.0 if above == below else (m - below) / (above - below)
        return times[0] * (1 - share) + times[1] * share

    def _noisy(self, time_us: float) -> float:
        return time_us * self._clock * math.exp(self._rng.gauss(0.0, NOISE))

    def time(self, task: TimeTask) -> Timed:
        kernel, config = task.task.launch.kernel, task.task.launch.config
        in_order = task.task.launch.sorted_output
        self._log("time", kernel=kernel, m=task.m, config=str(config), sorted_output=in_order)
        # What hurts comes when the file says so, also in the middle of a run.
        self._misbehave(fault_of(kernel, config))
        self._clock = settings().get("clock", 1.0)
        time.sleep(settings().get("seconds", 0.0))
        time_us = self._noisy(self._launch_us(task.task.launch, task.m))
        hopeless = bool(task.give_up_us) and time_us > task.give_up_us
        return Timed(time_us, NOISE, 1 if hopeless else 5, 16, 1, 200 << 20, 60 << 20, hopeless, 0)

    def _misbehave(self, fault: str) -> None:
        if fault == "hang":
            while True:  # as a kernel that never ends: nothing but SIGKILL helps
                time.sleep(3600)
        if fault == "abort":
            os.abort()
        if fault == "out of bounds":
            ctypes.string_at(0)
        if fault == "sticky error":
            self._healthy = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore\nlines")
        if fault == "over shared memory":
            raise OutOfResources("out of resource: shared memory, Required: 300000, Hardware limit: 232448")
        if fault == "memory":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fault == "memory once" and not Path(self._settings["once"]).exists():
            Path(self._settings["once"]).touch()
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fault == "gone":
            Path(self._settings["gone"]).touch()
            os._exit(1)
        if fault == "gone once" and not Path(self._settings["once"]).exists():
            Path(self._settings["once"]).touch()
            Path(self._settings["once"] + sys.argv[-1]).touch()
            os._exit(1)
        if fault == "not cold":
            raise NotColdError("the weights cannot be kept out of the L2")
        if fault == "chatter":
            sys.stdout.write("a library greets on stdout\n")
            sys.stdout.flush()

    def layer(self, task: LayerTask) -> LayerTimed:
        self._log("layer", m=task.m, pairs=len(task.pairs), routing=task.routing)
        skew = settings().get("skewed", {}) if task.routing != "uniform" else {}
        rows = []
        for pair in task.pairs:
            total = sum(
                self._launch_us(launch, task.m) * skew.get(f"{launch.kernel} {launch.config}", 1.0)
                for launch in (pair.up.launch, pair.down.launch)
            )
            if pair.down.launch.sorted_input:
                total += self._settings.get("sorted", {}).get("between_us", 0.0)
            rows.append(tuple(self._noisy(5.0 + total) for _ in range(task.rounds)))
        return LayerTimed(tuple(rows), 200 << 20, 0)

    def check(self, task: CheckTask) -> Checked:
        launch = task.task.launch
        self._log("check", kernel=launch.kernel, m=task.m, config=str(launch.config))
        wrong = fault_of(launch.kernel, launch.config) == "wrong numbers"
        return Checked(0.3 if wrong else 0.002, 0.005)

    def peaks(self, task: PeakTask) -> Peaks:
        del task
        return Peaks(790.0, 4300.0)


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def compiler() -> None:
    """A compiling process; see `moetune.measure.compile`."""
    say({"triton": "fake"})
    for line in sys.stdin:
        request = json.loads(line)
        task = CompileTask.from_json(request["task"])
        fault = fault_of(task.launch.kernel, task.launch.config)
        if fault == "compile abort":
            os.abort()
        if fault == "compile hang":
            time.sleep(3600)
        shared = shared_memory_bytes(task.launch, (9, 0))
        result = CompileResult(CompileStatus.OK, shared_bytes=shared, registers=128, seconds=0.01)
        if fault == "compile failure":
            result = CompileResult(
                CompileStatus.COMPILER_FAILURE,
                message="RuntimeError: PassManager::run failed",
                noise="\x1b[31mmlir",
            )
        if fault == "compiler without room":
            result = CompileResult(CompileStatus.NO_ROOM, message="No space left on device")
        if fault == "too much shared memory":
            result = CompileResult(CompileStatus.OK, shared_bytes=400_000)
        say({"number": request["number"], "result": result.to_json()})


if __name__ == "__main__":
    if sys.argv[1] == "compiler":
        compiler()
    else:
        run(FakeGpu)

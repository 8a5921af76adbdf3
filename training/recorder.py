"""Times the units of a plan on a GPU, and writes each time at once: what `training.record` is made of."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moetune.domain.compilation import CompileResult, CompileStatus
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.measure.protocol import DeviceFacts, Opened, Timed, TimeTask, Workload
from moetune.measure.workload import NotColdError
from training.record_plan import (
    FORMATS,
    GPU,
    SERVER,
    SERVER_VERSION,
    SHAPES,
    Job,
    Unit,
    problem_of,
)

HOPELESS, CLEAR = 1.35, 1.1
"""Times of the best so far beyond which fewer samples do."""
WORTH_A_SECOND = 1.6
"""Times of the best of the first pass up to which a config is timed in the second."""
UNIT_SECONDS = 120
"""A unit that takes longer hangs; the process ends, and the next one goes on."""
_SAMPLES, _MOST_SAMPLES = 3, 7


class Gpu(Protocol):
    """What a `GpuBackend` offers."""

    def facts(self) -> DeviceFacts:
        """What it is."""
        ...

    def healthy(self) -> bool:
        """Whether it still works."""
        ...

    def open(self, workload: Workload) -> Opened:
        """Lay out the data of a problem."""
        ...

    def use_seed(self, seed: int) -> None:
        """Launch on other routings."""
        ...

    def time(self, task: TimeTask) -> Timed:
        """Time a binary."""
        ...

    @property
    def compilations(self) -> int:
        """Kernels that were not in the cache."""
        ...


class BrokenGpuError(Exception):
    """The CUDA context is lost; what did it is in the record, and a new process goes on behind it."""


Place = tuple[str, int, str, int, KernelConfig]
"""Job, pass, kernel, m, config."""


class Record:
    """The file of times: JSON lines, each written at once."""

    def __init__(self, path: Path) -> None:
        self.times: dict[Place, float | None] = {}
        self.opened: set[str] = set()
        self.skipped: set[str] = set()
        if path.exists():
            whole = path.read_text().rpartition("\n")[0]  # a last line may have been cut off
            for line in whole.splitlines():
                self._know(json.loads(line))
            path.write_text(whole + "\n" if whole else "")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line."""
        self._know(row)
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()

    def _know(self, row: Mapping[str, Any]) -> None:
        if "facts" in row:
            self.opened.add(row["job"])
        elif "skipped" in row:
            self.skipped.add(row["job"])
        else:
            self.times[place_of(row)] = row["us"]

    def best_us(self, unit: Unit, number: int) -> float:
        """Of what was timed of a unit in a pass; 0 where nothing was."""
        found = (
            self.times.get((unit.job.name, number, unit.kernel, unit.m, config)) for config in unit.tasks
        )
        return min((time_us for time_us in found if time_us is not None), default=0.0)


def place_of(row: Mapping[str, Any]) -> Place:
    """What a line is about."""
    return row["job"], row["pass"], row["kernel"], row["m"], KernelConfig(*row["config"])


def left(record: Record, unit: Unit) -> Iterator[KernelConfig]:
    """What is still to be timed of a unit: its first config first, the others in an order of its own."""
    name = unit.job.name
    configs = list(unit.tasks)
    rest = configs[1:]
    random.Random(f"{name} {unit.number} {unit.kernel} {unit.m}").shuffle(rest)
    worth_us = WORTH_A_SECOND * record.best_us(unit, 1)
    for config in configs[:1] + rest:
        if (name, unit.number, unit.kernel, unit.m, config) in record.times:
            continue
        if unit.number > 1:
            before_us = record.times.get((name, 1, unit.kernel, unit.m, config))
            if before_us is None or before_us > worth_us:
                continue
        yield config


class Compiler(Protocol):
    """What `Binaries` offers."""

    def ready(self, unit: Unit) -> bool:
        """Whether all of a unit is compiled."""
        ...

    def wait(self, unit: Unit, deadline: float) -> bool:
        """Wait until it is; False: it is not."""
        ...

    def result(self, unit: Unit, config: KernelConfig) -> CompileResult:
        """What came of a binary."""
        ...

    def progress(self) -> str:
        """In words."""
        ...


@dataclass
class Recorder:
    """Times units, and writes what comes of it.

    Attributes:
        gpu: what times.
        binaries: what compiles.
        record: where it is written.
        deadline: of `time.monotonic()`.
        watch: called with a number of seconds in which something has to happen, 0: whenever.
    """

    gpu: Gpu
    binaries: Compiler
    record: Record
    deadline: float
    watch: Callable[[int], object] = lambda _: None

    def run(self, plan: Mapping[Job, Sequence[Unit]]) -> bool:
        """Time all units; False: the time was up."""
        pending = [job for job in plan if job.name not in self.record.skipped]
        of_format = Counter(dict.fromkeys(FORMATS, 0))
        while pending:
            # Where all is compiled nobody has to wait; of those a format that has the least.
            ready = [job for job in pending if all(self.binaries.ready(unit) for unit in plan[job])]
            job = min(ready, key=lambda job: of_format[job.format], default=pending[0])
            if not self._job(job, plan[job]):
                return False
            of_format[job.format] += 1
            pending.remove(job)
        return True

    def _job(self, job: Job, units: Sequence[Unit]) -> bool:
        if not any(True for unit in units for _ in left(self.record, unit)):
            return True
        started = time.monotonic()
        self.watch(UNIT_SECONDS)
        try:
            self.gpu.open(Workload(problem_of(job), SHAPES[job.shape].ms, seed=1))
        except (MemoryError, RuntimeError, NotColdError) as error:
            self._look_after(error)
            self.record.write({"job": job.name, "skipped": str(error)})
            return True
        if job.name not in self.record.opened:
            self.record.write({"job": job.name, "facts": facts_of(job, self.gpu.facts())})
        opened, timed = time.monotonic(), 0
        for unit in units:
            self.watch(0)
            if not self.binaries.wait(unit, self.deadline):
                return False
            self.watch(UNIT_SECONDS)
            count = self._unit(unit)
            if count is None:
                return False
            timed += count
        self.watch(0)
        now = time.monotonic()
        print(
            f"{job.name}: {timed} times, {now - started:.1f} s, opened in {opened - started:.1f} s; "
            f"{self.deadline - now:.0f} s left; {self.binaries.progress()}; "
            f"compiled here {self.gpu.compilations}",
            flush=True,
        )
        return True

    def _unit(self, unit: Unit) -> int | None:
        """Time what is left of a unit: how many; None: the time was up."""
        self.gpu.use_seed(unit.number)
        best_us = self.record.best_us(unit, unit.number) or self.record.best_us(unit, 1)
        count = 0
        for config in left(self.record, unit):
            if time.monotonic() > self.deadline:
                return None
            task = unit.tasks[config]
            compiled = self.binaries.result(unit, config)
            row: dict[str, Any] = {
                "job": unit.job.name,
                "pass": unit.number,
                "kernel": unit.kernel,
                "m": unit.m,
                "config": config_values(config),
                "us": None,
            }
            if unit.number == 1:
                row["binary"] = [
                    compiled.shared_bytes,
                    compiled.registers,
                    compiled.stack_bytes,
                    round(compiled.seconds, 2),
                ]
            if error := why_not(compiled):
                self.record.write({**row, "error": error})
                continue
            try:
                found = self.gpu.time(
                    TimeTask(
                        task,
                        unit.m,
                        give_up_us=HOPELESS * best_us,
                        clear_us=CLEAR * best_us,
                        least_samples=_SAMPLES,
                        most_samples=_MOST_SAMPLES,
                    )
                )
            except NotColdError as failure:
                print(f"{unit.job.name} {unit.kernel} m={unit.m}: {failure}", flush=True)
                return count
            except Exception as failure:  # noqa: BLE001 - whatever a launch raises, the row says so
                self.record.write({**row, "error": f"{type(failure).__name__}: {failure}"[:200]})
                self._look_after(failure)
                continue
            self.record.write({**row, "us": round(found.time_us, 3), "n": found.samples})
            best_us = min(best_us or found.time_us, found.time_us)
            count += 1
        return count

    def _look_after(self, error: Exception) -> None:
        if not self.gpu.healthy():
            raise BrokenGpuError(str(error)) from error


def config_values(config: KernelConfig) -> list[int]:
    """The six values."""
    return [
        config.block_size_m,
        config.block_size_n,
        config.block_size_k,
        config.group_size_m,
        config.num_warps,
        config.num_stages,
    ]


def why_not(compiled: CompileResult) -> str:
    """Why a binary cannot be launched; empty: it can."""
    if compiled.status is not CompileStatus.OK:
        return f"{compiled.status.value}: {compiled.message}"[:200]
    limit = find_gpu(GPU).smem_optin_bytes or 0
    return "OutOfResources" if (compiled.shared_bytes or 0) > limit else ""


def facts_of(job: Job, device: DeviceFacts) -> dict[str, Any]:
    """What a landscape's JSON says."""
    shape, quantization = SHAPES[job.shape], FORMATS[job.format].quantization
    return {
        "device": device.name,
        "compute_capability": device.compute_capability,
        "triton": device.triton,
        "torch": device.torch,
        "kernel_source": "moetune's own kernel",
        "server": SERVER,
        "server_version": SERVER_VERSION,
        "measured": time.strftime("%Y-%m-%d"),
        "command": "python -m training.record measure",
        "protocol": (
            "as moetune tune times: a CUDA graph of launches, each on a uniform routing of its own, at least "
            "three times the L2 of weights between two uses of the same; PDL, padded length and divisibility "
            "as SGLang 0.5.23 launches; a tiny kernel between two launches, its time taken off; median of 3 "
            f"to {_MOST_SAMPLES} samples, of 3 over {CLEAR} times the best so far, the better of two over "
            f"{HOPELESS} times; random order; two passes on routings of their own, the second without what "
            f"was over {WORTH_A_SECOND} times the best"
        ),
        "space": (
            "a sample: the server's defaults, configs good in like formats, the model's first ones, "
            "random ones in SGLang's grid and outside (training/record_plan.py); BLOCK_SIZE_M of the size of "
            "an expert's rows"
        ),
        "model": job.shape,
        "num_experts": shape.E,
        "topk": shape.topk,
        "hidden_size": shape.K,
        "intermediate_per_rank": shape.N,
        "ep": 1,
        "dtype": quantization.dtype.value,
        "block_shape": list(quantization.block_shape) if quantization.block_shape else None,
        "per_channel": quantization.per_channel,
        "group_size": quantization.group_size,
        "zero_point": quantization.zero_point,
    }

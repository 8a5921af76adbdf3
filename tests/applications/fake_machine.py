"""A machine with GPUs that are not there: processes stand for them, and misbehave as they are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetune.applications.compiling import CompilePool
from moetune.applications.journal import Journal
from moetune.applications.measuring import Laboratory
from moetune.applications.nvml import Device, GpuProcess
from moetune.applications.targets import Progress
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.compilation import Depth
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import Problem
from moetune.servers.registry import open_server

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(
    E=256,
    global_experts=256,
    topk=8,
    K=3072,
    N=256,
    file_n=256,
    gpu=find_gpu("NVIDIA H200"),
    server="sglang",
    server_version="0.5.23",
    triton_version="3.6.0",
)
SERVER = open_server("sglang", "0.5.23", "3.6.0")
VLLM = open_server("vllm", "0.33.0", "3.6.0")


@dataclass
class FakeMachine:
    """GPUs and compilers in a folder.

    Attributes:
        folder: for the journal, the settings and the log.
        gpus: how many.
        settings: what the processes do, see tests/measure/fake_gpu.py.
        answer_seconds: after which a hang is one.
        compile_seconds: after which compiling hangs.
    """

    folder: Path
    gpus: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    answer_seconds: float = 20.0
    compile_seconds: float = 20.0

    def __post_init__(self) -> None:
        self.set()

    def set(self, **settings: Any) -> None:
        self.settings |= {"log": str(self.folder / "log")} | settings
        part = self.folder / "settings.part"
        part.write_text(json.dumps(self.settings))
        part.replace(self.folder / "settings.json")

    @property
    def variables(self) -> dict[str, str]:
        return {"FAKE_GPU": str(self.folder / "settings.json"), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}

    @property
    def command(self) -> WorkerCommand:
        return WorkerCommand(
            arguments=("-m", "tests.measure.fake_gpu", "gpu"),
            variables=self.variables,
            answer_seconds=self.answer_seconds,
        )

    @property
    def pool(self) -> CompilePool:
        return CompilePool(
            Depth.BINARY,
            seconds_each=self.compile_seconds,
            workers=1,
            worker=("-m", "tests.measure.fake_gpu", "compiler"),
            variables=self.variables,
        )

    @property
    def uuids(self) -> list[str]:
        return [f"GPU-{number}" for number in range(self.gpus)]

    def devices(self, *pids: int) -> list[Device]:
        running = tuple(GpuProcess(pid, None) for pid in pids)
        return [
            Device(number, "NVIDIA H200", "9.0", uuid, processes=running)
            for number, uuid in enumerate(self.uuids)
        ]

    def journal(self, problem: Problem = PROBLEM) -> Journal:
        return Journal.open(self.folder / "state", problem, self.uuids[0])

    def laboratory(
        self,
        journal: Journal,
        ms: tuple[int, ...],
        problem: Problem = PROBLEM,
        *,
        command: WorkerCommand | None = None,
        pool: CompilePool | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Laboratory:
        server = VLLM if problem.server == "vllm" else SERVER
        command, pool = command or self.command, pool or self.pool
        return Laboratory(
            server, problem, journal, ms, self.uuids, command=command, pool=pool, progress=progress
        )

    def log(self, what: str) -> list[dict[str, Any]]:
        """What the GPUs were asked, in order."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["what"] == what]

"""The server's own kernel is compiled and launched as the server does it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.compile_service import Compiled, CompileService
from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileStatus, CompileTask, Depth, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.identity import problem_to_json
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype
from moetune.measure.layer import check_class
from moetune.measure.worker import ConfigError
from moetune.servers.registry import open_server
from tests.measure.interpreted import ROOT
from tests.measure.server_files import RELEASES, kernel_file
from tests.measure.test_layer import FP8, SEED, quantized

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.domain.server_kernel import KernelFile

SMALL = KernelConfig(16, 32, 64, 1, 4, 2)
SWAPPED = KernelConfig(16, 64, 128, 1, 4, 2)
FORMATS = (
    (SEED, SMALL),
    (replace(SEED, bias=True, topk=1), SMALL),
    (FP8, SWAPPED),
    (quantized(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True), SMALL),
    (quantized(Dtype.INT8_W8A16, per_channel=True), SMALL),
    (quantized(Dtype.INT4_W4A16, group_size=32, zero_point=True), SMALL),
)


def as_server(problem: Problem, package: str, version: str) -> Problem:
    return replace(problem, server=package, server_version=version)


def tasks_of(file: KernelFile, problem: Problem, ms: tuple[int, ...], config: KernelConfig) -> dict[Any, int]:
    """A task for each launch class of both kernels, with an m that launches it."""
    server = open_server(file.server, file.version)
    asked = as_server(problem, file.server, file.version)
    if problem.quantization.group_size and file.server == "vllm":
        config = replace(config, extra=(("SPLIT_K", 1),))  # without it that kernel is not launched
    found: dict[CompileTask, int] = {}
    for kernel in KERNELS:
        launch = server.launch(asked, kernel, config)
        for kind in server.launch_classes(asked, kernel, ms, config.block_size_m):
            task = compile_task(launch, asked, kind, file)
            assert isinstance(task, CompileTask)
            found[task] = kind.ms[0]
    return found


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_the_measuring_process_compiles_nothing_of_the_servers_kernel(
    package: str, version: str, tmp_path: Path
) -> None:
    file = kernel_file(package, version, tmp_path)
    # 1: a value that Triton specialises, and with vLLM slots that stand alone; 600: no early start.
    asked = [(problem, tasks_of(file, problem, (1, 8, 600), config)) for problem, config in FORMATS]
    tasks = {task for _, one in asked for task in one}
    assert len(tasks) >= 20
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    service = CompileService(CompilePool(Depth.BINARY, workers=2), tmp_path / "cache", events.put)
    try:
        service.submit(tasks)
        for _ in tasks:
            event = events.get(timeout=120)
            assert isinstance(event, Compiled)
            assert event.result.status is CompileStatus.OK, event.result.message
    finally:
        service.close()
    documents = [
        {
            "problem": problem_to_json(as_server(problem, package, version)),
            "arch": 90,
            "tasks": [{"task": task.to_json(), "m": m} for task, m in one.items()],
        }
        for problem, one in asked
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.no_gpu_driver"],
        input=json.dumps(documents),
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"compiled": 0, "found": len(tasks)}


def test_a_binary_of_another_padded_length_is_refused(tmp_path: Path) -> None:
    file = kernel_file("sglang", "0.5.15", tmp_path)
    (task, *_) = tasks_of(file, SEED, (8,), SMALL)
    check_class(task, SEED, 8)
    with pytest.raises(ConfigError, match="padded rows"):
        check_class(replace(task, padded_length_divisible=not task.padded_length_divisible), SEED, 8)


def test_a_task_crosses_a_process_boundary(tmp_path: Path) -> None:
    file = kernel_file("vllm", "0.33.0", tmp_path)
    for task in tasks_of(file, SEED, (1, 64), SMALL):
        assert CompileTask.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert len(RELEASES) == 26

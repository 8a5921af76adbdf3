"""On a real GPU: right numbers, plausible times, cold weights, nothing compiled while measuring."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.compile_service import CompileService
from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileTask, Depth, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.launch import Launch
from moetune.domain.problem import KERNELS
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.protocol import (
    CheckTask,
    LayerPair,
    LayerTask,
    PeakTask,
    TimeTask,
    Workload,
    request_json,
)
from tests.applications.fake_machine import PROBLEM, SERVER
from tests.measure.made_up import run_case
from tests.measure.test_kernels import CORRECT
from tests.tolerances import RELATIVE_ERROR

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
FP8 = replace(
    PROBLEM,
    K=2048,
    N=512,
    file_n=512,
    quantization=Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True),
)
GOOD, BAD = KernelConfig(64, 64, 128, 1, 4, 3), KernelConfig(256, 32, 64, 64, 8, 2)


@pytest.mark.parametrize("name", CORRECT)
def test_the_kernel_is_right_on_the_gpu(name: str) -> None:
    case = CORRECT[name]
    outcome = run_case(case, "cuda")
    limit = RELATIVE_ERROR[case.operand]
    assert outcome.relative_error <= limit
    assert outcome.worst_row_error <= 2 * limit
    assert outcome.untouched


def test_no_sample_waited_for_the_host() -> None:
    import torch

    from moetune.measure import timing

    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    held_up = [0.0, 0.0, 0.01, 0.01, 0.0]

    def replay() -> None:
        time.sleep(held_up.pop(0) if held_up else 0.0)
        torch.mm(a, a, out=out)

    for _ in range(3):
        timing.direct_us(lambda _: replay(), 0)  # cuBLAS, the allocator
    usual = timing.direct_us(lambda _: replay(), 0)
    held_up[:] = [0.01, 0.01]
    assert not timing.time_runs(replay, 1, 200_000)[0].in_time
    assert timing.time_runs(replay, 1, 200_000_000)[0].in_time
    held_up[:] = [0.01, 0.01]
    assert timing.direct_us(lambda _: replay(), 0) < usual + 1000.0
    assert not held_up


def binary(
    problem: Any, kernel: Any, m: int, config: KernelConfig, launch: Launch | None = None
) -> CompileTask:
    launch = launch or SERVER.launch(problem, kernel, config)
    (kind,) = SERVER.launch_classes(problem, kernel, (m,), config.block_size_m)
    task = compile_task(launch, problem, kind)
    assert isinstance(task, CompileTask)
    return task


def answers(cache: Path, tasks: set[CompileTask], requests: list[object]) -> list[dict[str, Any]]:
    """What a real measuring process answers once the binaries are there."""
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    service = CompileService(CompilePool(Depth.BINARY), cache, events.put)
    service.submit(tasks)
    for _ in tasks:
        events.get(timeout=120)
    service.close()
    done = subprocess.run(
        [sys.executable, "-m", "moetune.measure.worker", "GPU"],
        input="".join(json.dumps(request_json(request)) + "\n" for request in requests),
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


@pytest.mark.parametrize("problem", [PROBLEM, FP8], ids=["bf16", "block fp8"])
def test_a_measuring_process_answers_with_times_that_can_be(problem: Any, tmp_path: Path) -> None:
    ms = (1, 64, 1024)
    tasks = {(k, m, c): binary(problem, k, m, c) for k in KERNELS for m in ms for c in (GOOD, BAD)}
    pairs = {m: LayerPair(tasks["up", m, GOOD], tasks["down", m, GOOD]) for m in ms}
    requests = [
        Workload(problem, ms),
        *(TimeTask(task, m) for (_, m, _), task in tasks.items()),
        TimeTask(tasks["up", 1024, BAD], 1024, give_up_us=100.0),
        *(LayerTask(m, (pairs[m], pairs[m]), "uniform", 9) for m in ms),
        *(CheckTask(task, m) for (_, m, _), task in tasks.items()),
        PeakTask(),
    ]
    opened, *rest = answers(tmp_path / "cache", set(tasks.values()), requests)
    assert opened["ok"]["bytes"] > problem.E * problem.K * problem.N * 3
    found = [answer["ok"] for answer in rest]
    times, found = dict(zip(tasks, found, strict=False)), found[len(tasks) :]
    peaks = found.pop()
    assert 500 < peaks["tflops"] < 1000
    assert 4000 < peaks["gbps"] < 4800
    for (kernel, m, config), timed in times.items():
        assert timed["compilations"] == 0
        assert timed["reuse_bytes"] >= 3 * timed["l2_bytes"] > 0
        assert 0.3 < timed["between_us"] < 10, "the small kernel between two launches"
        gemm, slots = problem.gemm(kernel), m * problem.topk
        item_bytes = problem.quantization.dtype.weight_bits / 8
        # No launch reads its weights faster than the memory gives them, or multiplies faster than it can.
        least_us = min(slots, problem.E) / 2 * gemm.n * gemm.k * item_bytes / (peaks["gbps"] * 1e3)
        assert timed["time_us"] > least_us, (kernel, m, config)
        assert timed["time_us"] > 2 * slots * gemm.n * gemm.k / (2.5 * peaks["tflops"] * 1e6)
    looked = found.pop(0)
    assert looked["hopeless"]
    assert looked["time_us"] == pytest.approx(times["up", 1024, BAD]["time_us"], rel=0.1)
    for m, layer in zip(ms, found, strict=False):
        medians = [sorted(row)[len(row) // 2] for row in layer["samples_us"]]
        assert medians[0] == pytest.approx(medians[1], rel=0.03), "the same pair twice"
        alone = times["up", m, GOOD]["time_us"] + times["down", m, GOOD]["time_us"]
        assert medians[0] > 0.9 * alone
    for checked in found[len(ms) :]:
        assert checked["relative_error"] <= checked["tolerance"]

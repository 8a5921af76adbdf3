"""The measuring process launches exactly the binaries that were compiled for it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.compile_service import Compiled, CompileService
from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileStatus, CompileTask, Depth, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.identity import problem_to_json
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure import timing
from moetune.measure.alignment import padded_length
from moetune.measure.layer import Compilations, GpuBackend, padded_length_like
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from moetune.servers.protocol import Server

SEED = Problem(
    E=8,
    global_experts=8,
    topk=2,
    K=256,
    N=128,
    file_n=128,
    gpu=find_gpu("NVIDIA H200"),
    server="sglang",
    server_version="0.5.23",
    triton_version="3.6.0",
)
FP8 = replace(
    SEED, K=384, quantization=Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)
)
ROOT = Path(__file__).resolve().parents[2]


def quantized(dtype: Dtype, **rest: Any) -> Problem:
    return replace(SEED, K=384, quantization=Quantization(dtype, "made", **rest))


def binaries(server: Server, problem: Problem, ms: tuple[int, ...], config: KernelConfig) -> list[Any]:
    """One task for each launch class of both kernels, with an m that launches it."""
    found = []
    for kernel in KERNELS:
        # With USE_TMA both kernels have descriptors, and up writes what down reads in sorted order.
        launch = server.launch(problem, kernel, config, config, config)
        for kind in server.launch_classes(problem, kernel, ms, config.block_size_m):
            task = compile_task(launch, problem, kind)
            assert isinstance(task, CompileTask)
            found.append((task, kind.ms[0]))
    # What the kernel does not ask for makes no other binary.
    return list(dict(found).items())


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (SEED, KernelConfig(16, 32, 64, 1, 4, 2)),
        (replace(SEED, bias=True, topk=1), KernelConfig(32, 32, 64, 8, 4, 2)),
        (FP8, KernelConfig(16, 64, 128, 1, 4, 2)),
        (replace(SEED, topk=3, flags=("fused_sum",)), KernelConfig(16, 32, 64, 1, 4, 2)),
        (SEED, KernelConfig(16, 32, 64, 1, 4, 2, use_tma=True)),
        (FP8, KernelConfig(16, 64, 128, 1, 4, 2, use_tma=True)),
        (replace(SEED, server="vllm", server_version="0.33.0"), KernelConfig(16, 32, 64, 1, 4, 2)),
        (quantized(Dtype.FP8_W8A8), KernelConfig(16, 64, 128, 1, 4, 2)),
        (quantized(Dtype.FP8_W8A8, dynamic_activation=False), KernelConfig(64, 64, 128, 1, 4, 2)),
        (quantized(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True), KernelConfig(16, 32, 64, 1)),
        (quantized(Dtype.INT8_W8A8, per_channel=True), KernelConfig(16, 32, 64, 1)),
        (quantized(Dtype.INT8_W8A8, block_shape=(128, 128)), KernelConfig(16, 32, 64, 1)),
        (quantized(Dtype.INT8_W8A16, per_channel=True), KernelConfig(16, 32, 64, 1)),
        (quantized(Dtype.INT8_W8A16, group_size=128, zero_point=True), KernelConfig(16, 32, 64, 1)),
        (quantized(Dtype.INT4_W4A16, group_size=128), KernelConfig(16, 32, 64, 1)),
        (quantized(Dtype.INT4_W4A16, group_size=32, zero_point=True), KernelConfig(16, 32, 64, 1)),
        (
            replace(
                quantized(Dtype.INT4_W4A16, group_size=128, zero_point=True),
                server="vllm",
                server_version="0.33.0",
                activation_dtype=Dtype.FP16,
            ),
            KernelConfig(16, 32, 64, 1),
        ),
    ],
    ids=[
        "bf16",
        "bias and one expert a token",
        "fp8 with swap_ab",
        "summed over topk",
        "sorted rows by descriptors",
        "fp8 with sorted rows by descriptors, swapped",
        "vllm",
        "fp8 by tensor",
        "fp8 by tensor, static",
        "fp8 by channel",
        "int8 by channel",
        "int8 by block",
        "int8 weights by channel",
        "int8 weights by group",
        "int4",
        "int4 with zero points",
        "int4 in fp16 as vllm launches it",
    ],
)
def test_the_measuring_process_compiles_nothing(
    problem: Problem, config: KernelConfig, tmp_path: Path
) -> None:
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    # 1: a value that Triton specialises; 4, 8: divisible by 16 or not; 600: no early start.
    pairs = binaries(server, problem, (1, 4, 8, 600), config)
    assert len(pairs) >= 3
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    service = CompileService(CompilePool(Depth.BINARY, workers=2), tmp_path / "cache", events.put)
    try:
        service.submit([task for task, _ in pairs])
        for _ in pairs:
            event = events.get(timeout=120)
            assert isinstance(event, Compiled)
            assert event.result.status is CompileStatus.OK, event.result.message
    finally:
        service.close()

    document = {
        "problem": problem_to_json(problem),
        "arch": 90,
        "tasks": [{"task": task.to_json(), "m": m} for task, m in pairs],
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.no_gpu_driver"],
        input=json.dumps(document),
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Slots that stand alone are another alignment and no other binary.
    binaries_of_all = {replace(task, slots_alone=False) for task, _ in pairs}
    assert json.loads(done.stdout) == {"compiled": 0, "found": len(binaries_of_all)}


@given(
    slots=st.integers(1, 70_000),
    experts=st.integers(1, 512),
    block_size_m=st.sampled_from([16, 32, 64, 128, 256]),
    divisible=st.booleans(),
)
def test_a_padded_length_is_of_the_class_that_was_compiled_and_long_enough(
    slots: int, experts: int, block_size_m: int, divisible: bool
) -> None:
    server = open_server("sglang", "0.5.23", "3.6.0")
    launch = server.launch(SEED, "up", KernelConfig(block_size_m, 32, 64, 1, 4, 2))
    task = compile_task(launch, SEED)
    assert isinstance(task, CompileTask)
    length = padded_length_like(slots, experts, replace(task, padded_length_divisible=divisible))
    assert (length % 16 == 0) is divisible
    assert length % 4 == 0
    assert padded_length(slots, experts, block_size_m) <= length <= slots * block_size_m + 600 * block_size_m


def test_a_long_hopeless_launch_is_seen_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 300.0, 2: 260.0}
    asked: list[int] = []

    def direct_us(_: object, number: int) -> float:
        asked.append(number)
        return times[number]

    monkeypatch.setattr(timing, "direct_us", direct_us)
    seen = GpuBackend._looked_at(lambda _: None, 4, 200.0)
    assert seen is not None
    assert (seen.hopeless, seen.median_us, seen.count) == (True, 260.0, 2)
    # One launch under the bar: it has to be sampled.
    times[2] = 190.0
    assert GpuBackend._looked_at(lambda _: None, 4, 200.0) is None
    # A short launch cannot be told from what the host takes, and without a bar nothing is hopeless.
    asked.clear()
    assert GpuBackend._looked_at(lambda _: None, 4, 40.0) is None
    assert GpuBackend._looked_at(lambda _: None, 4, 0.0) is None
    assert not asked


def test_what_belongs_to_no_config_is_not_counted_as_compiled() -> None:
    before = triton.knobs.compilation.listener
    try:
        compilations = Compilations()
        for name, hit in (("activate_rows", False), ("quantize_groups", False), ("moe_grouped_gemm", True)):
            compilations._heard(cache_hit=hit, metadata={"name": name})
        assert compilations.count == 0
        compilations._heard(cache_hit=False, metadata={"name": "moe_grouped_gemm"})
        compilations._heard(cache_hit=False, metadata={"name": "fused_moe_kernel"})
        assert compilations.count == 2
    finally:
        triton.knobs.compilation.listener = before

"""The measuring process, all but the clock: data, cold circles, checks against the reference, the layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.protocol import (
    Checked,
    CheckTask,
    Failure,
    FailureKind,
    LayerPair,
    LayerTask,
    LayerTimed,
    Opened,
    Timed,
    TimeTask,
    Workload,
    read_answer,
    request_json,
)
from moetune.servers.registry import open_server

ROOT = Path(__file__).resolve().parents[2]
SMALL = Problem(
    E=6,
    global_experts=6,
    topk=2,
    K=64,
    N=32,
    file_n=32,
    gpu=find_gpu("NVIDIA H200"),
    server="sglang",
    server_version="0.5.23",
    triton_version="3.6.0",
)
FP8 = replace(
    SMALL,
    K=128,
    quantization=Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True),
)
TWO_GROUPS = replace(FP8, K=256)
SHARED_AND_PARALLEL = replace(SMALL, E=4, global_experts=9, ep=3, topk=3, fused_shared_experts=1, bias=True)
CONFIG = KernelConfig(16, 64, 64, 1, 4, 2)


def task(problem: Problem, kernel: Any, m: int, config: KernelConfig = CONFIG) -> CompileTask:
    server = open_server("sglang", "0.5.23", "3.6.0")
    launch = replace(server.launch(problem, kernel, config), pdl=False)
    (kind,) = server.launch_classes(problem, kernel, (m,), config.block_size_m)
    made = compile_task(launch, problem, kind)
    assert isinstance(made, CompileTask)
    return made


def ask(requests: list[object]) -> list[Any]:
    lines = "".join(json.dumps(request_json(request)) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.cpu_backend"],
        input=lines,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    hello, *answers = map(json.loads, done.stdout.splitlines())
    assert "hello" in hello
    return [read_answer(request, answer) for request, answer in zip(requests, answers, strict=True)]


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        FP8,
        SHARED_AND_PARALLEL,
        replace(SMALL, gated=False, topk=1),
        replace(SMALL, routing="zipf:1.5"),
    ],
    ids=["bf16", "fp8", "shared experts and other ranks", "not gated, one expert", "zipf"],
)
def test_a_problem_is_opened_timed_and_right(problem: Problem) -> None:
    m = 5
    up, down = (task(problem, kernel, m) for kernel in KERNELS)
    opened, *answers = ask(
        [
            Workload(problem, (1, m)),
            CheckTask(up, m),
            CheckTask(down, m),
            CheckTask(task(problem, "up", 1), 1),
            TimeTask(up, m, least_samples=2, most_samples=2),
            TimeTask(down, m, least_samples=2, most_samples=2),
            LayerTask(m, (LayerPair(up, down), LayerPair(up, down)), rounds=2),
            LayerTask(m, (LayerPair(up, down),), routing="zipf:1.2", rounds=1),
        ]
    )
    assert isinstance(opened, Opened), opened
    for checked in answers[:3]:
        assert isinstance(checked, Checked), checked
        assert checked.passed, checked
        # Some error there is: it was computed.
        assert checked.relative_error > 1e-5
    for timed in answers[3:5]:
        assert isinstance(timed, Timed), timed
        assert timed.time_us == 1.0
        assert timed.between_us == 1.0
        assert timed.reuse_bytes >= 3 * timed.l2_bytes
    for timed in answers[5:]:
        assert isinstance(timed, LayerTimed), timed
        assert timed.reuse_bytes >= 3 << 12
    assert len(answers[5].samples_us) == 2


def test_a_config_that_computes_wrong_numbers_is_found_out() -> None:
    # One scale of two groups is applied: see constraint SCALE_GROUP.
    m, wrong = 5, replace(CONFIG, block_size_k=256)
    opened, checked = ask([Workload(TWO_GROUPS, (m,)), CheckTask(task(TWO_GROUPS, "up", m, wrong), m)])
    assert isinstance(opened, Opened)
    assert isinstance(checked, Checked)
    assert not checked.passed


def test_a_binary_of_another_class_than_the_m_is_refused() -> None:
    m = 5
    good = task(SMALL, "up", m)
    opened, checked = ask([Workload(SMALL, (m,)), CheckTask(replace(good, num_slots_divisible=True), m)])
    assert isinstance(opened, Opened)
    assert isinstance(checked, Failure)
    assert checked.kind is FailureKind.CONFIG
    assert "divisibility" in checked.message


def test_a_request_before_a_problem_is_open_is_refused() -> None:
    (failure,) = ask([CheckTask(task(SMALL, "up", 5), 5)])
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.SETUP

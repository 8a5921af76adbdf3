"""On a real GPU: every format is multiplied right, and measured with nothing compiled in the process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.protocol import CheckTask, LayerPair, LayerTask, TimeTask, Workload
from moetune.measure.tolerance import sum_factor
from moetune.servers.registry import open_server
from tests.applications.fake_machine import PROBLEM
from tests.measure.made_up import run_case
from tests.measure.test_formats import CORRECT, limit_of
from tests.measure.test_gpu import answers, binary
from tests.measure.test_sorted_rows import IN_ORDER
from tests.measure.test_summed import SUMMED

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

_GBPS = 4800.0
"""What the memory of an H200 gives at most (its data sheet)."""


@pytest.mark.parametrize("name", CORRECT)
def test_every_format_is_right_on_the_gpu(name: str) -> None:
    case = CORRECT[name]
    outcome, limit = run_case(case, "cuda"), limit_of(case)
    assert outcome.relative_error <= limit
    assert outcome.worst_row_error <= 2 * limit
    assert outcome.untouched


@pytest.mark.parametrize("name", SUMMED)
def test_every_sum_over_topk_is_right_on_the_gpu(name: str) -> None:
    case = SUMMED[name]
    outcome = run_case(case, "cuda")
    assert outcome.relative_error <= limit_of(case) * sum_factor(case.topk)
    assert outcome.untouched


@pytest.mark.parametrize("name", IN_ORDER)
def test_rows_in_sorted_order_are_right_on_the_gpu(name: str) -> None:
    case = IN_ORDER[name]
    outcome = run_case(case, "cuda")
    limit = limit_of(case) * (sum_factor(case.topk) if case.summed else 1.0)
    assert outcome.relative_error <= limit
    assert outcome.worst_row_error <= 3 * limit
    assert outcome.untouched


def _problem(dtype: Dtype, **rest: Any) -> Problem:
    return replace(PROBLEM, K=2048, N=512, file_n=512, quantization=Quantization(dtype, "made", **rest))


PROBLEMS = {
    "fp8 by tensor": _problem(Dtype.FP8_W8A8, dynamic_activation=True),
    "fp8 by tensor, static": _problem(Dtype.FP8_W8A8, dynamic_activation=False),
    "fp8 by channel": _problem(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True),
    "int8 by channel": _problem(Dtype.INT8_W8A8, per_channel=True, dynamic_activation=True),
    "int8 by block": _problem(Dtype.INT8_W8A8, block_shape=(128, 128), dynamic_activation=True),
    "int8 weights by channel": _problem(Dtype.INT8_W8A16, per_channel=True),
    "int8 weights by group": _problem(Dtype.INT8_W8A16, group_size=128, zero_point=True),
    "int4": _problem(Dtype.INT4_W4A16, group_size=128),
    "int4 with zero points": _problem(Dtype.INT4_W4A16, group_size=64, zero_point=True),
}
SUMMING = {
    "bf16, summed": replace(PROBLEM, K=2048, N=512, file_n=512, flags=("fused_sum",)),
    **{
        f"{name}, summed": replace(PROBLEMS[name], flags=("fused_sum",))
        for name in ("fp8 by tensor", "int8 by block")
    },
}
CONFIGS = (KernelConfig(16, 64, 128, 1, 4, 4), KernelConfig(64, 64, 128, 8, 4, 3))


@pytest.mark.parametrize("name", PROBLEMS | SUMMING)
def test_every_format_is_measured(name: str, tmp_path: Path) -> None:
    problem, ms = (PROBLEMS | SUMMING)[name], (1, 64, 1024)
    tasks = {(k, m, c): binary(problem, k, m, c) for k in KERNELS for m in ms for c in CONFIGS}
    pairs = [
        (m, LayerPair(tasks["up", m, config], tasks["down", m, config])) for m in ms for config in CONFIGS[:1]
    ]
    requests = [
        Workload(problem, ms),
        *(TimeTask(task, m) for (_, m, _), task in tasks.items()),
        *(CheckTask(task, m) for (_, m, _), task in tasks.items()),
        *(LayerTask(m, (pair, pair), "uniform", 9) for m, pair in pairs),
    ]
    opened, *rest = answers(tmp_path / "cache", set(tasks.values()), requests)
    weight_bytes = problem.quantization.dtype.weight_bits / 8
    assert opened["ok"]["bytes"] > 3 * problem.E * problem.K * problem.N * weight_bytes
    found = [answer["ok"] for answer in rest]
    times, checks, layers = found[: len(tasks)], found[len(tasks) : 2 * len(tasks)], found[2 * len(tasks) :]
    for (kernel, m, _), timed in zip(tasks, times, strict=True):
        assert timed["compilations"] == 0
        assert timed["reuse_bytes"] >= 3 * timed["l2_bytes"] > 0
        gemm, slots = problem.gemm(kernel), m * problem.topk
        # Half of the experts that so many slots could touch at least.
        least_us = min(slots, problem.E) / 2 * gemm.n * gemm.k * weight_bytes / (_GBPS * 1e3)
        assert timed["time_us"] > least_us
    for checked in checks:
        assert 1e-5 < checked["relative_error"] <= checked["tolerance"]
    for layer in layers:
        first, second = (sorted(row)[len(row) // 2] for row in layer["samples_us"])
        assert first == pytest.approx(second, rel=0.03), "the same pair twice"


SORTED = {
    "bf16": replace(PROBLEM, K=2048, N=512, file_n=512),
    "fp8 by block": _problem(Dtype.FP8_W8A8, block_shape=(128, 128), dynamic_activation=True),
    "int8 by block": PROBLEMS["int8 by block"],
    "fp8 by tensor, static": PROBLEMS["fp8 by tensor, static"],
    "bf16, summed": SUMMING["bf16, summed"],
    "experts of other ranks": replace(PROBLEM, K=2048, N=512, file_n=512, E=64, global_experts=256, ep=4),
}


@pytest.mark.parametrize("name", SORTED)
def test_a_pair_with_sorted_rows_is_measured(name: str, tmp_path: Path) -> None:
    """USE_TMA in the down config: each kernel alone, and the pair beside the plain pair in the layer."""
    problem, ms = SORTED[name], (1, 64, 1024)
    server = open_server("sglang", "0.5.23", "3.6.0")
    pairs: dict[tuple[int, KernelConfig, bool], LayerPair] = {}
    for m, config, by_tma in itertools.product(ms, CONFIGS, (False, True)):
        down = replace(config, use_tma=by_tma)
        pairs[m, config, by_tma] = LayerPair(
            binary(problem, "up", m, config, server.launch(problem, "up", config, None, down)),
            binary(problem, "down", m, down, server.launch(problem, "down", down, config)),
        )
    sorted_tasks = [
        (task, m) for (m, _, by_tma), one in pairs.items() if by_tma for task in (one.up, one.down)
    ]
    requests = [
        Workload(problem, ms),
        *(TimeTask(task, m) for task, m in sorted_tasks),
        *(CheckTask(task, m) for task, m in sorted_tasks),
        *(LayerTask(m, (pairs[m, c, False], pairs[m, c, True]), "uniform", 9) for m in ms for c in CONFIGS),
    ]
    tasks = {task for one in pairs.values() for task in (one.up, one.down)}
    _, *rest = answers(tmp_path / "cache", tasks, requests)
    found = [answer["ok"] for answer in rest]
    count = len(sorted_tasks)
    for timed in found[:count]:
        assert timed["compilations"] == 0
        assert timed["reuse_bytes"] >= 3 * timed["l2_bytes"] > 0
    for checked in found[count : 2 * count]:
        assert 1e-5 < checked["relative_error"] <= checked["tolerance"]
    for layer in found[2 * count :]:
        assert layer["compilations"] == 0
        plain, by_tma = (sorted(row)[len(row) // 2] for row in layer["samples_us"])
        print(f"{name}: plain {plain:.2f} us, USE_TMA {by_tma:.2f} us")  # noqa: T201 - what the lead reads
        assert 0.3 < by_tma / plain < 3

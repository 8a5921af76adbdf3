"""The down kernel adds up the topk results of a token: right numbers, its zeros, its binaries, its memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import Gpu
from moetune.domain.launch import Launch
from moetune.domain.resources import shared_memory_bytes, smem_limit_bytes
from moetune.domain.space import can_run
from moetune.measure.compile import allocated_shared_bytes
from moetune.measure.protocol import (
    Checked,
    CheckTask,
    LayerPair,
    LayerTask,
    LayerTimed,
    Timed,
    TimeTask,
    Workload,
)
from moetune.measure.tolerance import sum_factor
from tests.measure import server_kernels
from tests.measure.interpreted import Case, Outcome, interpret
from tests.measure.test_formats import FORMATS, limit_of
from tests.measure.test_shared_memory_formats import SETS, TRITON, _sample
from tests.measure.test_worker import FP8, SHARED_AND_PARALLEL, SMALL, ask, task

if TYPE_CHECKING:
    from pathlib import Path

_DOWN = Case(kernel="down", topk=3, summed=True)
_TOKENS = {
    "bf16": _DOWN,
    "fp16": replace(_DOWN, operand="fp16"),
    "fp8 by block": replace(_DOWN, operand="fp8e4nv", block=64, n=192, k=256),
    "bias": replace(_DOWN, bias=True),
    **{
        name: replace(case, kernel="down", topk=3, summed=True)
        for name, case in FORMATS.items()
        if not case.weight  # with 16-bit activations the servers' kernels do not sum
    },
}
SUMMED = {
    **_TOKENS,
    "one token": replace(_DOWN, tokens=1),
    "eight experts a token": replace(_DOWN, topk=8, experts=12),
    "many tiles an expert": replace(_DOWN, tokens=53, experts=3, topk=3),
    "ragged N and K": replace(_DOWN, n=72, k=112),
    "swapped": replace(_TOKENS["fp8 by tensor"], swap_ab=True, config=(16, 64, 64, 1)),
    "experts of another rank": replace(_DOWN, elsewhere=3, experts=6),
    "experts without tokens": replace(_DOWN, experts=9, idle_experts=5),
}
"""Cases in which the kernel has to be right."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return dict(zip(SUMMED, interpret(list(SUMMED.values())), strict=True))


@pytest.mark.parametrize("name", SUMMED)
def test_the_sum_over_topk_agrees_with_the_reference(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, case = outcomes[name], SUMMED[name]
    assert outcome.relative_error <= limit_of(case) * sum_factor(case.topk)
    assert outcome.untouched, "the kernel wrote beyond one row a token"
    assert outcome.reference_norm > 1, "nothing was computed"


def test_the_error_of_a_sum_grows_as_its_roundings() -> None:
    assert sum_factor(0) == 1.0
    assert sum_factor(8) == pytest.approx(5.5**0.5)
    # What a forgotten expert would cost is far above it.
    assert 5e-3 * sum_factor(22) < 0.1 * (1 / 22) ** 0.5


SUMMING = {
    "bf16": replace(SMALL, topk=3, flags=("fused_sum",)),
    "fp8 by block": replace(FP8, N=128, topk=3, flags=("fused_sum",)),
    "experts of other ranks": replace(SHARED_AND_PARALLEL, flags=("fused_sum",)),
}
"""Problems of a server that sums in the kernel."""


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Any]]:
    requests: list[object] = []
    m = 5
    for problem in SUMMING.values():
        up, down = task(problem, "up", m), task(problem, "down", m)
        layer = LayerTask(m, (LayerPair(up, down),), rounds=1)
        requests += [Workload(problem, (m,)), CheckTask(up, m), CheckTask(down, m), TimeTask(down, m), layer]
        # Again, after launches that left their sums where this one adds.
        requests.append(CheckTask(down, m))
    answers = ask(requests)
    return {name: answers[6 * number : 6 * number + 6] for number, name in enumerate(SUMMING)}


@pytest.mark.parametrize("name", SUMMING)
def test_the_measuring_process_checks_and_times_a_kernel_that_sums(
    name: str, measured: dict[str, list[Any]]
) -> None:
    _, up, down, timed, layer, again = measured[name]
    for checked in (up, down, again):
        assert isinstance(checked, Checked), checked
        assert checked.passed, checked
        assert checked.relative_error > 1e-5, "nothing was rounded: was it computed?"
    assert down.tolerance == pytest.approx(up.tolerance * sum_factor(3))
    assert isinstance(timed, Timed), timed
    assert isinstance(layer, LayerTimed), layer


def _summing(found: CompileTask, launch: Launch) -> tuple[CompileTask, Launch]:
    """The same tile in a down kernel that sums."""
    down = replace(launch, kernel="down", sum_topk=8)
    return replace(found, launch=down, top_k=1), down


_SETS = [(name, capability) for name, capability in SETS if "weights" not in name and "int4" not in name]


@pytest.fixture(scope="module")
def samples() -> dict[CompileTask, Launch]:
    pairs = [item for name, capability in _SETS for item in _sample(name, capability, 6).items()]
    return dict(_summing(found, launch) for found, launch in pairs)


def test_a_sum_needs_the_shared_memory_of_a_store(samples: dict[CompileTask, Launch]) -> None:
    compiled = CompilePool(workers=2, seconds_each=120).compile(list(samples))
    fits = 0
    for found, launch in samples.items():
        capability = divmod(found.arch, 10)
        gpu = Gpu("a GPU", vendor="NVIDIA", compute_capability=capability)
        result: CompileResult = compiled[found]
        allocated, limit = result.shared_bytes, smem_limit_bytes(capability)
        is_good = allocated is not None and allocated <= limit
        assert can_run(launch, gpu, TRITON) == is_good, (launch, result)
        assert shared_memory_bytes(launch, capability) >= (allocated or 0)
        fits += is_good
    assert 0.2 * len(samples) < fits < 0.8 * len(samples)


def test_sglangs_kernel_that_sums_needs_no_more(
    samples: dict[CompileTask, Launch], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel = server_kernels.load_kernel("sglang", "0.5.23", tmp_path)
    seen = 0
    for found, launch in random.Random(0).sample(list(samples.items()), 24):
        options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}
        allocated = allocated_shared_bytes(server_kernels.server_source(kernel, found), found.arch, options)
        assert allocated is not None
        assert allocated <= shared_memory_bytes(launch, divmod(found.arch, 10))
        seen += 1
    capfd.readouterr()
    assert seen == 24


def test_what_triton_cannot_compile_with_a_store_it_compiles_with_a_sum() -> None:
    problem = replace(SMALL, K=2048, N=512, topk=8)
    gpu, config = problem.gpu, KernelConfig(256, 64, 64, 1, 4, 3)
    plain = Launch("down", config)
    found = [compile_task(launch, problem) for launch in (plain, replace(plain, sum_topk=8))]
    tasks = [one for one in found if isinstance(one, CompileTask)]
    results = CompilePool(workers=2, seconds_each=120).compile(tasks)
    assert [results[one].status for one in tasks] == [CompileStatus.COMPILER_FAILURE, CompileStatus.OK]
    assert [can_run(one.launch, gpu, TRITON) for one in tasks] == [False, True]

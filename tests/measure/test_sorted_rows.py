"""Rows in sorted order and tiles by descriptors (USE_TMA): right numbers, each kernel alone and as a pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.problem import Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
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
from moetune.servers.registry import open_server
from tests.measure.interpreted import Case, Outcome, interpret
from tests.measure.test_formats import limit_of
from tests.measure.test_worker import CONFIG, FP8, SHARED_AND_PARALLEL, SMALL, ask

_UP = Case(in_order=True)
_UP_BY_DESCRIPTOR = replace(_UP, by_descriptor=True)
_DOWN = Case(kernel="down", in_order=True, by_descriptor=True)
_FP8: dict[str, Any] = {"operand": "fp8e4nv", "block": 64, "n": 192, "k": 256}
_INT8: dict[str, Any] = {**_FP8, "operand": "i8"}

_CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    " in fp16": {"operand": "fp16"},
    ", one token": {"tokens": 1},
    ", many ragged tiles": {"tokens": 53, "experts": 3, "config": (16, 32, 64, 4)},
    ", experts of another rank": {"elsewhere": 2, "experts": 6},
    ", experts without tokens": {"experts": 9, "idle_experts": 6},
    ", ragged N and K": {"n": 72, "k": 112},
    ", bias": {"bias": True},
    ", fp8 by block": _FP8,
    ", fp8 by block, swapped": {**_FP8, "swap_ab": True, "config": (16, 64, 64, 1)},
    ", fp8 by block, N tile over two groups": {**_FP8, "config": (16, 128, 64, 4)},
    ", int8 by block": _INT8,
    ", fp8 by tensor": {"operand": "fp8e4nv", "scales": "tensor"},
}
IN_ORDER = {
    "up, weights by descriptor": Case(by_descriptor=True),
    "up, weights by descriptor, ragged N and K": Case(by_descriptor=True, n=72, k=112),
    **{
        f"{name}{rest}": replace(case, **change)
        for name, case in {"up": _UP, "up by descriptor": _UP_BY_DESCRIPTOR, "down": _DOWN}.items()
        for rest, change in _CHANGES.items()
        # Beside descriptors for the weights nothing is new of sorted output but what differs by tile.
        if case is not _UP_BY_DESCRIPTOR or rest in ("", ", ragged N and K", ", fp8 by block, swapped")
    },
    "up, int8 weights by channel": replace(_UP, weight="i8", scales="channel"),
    "down, int8 weights by channel": replace(_DOWN, weight="i8", scales="channel"),
    "up, fp8 by channel": replace(_UP, operand="fp8e4nv", scales="channel"),
    "down, summed": replace(_DOWN, topk=3, summed=True),
    "down, fp8 by block, summed": replace(_DOWN, **_FP8, topk=3, summed=True),
}
"""Cases in which the kernel has to be right."""

WRONG = {
    "down, fp8 by channel": replace(_DOWN, operand="fp8e4nv", scales="channel"),
    "down, int8 by channel": replace(_DOWN, operand="i8", scales="channel"),
}
"""Cases in which it is wrong, as SGLang's is: a row's scale is read where its slot stood."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    cases = IN_ORDER | WRONG
    return dict(zip(cases, interpret(list(cases.values())), strict=True))


@pytest.mark.parametrize("name", IN_ORDER)
def test_rows_in_sorted_order_agree_with_the_reference(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, case = outcomes[name], IN_ORDER[name]
    limit = limit_of(case) * (sum_factor(case.topk) if case.summed else 1.0)
    assert outcome.relative_error <= limit
    assert outcome.worst_row_error <= 3 * limit
    assert outcome.untouched, "the kernel wrote beyond the output"
    assert outcome.reference_norm > 1, "nothing was computed"


@pytest.mark.parametrize("name", WRONG)
def test_scales_by_row_are_those_of_other_rows(name: str, outcomes: dict[str, Outcome]) -> None:
    assert not outcomes[name].relative_error < 0.1


def pair(problem: Problem, m: int, config: KernelConfig = CONFIG) -> tuple[CompileTask, CompileTask]:
    """The binaries of a pair whose down entry has USE_TMA."""
    server, down = open_server("sglang", "0.5.23", "3.6.0"), replace(config, use_tma=True)
    return (
        _task(problem, "up", m, server.launch(problem, "up", config, None, down)),
        _task(problem, "down", m, server.launch(problem, "down", down, config)),
    )


def _task(problem: Problem, kernel: Kernel, m: int, launch: Any) -> CompileTask:
    server = open_server("sglang", "0.5.23", "3.6.0")
    (kind,) = server.launch_classes(problem, kernel, (m,), launch.config.block_size_m)
    made = compile_task(replace(launch, pdl=False), problem, kind)
    assert isinstance(made, CompileTask)
    return made


M = 5
PAIRS = {
    "bf16": SMALL,
    "bf16, not gated": replace(SMALL, gated=False),
    "fp8 by block": replace(FP8, N=128),
    "int8 by block": replace(FP8, N=128, quantization=Quantization(Dtype.INT8_W8A8, "made", (128, 128))),
    "int8 weights by channel": replace(
        SMALL, K=128, N=64, quantization=Quantization(Dtype.INT8_W8A16, "made", per_channel=True)
    ),
    "fp8 by tensor, static": replace(
        SMALL, K=128, N=64, quantization=Quantization(Dtype.FP8_W8A8, "made", dynamic_activation=False)
    ),
    "experts of other ranks": SHARED_AND_PARALLEL,
    "summed": replace(SMALL, topk=3, flags=("fused_sum",)),
}
"""Problems whose down config may have USE_TMA."""


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Any]]:
    requests: list[object] = []
    for problem in PAIRS.values():
        requests += [Workload(problem, (M,)), *map(CheckTask, pair(problem, M), (M, M))]
    answers = ask(requests)
    return {name: answers[3 * number : 3 * number + 3] for number, name in enumerate(PAIRS)}


@pytest.mark.parametrize("name", PAIRS)
def test_the_measuring_process_checks_a_pair(name: str, measured: dict[str, list[Any]]) -> None:
    _, *checks = measured[name]
    for checked in checks:
        assert isinstance(checked, Checked), checked
        assert checked.passed, checked
        assert checked.relative_error > 1e-5, "nothing was rounded: was it computed?"


def test_the_measuring_process_times_a_pair() -> None:
    """Each kernel alone, and the layer; that its numbers are right is in test_between.py."""
    up, down = pair(SMALL, M)
    layer = LayerTask(M, (LayerPair(up, down),), rounds=1)
    _, *times, timed = ask([Workload(SMALL, (M,)), TimeTask(up, M), TimeTask(down, M), layer])
    assert all(isinstance(one, Timed) for one in times), times
    assert isinstance(timed, LayerTimed), timed


def test_a_check_sees_the_scales_of_other_rows() -> None:
    quantization = Quantization(Dtype.FP8_W8A8, "made", per_channel=True, dynamic_activation=True)
    problem = replace(SMALL, K=128, N=64, quantization=quantization)
    _, down = pair(problem, 5)
    assert "scales of other rows" in down.launch.wrong_numbers
    _, checked = ask([Workload(problem, (5,)), CheckTask(down, 5)])
    assert isinstance(checked, Checked)
    assert not checked.passed

"""Every format of the expert weights is multiplied right, run in Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.kernel_format import Scales
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
    Workload,
)
from moetune.measure.tolerance import relative_error_limit
from tests.measure.interpreted import Case, Outcome, interpret
from tests.measure.test_worker import SMALL, ask, task

_FP8_TENSOR = Case(operand="fp8e4nv", scales="tensor")
_FP8_CHANNEL = Case(operand="fp8e4nv", scales="channel")
_INT8_CHANNEL = Case(operand="i8", scales="channel")
_INT8_BLOCK = Case(operand="i8", block=64, n=192, k=256, config=(16, 32, 64, 1))
_INT8_WEIGHTS = Case(weight="i8", scales="channel")
_INT4 = Case(weight="u4", scales="group", group_size=32)
_INT4_ZEROS = replace(_INT4, zero_point=True)
_INT8_GROUPS = Case(weight="u8", scales="group", group_size=32)
_INT8_GROUPS_ZEROS = replace(_INT8_GROUPS, zero_point=True)

FORMATS = {
    "fp8 by tensor": _FP8_TENSOR,
    "fp8 by channel": _FP8_CHANNEL,
    "int8 by channel": _INT8_CHANNEL,
    "int8 by tensor": Case(operand="i8", scales="tensor"),
    "int8 by block": _INT8_BLOCK,
    "int8 weights by channel": _INT8_WEIGHTS,
    "int8 weights by group": _INT8_GROUPS,
    "int8 weights by group, zero points": _INT8_GROUPS_ZEROS,
    "int4": _INT4,
    "int4 with zero points": _INT4_ZEROS,
}
"""One case of each format."""

SHAPES: dict[str, dict[str, Any]] = {
    "": {},
    ", down": {"kernel": "down"},
    ", one token": {"tokens": 1},
    ", one slot": {"tokens": 1, "topk": 1},
    ", one expert a token": {"topk": 1, "tokens": 19},
    ", experts without tokens": {"experts": 9, "idle_experts": 6},
    ", experts of another rank, down": {"kernel": "down", "elsewhere": 2, "experts": 6},
    ", many ragged tiles": {"tokens": 53, "experts": 3, "config": (16, 32, 64, 4)},
    ", ragged N and K": {"n": 72, "k": 112},
}
"""What every format has to bear."""

SPECIAL = {
    "fp8 by channel, bias, down": replace(_FP8_CHANNEL, kernel="down", bias=True),
    "fp8 by tensor, swapped": replace(_FP8_TENSOR, swap_ab=True, config=(16, 64, 64, 1)),
    "fp8 by channel, swapped, ragged": replace(
        _FP8_CHANNEL, swap_ab=True, n=168, k=112, config=(16, 64, 64, 1)
    ),
    "int8 by block, N tile over two groups": replace(_INT8_BLOCK, config=(16, 128, 64, 4)),
    "int8 weights by channel in fp16": replace(_INT8_WEIGHTS, operand="fp16"),
    "int4 in fp16": replace(_INT4_ZEROS, operand="fp16"),
    "int4, K tile over two groups": replace(_INT4_ZEROS, k=256, config=(16, 32, 64, 1), group_size=32),
    "int4, K tile half a group": replace(_INT4_ZEROS, k=256, config=(16, 32, 32, 1), group_size=64),
    "int4, one group": replace(_INT4_ZEROS, group_size=128),
    "int4, last group cut": replace(_INT4_ZEROS, k=144, group_size=64),
    "int4, K tile past the last group": replace(_INT4_ZEROS, k=144, group_size=32),
    "int8 in groups, K tile past the last group": replace(_INT8_GROUPS_ZEROS, k=144, group_size=32),
    "int8 in groups, last group cut": replace(_INT8_GROUPS_ZEROS, k=144, group_size=64),
}

CORRECT = {
    **{
        name + shape: replace(case, **change)
        for name, case in FORMATS.items()
        for shape, change in SHAPES.items()
    },
    **SPECIAL,
}


def limit_of(case: Case) -> float:
    scales = Scales.BLOCK if case.block else Scales(case.scales)
    return relative_error_limit(case.operand, scales)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return dict(zip(CORRECT, interpret(list(CORRECT.values())), strict=True))


@pytest.mark.parametrize("name", CORRECT)
def test_every_format_agrees_with_the_reference(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, limit = outcomes[name], limit_of(CORRECT[name])
    assert outcome.relative_error <= limit
    assert outcome.worst_row_error <= 2 * limit
    assert outcome.untouched, "the kernel wrote beyond the output"
    assert outcome.reference_norm > 1, "nothing was computed"


def _problem(dtype: Dtype, activation: Dtype = Dtype.BF16, **rest: Any) -> Problem:
    quantization = Quantization(dtype, "made", **rest)
    return replace(SMALL, K=128, N=64, quantization=quantization, activation_dtype=activation)


MEASURED = {
    "fp8 by tensor": _problem(Dtype.FP8_W8A8, dynamic_activation=True),
    "fp8 by tensor, static": _problem(Dtype.FP8_W8A8, dynamic_activation=False),
    "fp8 by channel": _problem(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True),
    "int8 by channel": _problem(Dtype.INT8_W8A8, per_channel=True, dynamic_activation=True),
    "int8 by block": _problem(Dtype.INT8_W8A8, block_shape=(64, 64), dynamic_activation=True),
    "int8 weights by channel": _problem(Dtype.INT8_W8A16, per_channel=True),
    "int8 weights by group": _problem(Dtype.INT8_W8A16, group_size=32, zero_point=True),
    "int4": _problem(Dtype.INT4_W4A16, group_size=64),
    "int4 with zero points, fp16": _problem(Dtype.INT4_W4A16, Dtype.FP16, group_size=32, zero_point=True),
    # Groups of 128 do not divide N: the servers halve them.
    "int4, halved groups": _problem(Dtype.INT4_W4A16, group_size=128, zero_point=True),
}
"""Problems with made-up operands of the measuring process itself."""


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Any]]:
    requests: list[object] = []
    m = 5
    for problem in MEASURED.values():
        up, down = (task(problem, kernel, m) for kernel in KERNELS)
        layer = LayerTask(m, (LayerPair(up, down),), rounds=1)
        requests += [Workload(problem, (m,)), CheckTask(up, m), CheckTask(down, m), layer]
    answers = ask(requests)
    return {name: answers[4 * number : 4 * number + 4] for number, name in enumerate(MEASURED)}


@pytest.mark.parametrize("name", MEASURED)
def test_the_measuring_process_opens_checks_and_times_every_format(
    name: str, measured: dict[str, list[Any]]
) -> None:
    opened, up, down, layer = measured[name]
    assert isinstance(opened, Opened), opened
    for checked in (up, down):
        assert isinstance(checked, Checked), checked
        assert checked.passed, checked
        assert checked.relative_error > 1e-5, "nothing was rounded: was it computed?"
    assert isinstance(layer, LayerTimed), layer


def test_a_format_that_the_kernels_lack_is_refused_with_its_name() -> None:
    (failure,) = ask([Workload(_problem(Dtype.MXFP4), (5,))])
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.SETUP
    assert "mxfp4" in failure.message

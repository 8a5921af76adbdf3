"""Every format of the expert weights is multiplied right, run in Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.kernel_format import Scales
from moetune.measure.tolerance import relative_error_limit
from tests.measure.interpreted import Case, Outcome, interpret

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

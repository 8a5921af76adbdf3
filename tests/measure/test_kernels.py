"""The kernel computes what the fp32 reference does, run in Triton's interpreter on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.measure.interpreted import Case, Outcome, interpret
from tests.tolerances import RELATIVE_ERROR

_FP8 = Case(operand="fp8e4nv", block=64, n=192, k=256, config=(16, 32, 64, 1))

CORRECT = {
    "up": Case(),
    "down": Case(kernel="down"),
    "up fp16": Case(operand="fp16"),
    "down fp16": Case(kernel="down", operand="fp16"),
    "one token": Case(tokens=1),
    "one token, one expert a token": Case(tokens=1, topk=1),
    "one expert a token": Case(topk=1, tokens=19),
    "all experts for each token": Case(topk=5),
    "many tiles an expert, the last one ragged": Case(tokens=53, experts=3, topk=2),
    "experts without tokens": Case(experts=9, idle_experts=6, topk=2),
    "one expert only": Case(experts=1, topk=1, tokens=17),
    "ragged N": Case(n=72),
    "N under a tile": Case(n=24),
    "ragged K": Case(k=112),
    "K under a tile": Case(k=48),
    "one K tile": Case(k=64),
    "bands of two": Case(tokens=40, config=(16, 32, 64, 2)),
    "bands of 64, higher than the grid": Case(tokens=40, config=(16, 32, 64, 64)),
    "a band that is cut": Case(tokens=40, experts=3, config=(16, 32, 64, 4)),
    "wide tiles": Case(tokens=70, config=(64, 64, 32, 8)),
    "padded to 16": Case(padded_multiple=16),
    "bias": Case(bias=True),
    "bias before the routing weight": Case(kernel="down", bias=True),
    "experts of another rank": Case(elsewhere=2, experts=6),
    "experts of another rank, down": Case(kernel="down", elsewhere=2, experts=6),
    "every expert of another rank": Case(elsewhere=0),
    "fp8": _FP8,
    "fp8 down": replace(_FP8, kernel="down"),
    "fp8, K tile half a group": replace(_FP8, config=(16, 32, 32, 1)),
    "fp8, N tile over two groups": replace(_FP8, config=(16, 128, 64, 4)),
    "fp8, ragged N and K": replace(_FP8, n=168, k=240),
    "fp8 swapped": replace(_FP8, swap_ab=True, config=(16, 64, 64, 1)),
    "fp8 swapped, N tile over two groups": replace(_FP8, swap_ab=True, config=(32, 128, 32, 1)),
    "fp8 swapped, down, ragged": replace(_FP8, swap_ab=True, kernel="down", n=168, config=(16, 64, 64, 1)),
    "swapped without scales": Case(swap_ab=True),
}
"""Cases in which the kernel has to be right."""

GROUP_128 = Case(operand="fp8e4nv", block=128, n=128, k=512, config=(16, 32, 128, 1))
WRONG = {
    "K tile over two groups": replace(GROUP_128, config=(16, 32, 256, 1)),
    "K tile over two groups, down": replace(GROUP_128, kernel="down", config=(16, 32, 256, 1)),
    "K tile over two groups, swapped": replace(GROUP_128, swap_ab=True, config=(16, 64, 256, 1)),
}
"""Cases in which the kernel is known to be wrong, as the servers' kernels are."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    cases = {**CORRECT, **WRONG, "group of 128": GROUP_128}
    return dict(zip(cases, interpret(list(cases.values())), strict=True))


@pytest.mark.parametrize("name", CORRECT)
def test_the_kernel_agrees_with_the_reference(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, tolerance = outcomes[name], RELATIVE_ERROR[CORRECT[name].operand]
    assert outcome.relative_error <= tolerance
    assert outcome.worst_row_error <= 2 * tolerance
    assert outcome.untouched, "the kernel wrote beyond the output"
    assert outcome.reference_norm > 1 or CORRECT[name].elsewhere == 0, "nothing was computed"


def test_case_44_k_tile_over_a_quantization_group_fails_the_check(outcomes: dict[str, Outcome]) -> None:
    tolerance = RELATIVE_ERROR["fp8e4nv"]
    assert outcomes["group of 128"].relative_error <= tolerance
    for name in WRONG:
        assert outcomes[name].relative_error > 50 * tolerance, name
        assert math.isfinite(outcomes[name].relative_error), name

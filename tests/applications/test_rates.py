"""Rates of a time: bytes and operations by hand, and what limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetune.applications.rates import needed_work, rate
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.protocol import Peaks
from tests.applications.fake_machine import PROBLEM

H200 = Peaks(tflops=790.0, gbps=4300.0)


def test_one_token_touches_its_experts_once() -> None:
    moved, operations = needed_work(PROBLEM, 1)
    weights = 8 * (512 * 3072 + 3072 * 256) * 2
    activations = 3072 * 2 + 8 * 512 * 2 + 8 * 256 * 2 + 8 * 3072 * 2
    assert moved == pytest.approx(weights + activations)
    assert operations == 2 * 8 * (512 * 3072 + 3072 * 256)


def test_many_tokens_touch_all_experts_once() -> None:
    moved, _ = needed_work(PROBLEM, 4096)
    weights = 256 * (512 * 3072 + 3072 * 256) * 2
    assert weights < moved < 2.1 * weights


def test_a_rank_does_its_share_and_shared_experts_take_every_token() -> None:
    whole = needed_work(replace(PROBLEM, E=256), 64)[1]
    rank = needed_work(replace(PROBLEM, E=64, ep=4), 64)[1]
    assert rank == pytest.approx(whole / 4)
    shared = needed_work(replace(PROBLEM, E=257, topk=9, fused_shared_experts=1), 64)[1]
    assert shared == pytest.approx(whole * 9 / 8)


def test_few_tokens_are_limited_by_memory_and_many_by_tensor_cores() -> None:
    few, many = rate(PROBLEM, 16, 122.0, H200), rate(PROBLEM, 32768, 3000.0, H200)
    assert few.limit == "memory"
    assert few.share is not None
    assert 0.8 < few.share < 1.0
    assert many.limit == "tensor cores"
    assert many.share == pytest.approx(many.tflops / 790.0)


def test_the_peak_of_eight_bits_is_twice_that_of_sixteen() -> None:
    quantization = Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)
    found = rate(replace(PROBLEM, quantization=quantization), 65536, 4000.0, H200)
    assert found.limit == "tensor cores"
    assert found.share == pytest.approx(found.tflops / 1580.0)


def test_without_a_peak_there_is_no_share() -> None:
    assert rate(PROBLEM, 16, 122.0, None).share is None

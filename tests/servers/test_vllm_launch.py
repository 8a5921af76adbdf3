"""Default configs, launches and launch classes of vLLM."""

from __future__ import annotations

import math
from dataclasses import replace

from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS, Kernel
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.vllm.launch import padded_length
from tests.servers.vllm_problems import (
    A100,
    FP8_BLOCK,
    H200,
    MI300X,
    layer,
    sharded,
)


def test_defaults_scale_with_m_since_0_17() -> None:
    for version, switches in (("0.16.0", (64,)), ("0.17.0", (32, 64, 96, 128, 512, 8255))):
        server, problem = sharded(layer(64, 1024), version=version)
        assert server.default_switches(problem) == switches
    server, problem = sharded(layer(64, 1024))
    assert server.default_config(problem, "up", 1) == KernelConfig(16, 64, 128, 1, 4, 4)
    assert server.default_config(problem, "down", 8256) == KernelConfig(128, 128, 64, 16, 8, 3)


def test_block_fp8_defaults_are_narrow_for_few_rows_since_0_25() -> None:
    for version, n, stages in (("0.16.0", 128, 3), ("0.24.0", 128, 3), ("0.25.0", 64, 4)):
        server, problem = sharded(layer(64, 1024, quantization=FP8_BLOCK), version=version)
        found = server.default_config(problem, "up", 4)
        assert (found.block_size_n, found.num_stages) == (n, stages)


def test_defaults_on_rocm_have_two_stages() -> None:
    for quantization in (Quantization(), FP8_BLOCK):
        server, problem = sharded(layer(64, 1024, quantization=quantization), gpu=MI300X)
        assert {
            server.default_config(problem, kernel, m).num_stages for kernel in KERNELS for m in (1, 99)
        } == {2}


def test_block_size_k_is_clamped_to_the_quantization_block() -> None:
    server, problem = sharded(layer(64, 1024, quantization=replace(FP8_BLOCK, block_shape=(64, 128))))
    found = server.launch(problem, "up", KernelConfig(64, 128, 256, 1))
    assert (found.config.block_size_k, found.block_k, found.a_bits, found.b_bits) == (64, 128, 8, 8)
    _, plain = sharded(layer(64, 1024))
    assert server.launch(plain, "up", KernelConfig(64, 128, 256, 1)).config.block_size_k == 256


def test_small_fp8_tiles_are_transposed_on_hopper_since_0_25() -> None:
    small, tall = KernelConfig(16, 64, 128, 1), KernelConfig(64, 64, 128, 1)
    narrow = KernelConfig(16, 32, 128, 1)
    fp8 = layer(64, 1024, quantization=Quantization(Dtype.FP8_W8A8))
    for version, gpu, swaps in (("0.24.0", H200, False), ("0.25.0", H200, True), ("0.33.0", A100, False)):
        server, problem = sharded(fp8, version=version, gpu=gpu)
        found = [server.launch(problem, "up", config).swap_ab for config in (small, tall, narrow)]
        assert found == [swaps, False, False]
    server, bf16 = sharded(layer(64, 1024))
    assert not server.launch(bf16, "up", small).swap_ab


def test_configs_that_differ_by_an_overwritten_split_k_are_one_launch() -> None:
    server, problem = sharded(layer(64, 1024))
    with_it = KernelConfig(16, 64, 64, 1, extra=(("SPLIT_K", 1), ("maxnreg", 128)))
    assert server.launch(problem, "up", with_it).config.extra == (("maxnreg", 128),)


def test_few_rows_skip_the_alignment_since_0_20() -> None:
    for version, naive_ms in (("0.19.1", ()), ("0.20.0", (1, 2, 4, 8))):
        server, problem = sharded(layer(256, 1024), version=version)
        classes = server.launch_classes(problem, "up", [1, 2, 4, 8, 9, 16], 16)
        naive = [c for c in classes if dict(c.constexprs).get("naive_block_assignment")]
        assert tuple(m for c in naive for m in c.ms) == naive_ms
    server, spread = sharded(layer(256, 1024), tp=4, ep=4)
    assert not any(
        dict(c.constexprs)["naive_block_assignment"] for c in server.launch_classes(spread, "up", [1], 16)
    )


def test_int8_skips_the_alignment_where_it_still_ran_through_the_function() -> None:
    int8 = layer(256, 1024, quantization=Quantization(Dtype.INT8_W8A8))
    for version, naive in (("0.13.0", None), ("0.14.0", True), ("0.33.0", True)):
        server, problem = sharded(int8, version=version)
        (found,) = server.launch_classes(problem, "up", [1], 16)
        assert dict(found.constexprs).get("naive_block_assignment") is naive


def test_launch_classes_cover_each_m_once_and_say_what_divides() -> None:
    server, problem = sharded(layer(256, 1024, topk=1), version="0.19.0")
    ms = list(range(1, 300))
    classes = server.launch_classes(problem, "down", ms, 16)
    assert sorted(m for c in classes for m in c.ms) == ms
    assert [c.ms for c in classes if c.num_valid_tokens_is_one] == [(1,)]
    for c in classes:
        assert c.num_valid_tokens_divisible_by_16 == all(m % 16 == 0 for m in c.ms)
        assert c.padded_length_divisible_by in (1, 2, 4, 8, 16)
    # Fewer rows than experts: every row is a block of its own, so 16 divides; then 256 * 15 are added.
    assert all(c.padded_length_divisible_by == 16 for c in classes if max(c.ms) < 256)
    assert len(server.launch_classes(problem, "down", ms, 16)) == len(set(classes))


def test_a_class_claims_only_what_divides_all_its_padded_lengths() -> None:
    server, problem = sharded(layer(60, 1024, topk=3), version="0.19.0")
    for block_size_m in (16, 32, 64):
        classes = [
            c
            for last in range(2, 60)
            for c in server.launch_classes(problem, "up", range(1, last), block_size_m)
        ]
        for found in classes:
            lengths = [padded_length(server.release, problem, "up", m, block_size_m) for m in found.ms]
            common = math.gcd(*lengths)
            assert found.padded_length_divisible_by == max(d for d in (1, 2, 4, 8, 16) if common % d == 0)


def test_the_cuda_kernel_for_grouped_int4_has_no_launch_class() -> None:
    grouped = layer(64, 1024, quantization=Quantization(Dtype.INT4_W4A16, method="gptq", group_size=128))
    for version, ms in (("0.26.0", [49, 100]), ("0.27.0", [1, 48, 49, 100])):
        server, problem = sharded(grouped, version=version)
        found = server.launch_classes(problem, "up", [1, 48, 49, 100], 16)
        assert sorted(m for c in found for m in c.ms) == ms


def test_a_tile_of_grouped_weights_as_long_as_k_is_a_single_step() -> None:
    int4 = Quantization(Dtype.INT4_W4A16, method="gptq", group_size=128)
    server, problem = sharded(layer(64, 256, quantization=int4))
    assert problem.gemm("down").k == 256
    places: tuple[tuple[int, Kernel, bool], ...] = (
        (128, "down", False),
        (256, "down", True),
        (256, "up", False),
    )
    for block_size_k, kernel, single in places:
        launch = server.launch(problem, kernel, KernelConfig(16, 64, block_size_k, 1))
        assert launch.single_step is single
    unknown = replace(problem, K=0)
    assert not server.launch(unknown, "up", KernelConfig(16, 64, 256, 1)).single_step
    server, plain = sharded(layer(64, 256))
    assert not server.launch(plain, "down", KernelConfig(16, 64, 256, 1)).single_step

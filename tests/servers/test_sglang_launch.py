"""SGLang's default configs and launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.sglang import SGLang, open_sglang
from tests.servers.sglang_problems import FP8_BLOCK, RTX4090, layer, shard


def test_the_fp8_default_fits_small_cards_only_from_0_5_14() -> None:
    fp8 = shard(layer(quantization=Quantization(Dtype.FP8_W8A8, "fp8")), gpu=RTX4090)
    assert open_sglang("0.5.13").default_config(fp8, "up", 4096) == KernelConfig(128, 256, 128, 32, 8, 4)
    assert open_sglang("0.5.14").default_config(fp8, "up", 4096) == KernelConfig(64, 128, 256, 64, 4, 2)
    unknown = replace(fp8, gpu=replace(RTX4090, smem_optin_bytes=None))
    assert open_sglang().default_config(unknown, "up", 4096) == KernelConfig(64, 128, 256, 64, 4, 2)


def test_the_default_switches_at_the_number_of_local_experts() -> None:
    server = open_sglang()
    checkpoint = layer(256, 2048, 8, "DeepseekV3ForCausalLM", num_shared_experts=1)
    problem = shard(checkpoint, Parallelism(tp=8))
    assert server.default_switches(problem) == (257,)
    assert server.default_config(problem, "up", 257) == KernelConfig(16, 32, 64, 1)
    assert server.default_config(problem, "up", 258) == KernelConfig(64, 64, 32, 8)
    assert server.default_switches(shard(layer(quantization=FP8_BLOCK))) == ()


def test_the_launch_of_block_fp8_on_hopper() -> None:
    problem = shard(layer(quantization=FP8_BLOCK))
    small, large = KernelConfig(16, 64, 128, 1), KernelConfig(64, 64, 128, 1)
    launch = open_sglang().launch(problem, "up", small)
    assert (launch.a_bits, launch.b_bits, launch.block_k) == (8, 8, 128)
    assert launch.swap_ab
    assert launch.pdl
    assert not open_sglang().launch(problem, "up", large).swap_ab
    assert not open_sglang("0.5.7").launch(problem, "up", small).swap_ab
    assert not open_sglang("0.5.18").launch(problem, "up", small).pdl
    deterministic = replace(problem, flags=("deterministic",))
    assert not open_sglang().launch(deterministic, "up", small).swap_ab
    ada = replace(problem, gpu=RTX4090)
    assert not open_sglang().launch(ada, "up", small).swap_ab
    assert not open_sglang().launch(ada, "up", small).pdl


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (Quantization(), (16, 16)),
        (Quantization(Dtype.INT8_W8A8, "w8a8_int8", per_channel=True), (8, 8)),
        (Quantization(Dtype.INT8_W8A16, "moe_wna16", group_size=128), (16, 8)),
        (Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=128), (16, 4)),
        (Quantization(Dtype.MXFP4, "mxfp4"), (16, 16)),
    ],
)
def test_the_bits_that_a_launch_moves(quantization: Quantization, bits: tuple[int, int]) -> None:
    launch = open_sglang().launch(shard(layer(quantization=quantization)), "up", KernelConfig(16, 64, 64, 1))
    assert (launch.a_bits, launch.b_bits) == bits
    assert launch.pdl == (quantization.group_size is None)
    assert launch.per_channel == quantization.per_channel
    assert launch.block_k == 0


def test_float32_experts_are_moved_as_float32() -> None:
    launch = open_sglang().launch(
        shard(layer(activation_dtype=Dtype.FP32)), "up", KernelConfig(16, 64, 64, 1)
    )
    assert (launch.a_bits, launch.b_bits) == (32, 32)


def test_gdc_early_changes_at_512_input_rows_of_each_kernel() -> None:
    server, problem = open_sglang(), shard(layer())
    early = {
        kernel: {
            m: dict(kind.constexprs)["GDC_EARLY"]
            for kind in server.launch_classes(problem, kernel, [64, 65, 512, 513], 64)
            for m in kind.ms
        }
        for kernel in ("up", "down")
    }
    assert early["up"] == {64: True, 65: True, 512: True, 513: False}
    assert early["down"] == {64: True, 65: False, 512: False, 513: False}


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from(["0.5.2", "0.5.9", "0.5.20", "0.5.23"]),
    st.sampled_from(["up", "down"]),
)
def test_launch_classes_part_the_m(ms: list[int], block_size_m: int, version: str, kernel: str) -> None:
    server: SGLang = open_sglang(version)
    classes = server.launch_classes(shard(layer()), kernel, ms, block_size_m)  # type: ignore[arg-type]
    members_of = [m for kind in classes for m in kind.ms]
    assert sorted(members_of) == sorted(set(ms))
    assert len({replace(kind, ms=()) for kind in classes}) == len(classes)


@pytest.mark.parametrize(("block_size_k", "up", "down"), [(128, False, False), (256, False, True)])
def test_a_tile_of_grouped_weights_as_long_as_k_is_a_single_step(
    block_size_k: int, up: bool, down: bool
) -> None:
    config = KernelConfig(16, 64, block_size_k, 1)
    int4 = Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=128)
    server, problem = open_sglang(), shard(layer(64, 256, quantization=int4))
    assert problem.gemm("down").k == 256
    assert server.launch(problem, "up", config).single_step is up
    assert server.launch(problem, "down", config).single_step is down
    assert not server.launch(replace(problem, K=0), "up", config).single_step  # not known
    plain = shard(layer(64, 256))
    assert not server.launch(plain, "down", config).single_step

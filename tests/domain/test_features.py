"""Features: they count what the GPU must do, stay finite, and know which pipelines exist where."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.features import FEATURES, FloatArray, expected_blocks, features, launch_arrays, work
from moetune.domain.gpu import Gpu, filled
from moetune.domain.launch import Launch
from moetune.domain.problem import KERNELS, Kernel
from moetune.domain.quantization import Dtype, Quantization
from tests.generators import H200, RTX_PRO_6000, problem, random_configs

CONFIG = KernelConfig(64, 128, 64, 1, 4, 3)


def column(matrix: FloatArray, name: str) -> FloatArray:
    return matrix[:, FEATURES.index(name)]


@pytest.mark.parametrize(("m", "block_m"), [(1, 16), (7, 16), (64, 16), (500, 64), (4096, 128)])
def test_expected_blocks_are_what_random_routings_give(m: int, block_m: int) -> None:
    experts, topk, rng = 64, 8, np.random.default_rng(0)
    counted = []
    for _ in range(200 if m < 1000 else 20):
        chosen = rng.random((m, experts)).argpartition(topk, axis=1)[:, :topk]
        counts = np.bincount(chosen.ravel(), minlength=experts)
        counted.append(np.ceil(counts / block_m).sum())
    expected = experts * expected_blocks(m, topk / experts, block_m)
    assert expected == pytest.approx(np.mean(counted), rel=0.03)


@given(st.integers(1, 20_000), st.floats(1e-4, 1.0), st.sampled_from([16, 32, 64, 128, 256]))
def test_blocks_lie_between_the_rows_that_fill_them_and_one_more(m: int, share: float, block_m: int) -> None:
    blocks = expected_blocks(m, share, block_m)
    assert m * share / block_m - 1e-6 <= blocks <= m * share / block_m + 1 + 1e-6


def test_work_counts_each_weight_of_an_active_expert_once() -> None:
    shape, gpu = problem(), filled(H200)
    everything = work(shape, "up", 8192, gpu, 2.0, 2.0)
    assert everything.active_experts == pytest.approx(shape.E)
    assert everything.rows == 8192 * shape.topk
    one = work(shape, "up", 1, gpu, 2.0, 2.0)
    assert one.active_experts == pytest.approx(shape.topk, rel=0.05)
    weights_us = one.active_experts * shape.gemm("up").n * shape.K * 2 / gpu.mem_bw_gbps * 1e-3
    assert one.memory_us == pytest.approx(weights_us, rel=0.01)
    assert one.floor_us > one.memory_us


def test_expert_parallelism_leaves_a_rank_its_share_of_the_rows() -> None:
    shape = problem()
    rank = replace(shape, E=shape.E // 4, ep=4, global_experts=shape.E)
    gpu = filled(H200)
    whole, part = (work(p, "down", 256, gpu, 2.0, 2.0) for p in (shape, rank))
    assert part.rows == pytest.approx(whole.rows / 4)


def test_a_fused_shared_expert_gets_every_token() -> None:
    shape = problem()
    fused = replace(shape, E=shape.E + 1, topk=shape.topk + 1, fused_shared_experts=1)
    gpu = filled(H200)
    assert work(fused, "up", 64, gpu, 2.0, 2.0).rows == pytest.approx(
        work(shape, "up", 64, gpu, 2.0, 2.0).rows + 64
    )


@pytest.mark.parametrize(
    ("gpu", "group_mma", "tcgen05"),
    [
        (H200, 1, 0),
        (RTX_PRO_6000, 0, 0),
        (replace(H200, compute_capability=(10, 0)), 1, 1),
        (replace(H200, compute_capability=(8, 9)), 0, 0),
    ],
    ids=["sm_90", "sm_120", "sm_100", "sm_89"],
)
def test_only_pipelines_that_exist_there_are_used(gpu: Gpu, group_mma: int, tcgen05: int) -> None:
    shape = replace(problem(), gpu=gpu)
    launches = [
        Launch("up", replace(CONFIG, block_size_m=m, num_warps=w)) for m, w in product((16, 64, 128), (4, 8))
    ]
    assert gpu.compute_capability is not None
    arrays = launch_arrays(launches, gpu.compute_capability)
    matrix, _ = features(shape, "up", 1024, arrays, filled(gpu))
    tall = column(matrix, "log_block_m") >= 6
    assert (column(matrix, "group_mma")[tall] == group_mma).all()
    assert (column(matrix, "tcgen05")[tall] == tcgen05).all()
    assert not column(matrix, "group_mma")[~tall].any()


@pytest.mark.parametrize("m", [1, 2, 17, 512, 65_536])
@pytest.mark.parametrize("kernel", KERNELS)
def test_features_are_finite_for_every_m(m: int, kernel: Kernel) -> None:
    launches = [Launch(kernel, config) for config in random_configs(200, seed=m)]
    arrays = launch_arrays(launches, (9, 0))
    matrix, done = features(problem(), kernel, m, arrays, filled(H200))
    assert matrix.shape == (200, len(FEATURES))
    assert np.isfinite(matrix).all()
    assert done.floor_us > 0


def test_a_gpu_twice_as_fast_in_everything_gives_the_same_ratios() -> None:
    """Dimensionless: only the terms with the fixed latency and overhead may move."""
    gpu = filled(H200)
    twice = replace(gpu, mem_bw_gbps=2 * gpu.mem_bw_gbps, bf16_dense_tflops=2 * gpu.bf16_dense_tflops)
    arrays = launch_arrays([Launch("up", config) for config in random_configs(50, seed=1)], (9, 0))
    one, _ = features(problem(), "up", 4096, arrays, gpu)
    two, _ = features(problem(), "up", 4096, arrays, twice)
    fixed = {"floor_over_overhead", "bytes_in_flight", "latency_over_floor", "bandwidth_per_sm"}
    fixed |= {"padded_compute_over_floor", "l2_traffic_over_floor"}
    for name in set(FEATURES) - fixed:
        np.testing.assert_allclose(column(one, name), column(two, name), err_msg=name)


def test_what_a_format_costs_beside_the_tensor_cores_is_told() -> None:
    def one(launch: Launch, quantization: Quantization | None = None) -> dict[str, float]:
        shape = replace(problem(), quantization=quantization or Quantization())
        matrix, _ = features(shape, "up", 64, launch_arrays([launch], (9, 0)), filled(H200))
        return dict(zip(FEATURES, matrix[0].tolist(), strict=True))

    plain = one(Launch("up", CONFIG))
    assert plain["conversion_over_floor"] == plain["scaling_over_floor"] == -6
    assert not any(plain[name] for name in ("converted", "grouped", "zero_point", "integers", "pdl"))
    int4 = Quantization(Dtype.INT4_W4A16, group_size=128, zero_point=True)
    converted = one(Launch("up", CONFIG, b_bits=4, grouped=True), int4)
    assert converted["conversion_over_floor"] > -4
    assert converted["converted"] == converted["grouped"] == converted["zero_point"] == 1
    blocks = one(Launch("up", CONFIG, a_bits=8, b_bits=8, block_k=128, pdl=True))
    assert blocks["scaling_over_floor"] > -5.5
    assert blocks["conversion_over_floor"] == -6
    assert blocks["pdl"] == 1
    assert one(Launch("up", CONFIG, a_bits=8, b_bits=8, integers=True))["integers"] == 1


def test_scales_by_group_cost_a_load_for_each_weight_and_no_second_sum() -> None:
    def one(group_size: int, *, zero_point: bool = False, block_k: int = 64) -> dict[str, float]:
        int4 = Quantization(Dtype.INT4_W4A16, group_size=group_size, zero_point=zero_point)
        config = KernelConfig(64, 128, block_k, 1, 4, 3)
        launch = Launch("up", config, b_bits=4, grouped=True, block_k=group_size)
        shape = replace(problem(), quantization=int4)
        matrix, _ = features(shape, "up", 64, launch_arrays([launch], (9, 0)), filled(H200))
        return dict(zip(FEATURES, matrix[0].tolist(), strict=True))

    assert [one(group)["block_k_over_scale_group"] for group in (32, 64, 128)] == [1, 0, -1]
    assert one(128, block_k=256)["block_k_over_scale_group"] == 1
    plain, zeros = one(128), one(128, zero_point=True)
    # As many loads again: twice the time, but for what keeps the logarithm finite.
    more = zeros["scaling_over_floor"] - plain["scaling_over_floor"]
    assert 0.7 < more <= 1
    matrix, _ = features(problem(), "up", 64, launch_arrays([Launch("up", CONFIG)], (9, 0)), filled(H200))
    assert plain["accumulators"] == column(matrix, "accumulators")[0]
    blocks = Launch("up", CONFIG, a_bits=8, b_bits=8, block_k=128)
    matrix, _ = features(problem(), "up", 64, launch_arrays([blocks], (9, 0)), filled(H200))
    assert column(matrix, "accumulators")[0] == plain["accumulators"] + 1
    assert column(matrix, "block_k_over_scale_group")[0] == -1

"""E, N and topk of an expert layer as SGLang cuts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import ServerError, ShardingError
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ServerOptions
from moetune.servers.sglang.fusion import RULES
from tests.servers.sglang_problems import FP8_BLOCK, MI300, layer, shard


@pytest.mark.parametrize(
    ("experts", "intermediate", "tp", "ep", "expected"),
    [
        (288, 2048, 8, 1, (288, 256)),
        (288, 2048, 8, 8, (36, 2048)),
        (128, 768, 4, 4, (32, 768)),
        (128, 768, 8, 2, (64, 192)),
    ],
)
def test_case_9_tensor_and_expert_parallelism(
    experts: int, intermediate: int, tp: int, ep: int, expected: tuple[int, int]
) -> None:
    problem = shard(layer(experts, intermediate), Parallelism(tp=tp, ep=ep))
    assert expected == (problem.E, problem.N)
    assert problem.global_experts == experts


def test_redundant_experts_are_held_and_dp_changes_nothing() -> None:
    problem = shard(layer(256, 2048), Parallelism(tp=8, ep=8, dp=8, redundant_experts=32))
    assert (problem.E, problem.N, problem.global_experts, problem.ep) == (36, 2048, 288, 8)


@pytest.mark.parametrize("backend", ["deepep", "mooncake", "flashinfer"])
def test_an_all_to_all_backend_spreads_the_experts_over_all_ranks(backend: str) -> None:
    problem = shard(layer(256, 2048), Parallelism(tp=8), options=ServerOptions(moe_a2a_backend=backend))
    assert (problem.E, problem.N) == (32, 2048)


@pytest.mark.parametrize(
    ("architecture", "experts", "topk", "expected"),
    [
        ("Glm4MoeLiteForCausalLM", 64, 4, (65, 5)),
        ("DeepseekV3ForCausalLM", 256, 8, (257, 9)),
        ("GlmMoeDsaForCausalLM", 256, 8, (257, 9)),
        ("Glm4MoeForCausalLM", 160, 8, (161, 9)),
        ("MiniMaxM3SparseForCausalLM", 128, 4, (129, 5)),
        ("DeepseekV32ForCausalLM", 256, 8, (256, 8)),
        ("DeepseekV3ForCausalLM", 384, 8, (384, 8)),
        ("MistralLarge3ForCausalLM", 128, 4, (128, 4)),
        ("Qwen3_5MoeForConditionalGeneration", 256, 8, (256, 8)),
        ("NoSuchModel", 256, 8, (256, 8)),
    ],
)
def test_case_10_fused_shared_experts(
    architecture: str, experts: int, topk: int, expected: tuple[int, int]
) -> None:
    checkpoint = layer(experts, 2048, topk, architecture, num_shared_experts=1)
    problem = shard(checkpoint, Parallelism(tp=8))
    assert (problem.E, problem.topk) == expected
    assert problem.fused_shared_experts == expected[0] - experts
    off = shard(checkpoint, Parallelism(tp=8), options=ServerOptions(disable_shared_experts_fusion=True))
    assert (off.E, off.topk, off.fused_shared_experts) == (experts, topk, 0)
    assert shard(checkpoint, Parallelism(tp=8, ep=2)).fused_shared_experts == 0


def test_qwen3_next_fuses_by_its_shared_experts_size_and_also_under_expert_parallelism() -> None:
    checkpoint = layer(512, 512, 10, "Qwen3NextForCausalLM", shared_intermediate_size=512)
    assert shard(checkpoint).E == 513
    assert shard(checkpoint, Parallelism(tp=4, ep=4)).E == 129
    assert shard(checkpoint, version="0.5.13").E == 512
    assert shard(replace(checkpoint, shared_intermediate_size=1024)).E == 512
    assert shard(checkpoint, gpu=MI300).E == 512


def test_every_fusion_rule_names_its_source() -> None:
    for rule in RULES:
        assert "sglang/srt/models/" in rule.source
        assert rule.until is None or rule.since < rule.until


def test_case_16_experts_without_gate_behind_a_latent_projection() -> None:
    problem = shard(
        layer(512, 2688, 22, "NemotronHForCausalLM", gated=False, latent_size=1024), Parallelism(tp=2)
    )
    assert problem.K == 1024
    assert (problem.gemm("up").n, problem.gemm("up").k) == (1344, 1024)


def test_case_25_an_intermediate_size_that_does_not_divide_lists_what_does() -> None:
    with pytest.raises(ShardingError) as refused:
        shard(layer(60, 1408), Parallelism(tp=3))
    assert "1408" in refused.value.message
    assert "1, 2, 4, 8, 11, 16" in refused.value.message
    assert refused.value.hint is not None
    assert "--tp" in refused.value.hint


def test_case_25_block_scales_must_divide_the_slice() -> None:
    checkpoint = layer(128, 768, quantization=FP8_BLOCK)
    with pytest.raises(ShardingError, match="quantization block 128") as refused:
        shard(checkpoint, Parallelism(tp=8))
    assert "1, 2, 3, 6" in refused.value.message
    assert shard(checkpoint, Parallelism(tp=8, ep=4)).N == 384


@pytest.mark.parametrize(
    ("parallelism", "word"),
    [
        (Parallelism(tp=4, ep=3), "divide"),
        (Parallelism(tp=3, ep=3), "evenly"),
        (Parallelism(tp=0), "tp is 0"),
        (Parallelism(ep=-1), "ep is -1"),
        (Parallelism(redundant_experts=-1), "redundant"),
    ],
)
def test_a_parallelism_that_the_server_could_not_start_with(parallelism: Parallelism, word: str) -> None:
    with pytest.raises(ShardingError, match=word):
        shard(layer(128, 768), parallelism)


@given(
    st.integers(1, 64),
    st.integers(1, 4096),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([None, FP8_BLOCK, Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=32)]),
)
def test_what_is_sharded_adds_up_again_and_what_is_refused_names_sizes_that_fit(
    groups: int, intermediate: int, tp: int, ep: int, quantization: Quantization | None
) -> None:
    checkpoint = layer(groups * 16, intermediate, quantization=quantization or Quantization())
    try:
        problem = shard(checkpoint, Parallelism(tp=tp, ep=ep))
    except ShardingError as refused:
        hint = refused.hint or ""
        if "--tp" in hint:
            offered = [int(word.strip(",")) for word in hint.split("one of:")[1].split()]
            assert offered
            for size in offered:
                assert shard(checkpoint, Parallelism(tp=size, ep=ep)).N
    else:
        assert problem.E * ep == groups * 16
        assert problem.N * (tp // ep) == intermediate


SUMS = ServerOptions(fused_moe_sum=True)


@pytest.mark.parametrize(
    ("topk", "quantization", "expected"),
    [
        (8, Quantization(), True),
        (3, FP8_BLOCK, True),
        (2, Quantization(), False),
        (8, Quantization(Dtype.INT8_W8A8, "w8a8_int8", per_channel=True), True),
        (8, Quantization(Dtype.INT8_W8A16, "moe_wna16", group_size=128), False),
        (8, Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=128), False),
    ],
)
def test_the_flag_that_sums_over_topk_is_part_of_the_problem_where_it_changes_the_kernel(
    topk: int, quantization: Quantization, expected: bool
) -> None:
    checkpoint = layer(topk=topk, quantization=quantization)
    assert ("fused_sum" in shard(checkpoint, options=SUMS).flags) is expected
    assert "fused_sum" not in shard(checkpoint).flags


def test_a_fused_shared_expert_counts_among_those_that_are_summed() -> None:
    checkpoint = layer(256, 2048, 2, "DeepseekV3ForCausalLM", num_shared_experts=1)
    assert "fused_sum" in shard(checkpoint, options=SUMS).flags
    unfused = replace(SUMS, disable_shared_experts_fusion=True)
    assert "fused_sum" not in shard(checkpoint, options=unfused).flags


def test_a_sum_that_a_release_lacks_or_gets_wrong_is_refused() -> None:
    with pytest.raises(ServerError, match=r"SGLang 0\.5\.9 has no --enable-fused-moe-sum-all-reduce"):
        shard(layer(), options=SUMS, version="0.5.9")
    assert shard(layer(), options=SUMS, version="0.5.10").flags == ("fused_sum",)
    parallel = Parallelism(tp=4, ep=4)
    with pytest.raises(ServerError, match="outside the output"):
        shard(layer(), parallel, options=SUMS, version="0.5.22")
    # What is not summed is not wrong either.
    assert shard(layer(topk=2), parallel, options=SUMS, version="0.5.22").flags == ()
    assert shard(layer(), parallel, options=SUMS, version="0.5.23").flags == ("fused_sum",)

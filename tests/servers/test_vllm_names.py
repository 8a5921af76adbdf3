"""File names of vLLM: cases 9 to 24, 37 and 39."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.errors import ServerError
from moetune.domain.gpu import Gpu
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.vllm import VLLM, open_vllm
from tests.servers.vllm_problems import (
    FP8_BLOCK,
    H200,
    NO_OPTIONS,
    RELEASES,
    layer,
    sharded,
)


def test_case_9_expert_parallelism_is_tp_times_dp() -> None:
    assert names(sharded(layer(288, 2048), tp=8)) == (288, 256)
    assert names(sharded(layer(288, 2048), tp=8, ep=8)) == (36, 2048)
    assert names(sharded(layer(128, 768), tp=4, ep=4)) == (32, 768)
    # SGLang's --ep-size 2 has no equivalent: expert parallelism spreads over all ranks.
    assert names(sharded(layer(128, 768), tp=8, ep=2)) == (16, 768)
    assert names(sharded(layer(128, 768), tp=2, ep=2, dp=4)) == (16, 768)


def names(found: tuple[VLLM, Problem]) -> tuple[int, int]:
    server, problem = found
    assert server.file_name(problem, "up").startswith(f"E={problem.E},N={problem.file_n},")
    return problem.E, problem.file_n


def test_data_parallelism_without_expert_parallelism_splits_the_columns() -> None:
    assert names(sharded(layer(128, 768), tp=2, dp=4)) == (128, 96)


def test_expert_parallelism_on_one_rank_is_none() -> None:
    _, problem = sharded(layer(128, 768), ep=8)
    assert (problem.ep, problem.E) == (1, 128)


def test_case_10_shared_experts_are_never_fused() -> None:
    shared = layer(256, 2048, num_shared_experts=1, shared_intermediate_size=2048)
    _, problem = sharded(shared, tp=8)
    assert (problem.E, problem.topk, problem.fused_shared_experts) == (256, 8, 0)


def test_case_11_gemma() -> None:
    server, problem = sharded(layer(128, 704, hidden=2816), tp=2, gpu=Gpu("NVIDIA H100 80GB HBM3"))
    assert problem.topk == 8
    assert server.file_name(problem, "up") == "E=128,N=352,device_name=NVIDIA_H100_80GB_HBM3.json"


def test_case_12_kimi_k3() -> None:
    _, problem = sharded(layer(896, 3072, topk=16, hidden=7168), tp=8, ep=8)
    assert (problem.E, problem.N, problem.K, problem.global_experts) == (112, 3072, 7168, 896)


@pytest.mark.parametrize("version", ["0.13.0", "0.33.0"])
def test_case_16_latent_and_ungated_experts(version: str) -> None:
    nemotron = layer(512, 2688, topk=22, latent_size=1024, gated=False)
    server, problem = sharded(nemotron, version=version, tp=4)
    # The weights decide at run time: 1024 latent columns, although vLLM's tuner reads hidden_size.
    assert (problem.K, problem.N) == (1024, 672)
    assert problem.gemm("up").n == 672
    assert server.file_name(problem, "up") == "E=512,N=672,device_name=NVIDIA_H200.json"


def test_case_17_int4_name_has_the_unpacked_size() -> None:
    server, problem = sharded(layer(64, 512, quantization=Quantization(Dtype.INT4_W4A16, group_size=128)))
    assert (problem.N, problem.file_n) == (512, 512)
    assert server.file_name(problem, "up") == "E=64,N=512,device_name=NVIDIA_H200,dtype=int4_w4a16.json"


def test_case_18_per_channel_leaves_no_trace() -> None:
    channel = Quantization(Dtype.FP8_W8A8, method="compressed-tensors", per_channel=True)
    server, problem = sharded(layer(64, 1024, quantization=channel))
    assert server.file_name(problem, "up") == "E=64,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"


@pytest.mark.parametrize("group", [None, 0, -1])
def test_case_19_no_group_size_is_no_crash(group: int | None) -> None:
    server, problem = sharded(layer(64, 1024, quantization=Quantization(Dtype.INT4_W4A16, group_size=group)))
    assert "block_shape" not in server.file_name(problem, "up")
    assert server.default_config(problem, "up", 1).block_size_n > 0


def test_case_20_no_block_size_is_no_block_shape() -> None:
    server, problem = sharded(layer(64, 1024, quantization=Quantization(Dtype.FP8_W8A8)))
    assert server.file_name(problem, "up") == "E=64,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
    zero = replace(problem, quantization=Quantization(Dtype.FP8_W8A8, block_shape=(0, 128)))
    assert "block_shape" not in server.file_name(zero, "up")


def test_case_21_block_shape_has_no_space() -> None:
    server, problem = sharded(layer(256, 2048, quantization=FP8_BLOCK), tp=8)
    name = "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert server.file_name(problem, "up") == server.file_path(problem, "down") == name


@pytest.mark.parametrize(
    ("version", "nvl"), [("0.11.0", "NVIDIA_H200_NVL"), ("0.11.1", "NVIDIA_H200"), ("0.33.0", "NVIDIA_H200")]
)
def test_case_22_h200_nvl(version: str, nvl: str) -> None:
    server = open_vllm(version)
    assert server.device_name(Gpu("NVIDIA H200 NVL")) == nvl
    assert server.device_name(Gpu("NVIDIA GH200 480GB")) == "NVIDIA_GH200_480GB"


def test_a_mig_slice_has_the_name_of_the_whole_gpu() -> None:
    piece = Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", mig_slice="1g.10gb")
    server, problem = sharded(layer(64, 1024), gpu=piece)
    assert server.device_name(piece) == "NVIDIA_H100_80GB_HBM3"
    assert server.file_name(problem, "up") == "E=64,N=1024,device_name=NVIDIA_H100_80GB_HBM3.json"


def test_case_23_editions_of_one_silicon_are_three_names() -> None:
    editions = ("Workstation Edition", "Server Edition", "Max-Q Workstation Edition")
    found = {open_vllm().device_name(Gpu(f"NVIDIA RTX PRO 6000 Blackwell {edition}")) for edition in editions}
    assert len(found) == 3
    assert "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition" in found


def test_case_24_two_models_share_one_name() -> None:
    server, first = sharded(layer(256, 2048, hidden=6144), tp=8)
    _, second = sharded(layer(256, 2048, hidden=7168), tp=8)
    assert first != second
    assert server.file_name(first, "up") == server.file_name(second, "up")


@pytest.mark.parametrize("name", ["Orin (nvgpu)", "Intel(R) Arc(TM) Pro B60 Graphics", "AMD Instinct MI300X"])
@pytest.mark.parametrize("version", RELEASES)
def test_case_39_a_device_name_with_parentheses_round_trips(version: str, name: str) -> None:
    server, problem = sharded(layer(64, 1024), version=version, gpu=Gpu(name))
    spelled = server.file_name(problem, "up")
    assert f"device_name={name.replace(' ', '_')}." in spelled
    assert server.never_read(spelled) is None


@pytest.mark.parametrize(
    "name", ["a/../../etc/passwd", "..\\up", "a\x1b[2Jb", "", "x" * 200, "a,dtype=b", "a\nb"]
)
@pytest.mark.parametrize("version", ["0.10.2", "0.25.0"])
def test_a_hostile_device_name_never_becomes_a_path(version: str, name: str) -> None:
    server, problem = sharded(layer(64, 1024), version=version, gpu=Gpu(name))
    with pytest.raises(ServerError, match="cannot stand in a file name") as refused:
        server.file_name(problem, "up")
    assert "\x1b" not in refused.value.message


@settings(deadline=None)
@given(st.text(max_size=60), st.sampled_from(RELEASES))
def test_a_file_name_is_one_path_component_or_an_error(name: str, version: str) -> None:
    server, problem = sharded(layer(64, 1024), version=version, gpu=Gpu(name))
    try:
        found = server.file_name(problem, "up")
    except ServerError:
        return
    assert not {"/", "\\", "\x00"} & set(found)
    assert found.isprintable()
    assert server.never_read(found) is None


@settings(deadline=None)
@given(
    st.integers(1, 2048),
    st.integers(1, 8192),
    st.sampled_from(
        [Dtype.BF16, Dtype.FP32, Dtype.FP8_W8A8, Dtype.INT8_W8A8, Dtype.INT8_W8A16, Dtype.INT4_W4A16]
    ),
    st.none() | st.tuples(st.integers(0, 256), st.integers(0, 256)),
    st.sampled_from(RELEASES),
)
def test_what_we_name_can_be_found(
    E: int, N: int, dtype: Dtype, block: tuple[int, int] | None, version: str
) -> None:
    server, problem = sharded(layer(64, 1024), version=version)
    problem = replace(problem, E=E, file_n=N, quantization=Quantization(dtype, block_shape=block))
    assert server.never_read(server.file_name(problem, "up")) is None


@pytest.mark.parametrize(
    ("dtype", "since"),
    [(Dtype.NVFP4, None), (Dtype.GGUF, None), (Dtype.FP8_W8A16, "0.14.0"), (Dtype.MXFP8, "0.24.0")],
)
def test_a_dtype_that_never_reaches_the_kernel_is_an_error(dtype: Dtype, since: str | None) -> None:
    checkpoint = layer(64, 1024, quantization=Quantization(dtype))
    for version in ("0.13.0", "0.33.0"):
        server = open_vllm(version)
        if since is not None and server.release >= open_vllm(since).release:
            server.problem(checkpoint, Parallelism(), H200, NO_OPTIONS)
            continue
        with pytest.raises(ServerError, match=f"{dtype.value} experts") as refused:
            server.problem(checkpoint, Parallelism(), H200, NO_OPTIONS)
        assert "moetune plan" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("version", "tail"),
    [
        ("0.11.0", "N=512,device_name=NVIDIA_H200,dtype=mxfp4_w4a4"),
        ("0.12.0", "N=512,device_name=NVIDIA_H200"),
        ("0.33.0", "N=1024,device_name=NVIDIA_H200"),
    ],
)
def test_emulated_mxfp4_names_follow_the_release(version: str, tail: str) -> None:
    server, problem = sharded(layer(64, 1024, quantization=Quantization(Dtype.MXFP4)), version=version)
    assert server.file_name(problem, "up") == f"E=64,{tail}.json"
    assert server.launch(problem, "up", KernelConfig(16, 64, 64, 1)).b_bits == 16


NEVER = [
    ("E=8,N=64,device_name=X,dtype=int8_w8a8.json", "never writes dtype=int8_w8a8"),
    ("E=8,N=64,device_name=X,dtype=bf16.json", "never writes dtype=bf16"),
    ("E=8,N=64,device_name=X,dtype=float8.json", "never writes dtype=float8"),
    ("E=8,N=64,device_name=X,dtype=fp8_w8a8,block_shape=[128, 128].json", "without a space"),
    ("E=8,N=64,device_name=X,dtype=fp8_w8a8,block_shape=[0,128].json", "two whole numbers"),
    ("E=8,N=64,device_name=X,dtype=fp8_w8a8,per_channel_quant=True.json", "per_channel_quant"),
    ("E=8,N=64,device_name=X_down.json", None),
    ("E=8,N=64,device_name=X,dtype=fp8_w8a8,block_shape=[128,128]_down.json", "never a _down file"),
    ("E=8,N=64,device_name=NVIDIA H200.json", "spells that device NVIDIA_H200"),
    ("E=8,N=64,device_name=NVIDIA_H200_NVL.json", "spells that device NVIDIA_H200"),
    ("E=8,N=064,device_name=X.json", "leading zeros"),
    ("E=8,N=64,device_name=X,dtype=int4_w4a16,backend=flydsl.json", "FlyDSL"),
    ("N=576,K=7168,device_name=NVIDIA_H800.json", "have the form"),
    ("config.json", "have the form"),
    ("E=8,N=64,device_name=\x1b[31mX.json", "no device"),
    ("E=8,N=64,device_name=X,dtype=fp8_w8a8.json", None),
    ("E=8,N=64,device_name=X,dtype=float32.json", None),
]


@pytest.mark.parametrize(("name", "reason"), NEVER)
def test_case_37_names_that_are_never_read_say_why(name: str, reason: str | None) -> None:
    found = open_vllm().never_read(name)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found
        assert found.isprintable()


def test_case_37_what_is_never_read_depends_on_the_release() -> None:
    assert open_vllm("0.11.0").never_read("E=8,N=64,device_name=NVIDIA_H200_NVL.json") is None
    assert open_vllm("0.11.0").never_read("E=8,N=64,device_name=X,dtype=mxfp4_w4a4.json") is None
    assert open_vllm("0.12.0").never_read("E=8,N=64,device_name=X,dtype=mxfp4_w4a4.json") is not None
    assert open_vllm("0.13.0").never_read("E=8,N=64,device_name=X,dtype=fp8_w8a16.json") is not None
    assert open_vllm("0.14.0").never_read("E=8,N=64,device_name=X,dtype=fp8_w8a16.json") is None

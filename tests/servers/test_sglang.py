"""What a user relies on of the SGLang module: names, sharding, lookup, files, launches, by release."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError, ServerError, ShardingError
from moetune.domain.gpu import Gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, Outcome, Server, ServerOptions
from moetune.servers.sglang import SGLang, open_sglang
from moetune.servers.sglang.fusion import RULES
from moetune.servers.sglang.names import TAGS, FileName, parse_file_name
from tests.wheels import members, read_member

H200 = Gpu("NVIDIA H200", compute_capability=(9, 0), smem_optin_bytes=232_448)
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", compute_capability=(8, 9), smem_optin_bytes=101_376)
MI300 = Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942")
FP8_BLOCK = Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128))
ENTRY = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
DEFAULTS = ServerOptions()


def layer(
    experts: int = 128,
    intermediate: int = 768,
    topk: int = 8,
    architecture: str = "Qwen3MoeForCausalLM",
    **changes: object,
) -> ExpertLayer:
    made = ExpertLayer("test", architecture, experts, topk, 2048, intermediate)
    return replace(made, **changes)  # type: ignore[arg-type]


def shard(
    of: ExpertLayer,
    parallelism: Parallelism = Parallelism(),  # noqa: B008
    gpu: Gpu = H200,
    options: ServerOptions = DEFAULTS,
    version: str | None = None,
) -> Problem:
    return open_sglang(version).problem(of, parallelism, gpu, options)


def tree(root: str = "/root", /, **directories: tuple[str, ...]) -> ConfigTree:
    return ConfigTree(root, {name: frozenset(files) for name, files in directories.items()})


# --- releases ---------------------------------------------------------------------------------


def test_it_is_a_server_and_the_newest_known_release_is_the_default() -> None:
    server = open_sglang()
    assert isinstance(server, Server)
    assert (server.name, server.version, server.triton_version) == ("sglang", "0.5.23", "3.8.0")
    assert not server.assumed


@pytest.mark.parametrize(
    ("version", "triton"),
    [
        ("0.4.9", "3.3.1"),
        ("0.5.2", "3.4.0"),
        ("0.5.5", "3.4.0"),
        ("0.5.6", "3.5.1"),
        ("0.5.10.post1", "3.5.1"),
        ("v0.5.12", "3.6.0"),
        ("0.5.18", "3.7.1"),
        ("0.5.21", "3.7.1"),
        ("0.5.22", "3.8.0"),
    ],
)
def test_each_release_comes_with_the_triton_that_its_torch_pins(version: str, triton: str) -> None:
    assert open_sglang(version).triton_version == triton


def test_a_newer_release_runs_by_the_newest_known_rules_and_says_so() -> None:
    server = open_sglang("0.6.1")
    assert server.assumed
    assert server.version == "0.6.1"
    assert not open_sglang("0.5.23.post1").assumed
    newest = open_sglang()
    problem = shard(layer())
    assert server.launch_classes(problem, "up", [1, 600], 16) == newest.launch_classes(
        problem, "up", [1, 600], 16
    )


@pytest.mark.parametrize("version", ["0.4.8", "0.3", "zero", "", "0.5.2/../x", "1" * 99])
def test_an_old_or_senseless_version_is_an_error_with_what_to_give_instead(version: str) -> None:
    with pytest.raises(ServerError) as refused:
        open_sglang(version)
    assert refused.value.hint


@pytest.mark.parametrize("triton", ["../3.6.0", "3.6.0/x", "x"])
def test_a_triton_version_cannot_leave_the_directory(triton: str) -> None:
    with pytest.raises(ServerError):
        open_sglang(None, triton)


def test_where_each_release_keeps_its_files_and_whether_a_variable_moves_them() -> None:
    assert open_sglang("0.5.2").directory_variable is None
    assert open_sglang("0.5.3").directory_variable == "SGLANG_MOE_CONFIG_DIR"
    assert open_sglang("0.5.10").home.endswith("moe/fused_moe_triton")
    assert open_sglang("0.5.11").home.endswith("moe/moe_runner/triton_utils")
    assert not open_sglang("0.5.4").separate_down_file
    assert open_sglang("0.5.5").separate_down_file


# --- E, N and topk ----------------------------------------------------------------------------


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


# --- file names -------------------------------------------------------------------------------


def test_case_17_int4_name_holds_the_packed_size() -> None:
    int4 = Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=128)
    problem = shard(layer(512, 512, quantization=int4))
    assert (problem.N, problem.file_n) == (512, 256)
    assert (
        open_sglang().file_name(problem, "up") == "E=512,N=256,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
    )


def test_case_18_channel_scales_stand_in_the_name() -> None:
    channel = Quantization(Dtype.FP8_W8A8, "compressed-tensors", per_channel=True)
    problem = shard(layer(quantization=channel))
    name = "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8{}.json"
    assert open_sglang().file_name(problem, "up") == name.format(",per_channel_quant=True")
    assert open_sglang("0.5.5").file_name(problem, "up") == name.format("")
    down = open_sglang().file_name(problem, "down")
    assert down == name.format(",per_channel_quant=True_down")


@pytest.mark.parametrize("block", [None, (0, 128), (0, 0)])
def test_cases_19_and_20_no_block_no_part(block: tuple[int, int] | None) -> None:
    problem = shard(layer(quantization=Quantization(Dtype.FP8_W8A8, "modelopt", block_shape=block)))
    assert "block_shape" not in open_sglang().file_name(problem, "up")


def test_case_21_a_space_follows_the_comma_of_block_shape() -> None:
    name = open_sglang().file_name(shard(layer(quantization=FP8_BLOCK)), "up")
    assert name == "E=128,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"


def test_cases_22_and_23_devices_keep_their_whole_names() -> None:
    names = [
        "NVIDIA H200 NVL",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H20",
        "NVIDIA H20-3e",
    ]
    assert [open_sglang().device_name(Gpu(name)) for name in names] == [
        name.replace(" ", "_") for name in names
    ]


def test_case_24_two_models_can_share_a_name_and_differ_as_problems() -> None:
    one, other = shard(layer(256, 256)), shard(layer(256, 256, hidden_size=7168))
    assert open_sglang().file_path(one, "up") == open_sglang().file_path(other, "up")
    assert one != other


def test_float32_has_a_tag_and_half_precision_has_none() -> None:
    server = open_sglang()
    for activation, tag in ((Dtype.BF16, ""), (Dtype.FP16, ""), (Dtype.FP32, ",dtype=float32")):
        name = server.file_name(shard(layer(activation_dtype=activation)), "up")
        assert name == f"E=128,N=768,device_name=NVIDIA_H200{tag}.json"
    upcast = shard(layer(quantization=Quantization(Dtype.MXFP4, "mxfp4")))
    assert "dtype" not in server.file_name(upcast, "up")


@pytest.mark.parametrize("dtype", [Dtype.NVFP4, Dtype.MXFP8, Dtype.INT4_W4AFP8, Dtype.GGUF, Dtype.FP8_W8A16])
def test_weights_that_never_reach_this_kernel_have_no_name(dtype: Dtype) -> None:
    with pytest.raises(ServerError, match=dtype.value):
        shard(layer(quantization=Quantization(dtype, "x")))


def test_before_0_5_5_the_down_kernel_reads_the_up_file() -> None:
    server = open_sglang("0.5.4")
    problem = shard(layer(), version="0.5.4")
    assert server.file_name(problem, "down") == server.file_name(problem, "up")


def test_the_path_names_the_running_triton() -> None:
    path = open_sglang(None, "3.10.1").file_path(shard(layer()), "down")
    assert path == "configs/triton_3_10_1/E=128,N=768,device_name=NVIDIA_H200_down.json"


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "..", "x..y", "a\nb", "a\x1b[0m", "a,b", "x" * 200])
def test_a_device_name_that_would_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ServerError):
        open_sglang().device_name(Gpu(name))


@pytest.mark.parametrize("device", ["Orin_(nvgpu)", "Intel(R)_Arc(TM)_Pro_B60_Graphics"])
def test_case_39_device_names_with_parentheses_round_trip(device: str) -> None:
    name = FileName(64, 896, device, "fp8_w8a8", (128, 128), down=True)
    assert parse_file_name(str(name)) == name
    gpu = Gpu(device.replace("_", " "))
    assert f"device_name={device}" in open_sglang().file_name(shard(layer(), gpu=gpu), "up")


@given(
    st.integers(1, 999_999),
    st.integers(1, 9_999_999),
    st.from_regex(r"[A-Za-z0-9()._+-]{1,60}", fullmatch=True).filter(
        lambda text: ".." not in text and not text.endswith("_down")
    ),
    st.sampled_from(["", *sorted(TAGS)]),
    st.none() | st.tuples(st.integers(1, 1024), st.integers(1, 1024)),
    st.booleans(),
    st.booleans(),
)
def test_every_name_that_is_built_is_read_back(
    E: int,
    N: int,
    device: str,
    dtype: str,
    block: tuple[int, int] | None,
    channel: bool,
    down: bool,
) -> None:
    name = FileName(E, N, device, dtype, block, channel, down)
    assert parse_file_name(str(name)) == name


@given(st.text(max_size=200))
def test_any_text_is_a_name_of_the_grammar_or_none(text: str) -> None:
    name = parse_file_name(text)
    assert name is None or str(name) == text


@pytest.mark.parametrize(
    "name",
    [
        "E=1,N=2,device_name=a/../b.json",
        "E=1,N=2,device_name=..,dtype=x.json",
        "E=1,N=2,device_name=A,block_shape=[128,128].json",
        "E=1,N=2,device_name=A.json.bak",
        "E=1,N=2,device_name=A\n.json",
        "N=576,K=7168,device_name=NVIDIA_H800.json",
        "E=١,N=2,device_name=A.json",
    ],
)
def test_names_of_another_grammar_are_none(name: str) -> None:
    assert parse_file_name(name) is None


def test_the_names_and_files_that_the_newest_release_ships_are_read() -> None:
    server = open_sglang()
    prefix = f"{server.home}/configs/"
    shipped = [name for name in members("sglang", "0.5.23") if name.startswith(prefix) and "/E=" in name]
    assert len(shipped) == 390
    for path in shipped:
        parsed = parse_file_name(path.rsplit("/", 1)[1])
        assert parsed is not None
        assert str(parsed) == path.rsplit("/", 1)[1]
        table = server.read_table(read_member("sglang", "0.5.23", path), path)
        assert table.entries


def test_moe_padding_leaves_the_name_on_rocm_and_stops_the_server_elsewhere() -> None:
    fp8 = layer(quantization=Quantization(Dtype.FP8_W8A8, "fp8"))
    padded = ServerOptions(environment={"SGLANG_MOE_PADDING": "1"})
    assert shard(fp8, gpu=MI300, options=padded).file_n == 768
    with pytest.raises(ServerError, match="Hidden size mismatch"):
        shard(fp8, options=padded)
    assert shard(layer(quantization=FP8_BLOCK), options=padded).file_n == 768
    assert shard(layer(), options=padded).file_n == 768
    with pytest.raises(ServerError, match="ValueError"):
        shard(fp8, options=ServerOptions(environment={"SGLANG_MOE_PADDING": "yes"}))


# --- lookup -----------------------------------------------------------------------------------

NAME = "E=128,N=768,device_name=NVIDIA_H200.json"
DOWN = "E=128,N=768,device_name=NVIDIA_H200_down.json"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.2", "3_3_1"),
        ("0.5.4", "3_3_1"),
        ("0.5.11", "3_3_1"),
        ("0.5.12", "3_5_1"),
        ("0.5.23", "3_5_1"),
    ],
)
def test_case_36_which_directory_3_6_0_falls_back_to(version: str, expected: str) -> None:
    server = open_sglang(version, "3.6.0")
    seen = tree(**{f"triton_{v}": (NAME,) for v in ("3_1_0", "3_3_1", "3_5_1")})
    lookup = server.lookup(shard(layer()), "up", [seen], DEFAULTS)
    assert lookup.outcome is Outcome.STALE
    assert lookup.found == f"/root/configs/triton_{expected}/{NAME}"
    assert lookup.found in lookup.candidates


def test_fallbacks_are_compared_as_numbers_and_may_be_newer_than_what_runs() -> None:
    seen = tree(triton_3_8_0=(NAME,), triton_3_10_0=(NAME,))
    lookup = open_sglang("0.5.23", "3.6.0").lookup(shard(layer()), "up", [seen], DEFAULTS)
    assert lookup.found == f"/root/configs/triton_3_10_0/{NAME}"
    assert "Fallback to triton version 3.10.0" in lookup.log_lines[0][1]


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
@pytest.mark.parametrize("entry", ["triton_3_6_0_bak", "triton_foo", "triton_"])
def test_case_55_a_backup_directory_ends_the_server_on_a_miss(version: str, entry: str) -> None:
    server, problem = open_sglang(version, "3.6.0"), shard(layer())
    missed = server.lookup(problem, "up", [tree(**{entry: (), "triton_3_5_1": (NAME,)})], DEFAULTS)
    assert (missed.outcome, missed.error, missed.found) == (Outcome.CRASH, "ValueError", None)
    exact = server.lookup(problem, "up", [tree(**{entry: (), "triton_3_6_0": (NAME,)})], DEFAULTS)
    assert exact.outcome is Outcome.EXACT
    older = open_sglang("0.5.11", "3.6.0").lookup(problem, "up", [tree(**{entry: ()})], DEFAULTS)
    assert older.outcome is Outcome.DEFAULT


def test_case_35_only_the_first_tree_counts_and_a_missing_configs_folder_ends_the_server() -> None:
    problem = shard(layer())
    mine, shipped = tree("/mine", triton_3_8_0=()), tree("/shipped", triton_3_8_0=(NAME,))
    lookup = open_sglang().lookup(problem, "up", [mine, shipped], DEFAULTS)
    assert lookup.outcome is Outcome.DEFAULT
    gone = open_sglang().lookup(problem, "up", [ConfigTree("/mine", None), shipped], DEFAULTS)
    assert (gone.outcome, gone.error) == (Outcome.CRASH, "FileNotFoundError")
    assert open_sglang("0.5.11").lookup(problem, "up", [ConfigTree("/x", None)], DEFAULTS).error is None


def test_case_33_up_and_down_can_come_from_different_tritons() -> None:
    seen = tree(triton_3_7_1=(NAME,), triton_3_5_1=(DOWN,))
    server, problem = open_sglang(), shard(layer())
    up, down = (server.lookup(problem, kernel, [seen], DEFAULTS) for kernel in ("up", "down"))
    assert up.found is not None
    assert down.found is not None
    assert "triton_3_7_1" in up.found
    assert "triton_3_5_1" in down.found
    assert up.outcome is down.outcome is Outcome.STALE


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.5", "Using default MoE kernel config."),
        ("0.5.6", "Using MoE kernel config with down_moe=False."),
        ("0.5.15", "Using MoE kernel config with down_moe=False."),
        ("0.5.16", "reusing the tuned up-projection config without TMA"),
    ],
)
def test_a_missing_down_file_uses_the_up_config_and_says_so_in_each_releases_words(
    version: str, words: str
) -> None:
    server = open_sglang(version, "3.6.0")
    lookup = server.lookup(shard(layer()), "down", [tree(triton_3_6_0=(NAME,))], DEFAULTS)
    assert lookup.outcome is Outcome.REUSED_UP
    assert lookup.found == f"/root/configs/triton_3_6_0/{NAME}"
    assert lookup.log_lines[0][0] == "WARNING"
    assert words in lookup.log_lines[0][1]
    assert DOWN in lookup.log_lines[0][1]


def test_without_any_file_both_kernels_run_with_the_default() -> None:
    for kernel in ("up", "down"):
        lookup = open_sglang().lookup(shard(layer()), kernel, [tree()], DEFAULTS)
        assert (lookup.outcome, lookup.found) == (Outcome.DEFAULT, None)
        assert "Using default MoE kernel config" in lookup.log_lines[0][1]


def test_deterministic_inference_opens_no_file_from_0_5_5() -> None:
    options = ServerOptions(deterministic=True)
    seen = [tree(triton_3_6_0=(NAME, DOWN))]
    new, old = open_sglang("0.5.5", "3.6.0"), open_sglang("0.5.4", "3.6.0")
    ignored = new.lookup(shard(layer()), "up", seen, options)
    assert (ignored.outcome, ignored.found) == (Outcome.IGNORED, None)
    assert "Deterministic inference" in ignored.log_lines[0][1]
    assert old.lookup(shard(layer()), "up", seen, options).outcome is Outcome.EXACT
    problem = shard(layer(quantization=Quantization(Dtype.FP8_W8A8, "fp8")), options=options)
    assert new.default_config(problem, "up", 1) == KernelConfig(64, 64, 32, 8)
    assert new.default_switches(problem) == ()


@given(
    st.dictionaries(
        st.sampled_from(["triton_3_1_0", "triton_3_5_1", "triton_3_6_0", "triton_3_10_0", "other"]),
        st.sets(st.sampled_from([NAME, DOWN, "x.json"])),
    ),
    st.sampled_from(["0.5.2", "0.5.5", "0.5.12", "0.5.16", "0.5.23"]),
    st.sampled_from(["up", "down"]),
)
def test_what_is_found_is_there_and_was_a_candidate(
    directories: dict[str, set[str]], version: str, kernel: str
) -> None:
    seen = tree(**{name: tuple(files) for name, files in directories.items()})
    lookup = open_sglang(version, "3.6.0").lookup(shard(layer()), kernel, [seen], DEFAULTS)  # type: ignore[arg-type]
    assert (lookup.found is None) == (lookup.outcome is Outcome.DEFAULT)
    if lookup.found is not None:
        directory, name = lookup.found.removeprefix("/root/configs/").split("/")
        assert seen.has(directory, name)
        assert lookup.found in lookup.candidates
    assert len(set(lookup.candidates)) == len(lookup.candidates)
    assert lookup.candidates[0].startswith("/root/configs/triton_3_6_0/")


# --- tables -----------------------------------------------------------------------------------


def test_case_29_a_vllm_file_is_fatal_and_the_error_says_what_to_remove() -> None:
    text = json.dumps({"triton_version": "3.6.0", "8": ENTRY})
    with pytest.raises(ConfigFileError, match="ValueError") as refused:
        open_sglang().read_table(text, "x.json")
    assert "vLLM" in (refused.value.hint or "")
    with pytest.raises(ConfigFileError, match="SPLIT_K"):
        open_sglang().read_table(json.dumps({"8": ENTRY | {"SPLIT_K": 1}}), "x.json")


def test_case_29_which_keys_an_entry_may_have_by_vendor_and_release() -> None:
    problem, rocm = shard(layer()), shard(layer(), gpu=MI300)
    assert {"waves_per_eu", "kpack", "matrix_instr_nonkdim"} <= open_sglang().allowed_keys(rocm)
    assert not {"waves_per_eu", "kpack", "SPLIT_K", "grf_mode"} & open_sglang().allowed_keys(problem)
    assert "USE_TMA" in open_sglang("0.5.18").allowed_keys(problem)
    assert "USE_TMA" not in open_sglang("0.5.17").allowed_keys(problem)
    assert "USE_TMA" in open_sglang("0.5.17").allowed_keys(problem, "down")
    assert "USE_TMA" not in open_sglang("0.5.4").allowed_keys(problem, "down")


def test_case_30_below_the_first_key_the_first_key_is_used() -> None:
    table = open_sglang().read_table(json.dumps({"96": ENTRY, "1024": ENTRY | {"GROUP_SIZE_M": 1}}), "x.json")
    assert open_sglang().config_for(table, 1).group_size_m == 8
    assert open_sglang().config_for(table, 560).group_size_m == 8
    assert open_sglang().config_for(table, 561).group_size_m == 1
    assert open_sglang().config_for(table, 8192).group_size_m == 1


def test_a_tie_goes_to_the_key_that_stands_first_in_the_file() -> None:
    entries = {"64": ENTRY, "32": ENTRY | {"GROUP_SIZE_M": 1}}
    forwards = open_sglang().read_table(json.dumps(entries), "x.json")
    backwards = open_sglang().read_table(json.dumps(dict(reversed(entries.items()))), "x.json")
    assert open_sglang().config_for(forwards, 48).group_size_m == 8
    assert open_sglang().config_for(backwards, 48).group_size_m == 1


def test_up_to_0_5_10_a_call_is_cut_into_chunks_of_65536_tokens() -> None:
    table = ConfigTable(((65_536, KernelConfig(16, 64, 64, 1)), (200_000, KernelConfig(64, 64, 64, 1))))
    assert open_sglang("0.5.10").config_for(table, 200_000).block_size_m == 16
    assert open_sglang("0.5.11").config_for(table, 200_000).block_size_m == 64


def test_case_32_a_pair_that_disagrees_dies_or_is_overridden() -> None:
    problem, up, down = shard(layer()), KernelConfig(64, 64, 64, 1), KernelConfig(16, 64, 64, 1)
    for version in ("0.5.5", "0.5.12"):
        with pytest.raises(ConfigFileError, match="AssertionError"):
            open_sglang(version).launch(problem, "down", down, up)
    assert open_sglang("0.5.13").launch(problem, "down", down, up).config.block_size_m == 64
    assert open_sglang("0.5.4").launch(problem, "down", down, up).config == up
    assert open_sglang("0.5.13").launch(problem, "up", up, down).config == up


HOSTILE = {
    "keys as floats": ('{"8.0": {}}', "ValueError"),
    "byte order mark": ("\ufeff{}", "JSONDecodeError"),
    "array": ("[]", "AttributeError"),
    "number": ("8", "AttributeError"),
    "empty": ("", "JSONDecodeError"),
    "cut off": ('{"8": {"BLOCK', "JSONDecodeError"),
    "entry is a list": ('{"8": []}', "TypeError"),
    "missing M": ('{"8": {}}', "KeyError"),
    "deep": ("[" * 200_000, "RecursionError"),
    "deep object": ('{"8":' * 100_000 + "1" + "}" * 100_000, "RecursionError"),
    "50 MB": ('{"8": "' + "x" * 50_000_000 + '"}', "larger than"),
    "huge number": ('{"8": ' + "9" * 100_000 + "}", "digits"),
    "NaN": ('{"8": NaN}', "NaN"),
    "NaN as a block": (json.dumps({"8": ENTRY | {"BLOCK_SIZE_M": float("nan")}}), "NaN"),
    "text as a block": (json.dumps({"8": ENTRY | {"BLOCK_SIZE_M": "32"}}), "BLOCK_SIZE_M"),
    "no power of two": (json.dumps({"8": ENTRY | {"BLOCK_SIZE_N": 48}}), "CompilationError"),
    "warps": (json.dumps({"8": ENTRY | {"num_warps": 3}}), "AssertionError"),
    "terminal": (json.dumps({"\x1b[31m": ENTRY}), "ValueError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_case_38_hostile_json_is_a_clear_error(name: str) -> None:
    text, word = HOSTILE[name]
    with pytest.raises(ConfigFileError) as refused:
        open_sglang().read_table(text, "E=1,N=2,device_name=A.json")
    assert word in refused.value.message
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 600


def test_case_38_tabs_duplicates_and_an_empty_object_are_read_and_noted() -> None:
    server = open_sglang()
    entry = json.dumps(ENTRY)
    text = f'{{\t"8": {{"BLOCK_SIZE_M": 16}}, "16": {entry}, "8": {entry}}}'
    reading = server.read_with_notes(text, "x.json")
    assert reading.table.keys() == (8, 16)
    assert any("twice" in note for note in reading.notes)
    empty = server.read_with_notes("{}", "x.json")
    assert empty.table.entries == ()
    assert any("default" in note for note in empty.notes)
    with pytest.raises(ConfigFileError, match="empty"):
        server.config_for(empty.table, 8)


def test_use_tma_in_an_up_file_is_read_from_0_5_18_and_in_a_down_file_from_0_5_5() -> None:
    text = json.dumps({"8": ENTRY | {"USE_TMA": True}})
    for version, name, fits in [
        ("0.5.17", "up.json", False),
        ("0.5.18", "up.json", True),
        ("0.5.5", "x_down.json", True),
        ("0.5.4", "x_down.json", False),
    ]:
        if fits:
            assert open_sglang(version).read_table(text, name).nearest(8).use_tma
            continue
        with pytest.raises(ConfigFileError, match="KeyError"):
            open_sglang(version).read_table(text, name)


def test_rendered_tables_are_canonical_sorted_and_complete() -> None:
    table = ConfigTable(
        ((64, KernelConfig(64, 64, 64, 1)), (8, KernelConfig(16, 64, 64, 1, 8, 2, use_tma=True)))
    )
    text = open_sglang().render_table(shard(layer()), table)
    assert text.startswith('{\n    "8": {\n        "BLOCK_SIZE_M": 16,\n')
    assert text.endswith("}\n")
    assert list(json.loads(text)) == ["8", "64"]
    assert json.loads(text)["64"] == {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    assert json.loads(text)["8"]["USE_TMA"] is True


def test_a_table_with_what_the_server_would_die_of_is_not_written() -> None:
    tma = ConfigTable(((8, KernelConfig(16, 64, 64, 1, use_tma=True)),))
    split = ConfigTable(((8, KernelConfig(16, 64, 64, 1, extra=(("SPLIT_K", 1),))),))
    waves = ConfigTable(((8, KernelConfig(16, 64, 64, 1, extra=(("waves_per_eu", 1),))),))
    with pytest.raises(ConfigFileError, match="USE_TMA"):
        open_sglang("0.5.17").render_table(shard(layer()), tma)
    assert "USE_TMA" in open_sglang("0.5.17").render_table(shard(layer()), tma, "down")
    with pytest.raises(ConfigFileError, match="SPLIT_K"):
        open_sglang().render_table(shard(layer()), split)
    with pytest.raises(ConfigFileError, match="waves_per_eu"):
        open_sglang().render_table(shard(layer()), waves)
    assert "waves_per_eu" in open_sglang().render_table(shard(layer(), gpu=MI300), waves)


CONFIGS = st.builds(
    KernelConfig,
    st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from([32, 64, 128, 256]),
    st.sampled_from([32, 64, 128, 256]),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 6),
    st.booleans(),
)


@given(st.dictionaries(st.integers(1, 100_000), CONFIGS, min_size=1))
def test_what_is_rendered_is_read_back_and_rendered_alike(configs: dict[int, KernelConfig]) -> None:
    server, problem = open_sglang(), shard(layer())
    table = ConfigTable(tuple(configs.items()))
    text = server.render_table(problem, table)
    again = server.read_table(text, "x.json")
    assert dict(again.entries) == configs
    assert server.render_table(problem, again) == text


# --- defaults and launches --------------------------------------------------------------------


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

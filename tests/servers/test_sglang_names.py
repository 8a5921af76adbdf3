"""SGLang's file names: built, refused, read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import ServerError
from moetune.domain.gpu import Gpu
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ServerOptions
from moetune.servers.sglang import open_sglang
from moetune.servers.sglang.names import TAGS, FileName, parse_file_name
from tests.servers.sglang_problems import FP8_BLOCK, MI300, layer, shard
from tests.wheels import members, read_member


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

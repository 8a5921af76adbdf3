"""Names of config files: the inverse of what both servers write, and nothing else gets through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import MoetuneError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.gpu import load_registry
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.registry import open_server
from tests.published_trees import config_names

DEVICES = (
    "NVIDIA_H200",
    "Orin_(nvgpu)",
    "Intel(R)_Arc(TM)_Pro_B60_Graphics",
    "NVIDIA_A100-SXM4-80GB",
    "X_down",
)

names = st.builds(
    FileName,
    E=st.integers(1, 999_999),
    N=st.integers(1, 9_999_999),
    device=st.sampled_from(DEVICES)
    | st.text("ABz09_-.()+", max_size=30).filter(lambda text: ".." not in text),
    dtype=st.sampled_from(["", "fp8_w8a8", "int4_w4a16", "float32", "bf16"]),
    block_shape=st.none() | st.tuples(st.integers(1, 999_999), st.integers(1, 999_999)),
    per_channel=st.booleans(),
    backend=st.sampled_from(["", "flydsl"]),
    down=st.booleans(),
)


@given(names, st.booleans())
def test_a_name_round_trips(name: FileName, spaced: bool) -> None:
    name = replace(name, spaced=spaced and name.block_shape is not None)
    if name.device.endswith("_down") and not (
        name.dtype or name.block_shape or name.per_channel or name.down
    ):
        return  # `device_name=X_down.json` is the down file of X
    if len(str(name)) > 255:
        assert parse_file_name(str(name)) is None
        return
    assert parse_file_name(str(name)) == name


@pytest.mark.parametrize("device", DEVICES[:4])
def test_case_39_a_device_name_with_parentheses_round_trips(device: str) -> None:
    for text in (
        f"E=8,N=64,device_name={device}.json",
        f"E=8,N=64,device_name={device},dtype=fp8_w8a8_down.json",
    ):
        name = parse_file_name(text)
        assert name is not None
        assert (name.device, str(name)) == (device, text)


def test_case_21_the_space_in_the_block_shape_is_kept() -> None:
    for text, spaced in (("[128, 128]", True), ("[128,128]", False)):
        name = parse_file_name(f"E=8,N=64,device_name=X,block_shape={text}.json")
        assert name is not None
        assert (name.block_shape, name.spaced) == ((128, 128), spaced)


@pytest.mark.parametrize(("server", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
@given(data=st.data())
def test_what_a_server_writes_is_taken_apart_into_the_problem(
    server: str, version: str, data: st.DataObject
) -> None:
    release = open_server(server, version)
    quantization = data.draw(
        st.builds(
            Quantization,
            st.sampled_from(
                [Dtype.BF16, Dtype.FP8_W8A8, Dtype.INT8_W8A8, Dtype.INT8_W8A16, Dtype.INT4_W4A16]
            ),
            block_shape=st.none() | st.just((128, 128)),
            per_channel=st.booleans(),
        )
    )
    problem = Problem(
        E=data.draw(st.integers(1, 1024)),
        global_experts=1024,
        topk=8,
        K=4096,
        N=512,
        file_n=data.draw(st.integers(1, 30_000)),
        gpu=data.draw(st.sampled_from(load_registry())),
        server=server,
        server_version=version,
        triton_version=release.triton_version,
        quantization=quantization,
    )
    for kernel in KERNELS:
        try:
            text = release.file_name(problem, kernel)
        except MoetuneError:
            continue
        name = parse_file_name(text)
        assert name is not None
        assert str(name) == text
        assert (name.E, name.N, name.device) == (problem.E, problem.file_n, release.device_name(problem.gpu))
        assert name.down is (kernel == "down" and release.separate_down_file)


@pytest.mark.parametrize("package", ["sglang", "vllm"])
def test_every_published_name_is_one(package: str) -> None:
    shipped = {path.rpartition("/")[2] for path in config_names(package)}
    assert len(shipped) > 300
    assert [text for text in shipped if str(parse_file_name(text)) != text] == []


@pytest.mark.parametrize(
    "text",
    [
        "E=8,N=64,device_name=../../etc/passwd.json",
        "E=8,N=64,device_name=a..b.json",
        "E=8,N=64,device_name=a/b.json",
        "E=8,N=64,device_name=a\\b.json",
        "E=8,N=64,device_name=a\nb.json",
        "E=8,N=64,device_name=a\x00.json",
        "E=08,N=64,device_name=X.json",
        "E=8,N=-64,device_name=X.json",
        "E=\u0668,N=64,device_name=X.json",
        "E=8,N=64,device_name=X,block_shape=[128,  128].json",
        "E=8,N=64,device_name=X,block_shape=[0,128].json",
        "E=8,N=64,device_name=X.json.bak",
        "E=8,N=64.json",
        "E=8,N=64,device_name=" + "X" * 300 + ".json",
        "",
    ],
)
def test_what_is_no_name_is_none(text: str) -> None:
    assert parse_file_name(text) is None


@given(st.text(max_size=300))
def test_any_text_is_a_name_or_none(text: str) -> None:
    name = parse_file_name(text)
    assert name is None or str(name) == text

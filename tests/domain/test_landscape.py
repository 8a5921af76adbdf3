"""Landscapes: what is read, and what is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.exhaustive import landscape_facts
from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError
from moetune.domain.gpu import find_gpu
from moetune.domain.landscape import read_landscape
from moetune.domain.quantization import Dtype, Quantization
from tests.generators import problem

FACTS: dict[str, Any] = {
    "device": "NVIDIA H200",
    "compute_capability": "9.0",
    "triton": "3.6.0",
    "space": "SGLang's 1920-config grid",
    "num_experts": 256,
    "topk": 8,
    "hidden_size": 3072,
    "intermediate_per_rank": 256,
    "dtype": "bf16",
    "block_shape": None,
}
HEADER = "block_size_m,block_size_n,block_size_k,group_size_m,num_warps,num_stages,kernel,m,median_us,error"
RECORDED = Path(__file__).parents[2] / "training" / "landscapes"


def write(
    folder: Path, rows: list[str], facts: object = FACTS, *, header: str = HEADER, name: str = "small"
) -> Path:
    path = folder / f"{name}.csv.gz"
    path.write_bytes(gzip.compress("\n".join([header, *rows]).encode()))
    path.with_name(f"{name}.json").write_text(json.dumps(facts))
    return path


def test_reads_times_and_what_could_not_run(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ["16,32,64,1,4,5,up,2,17.256,", "16,32,64,1,8,5,up,2,,OutOfResources", "16,32,64,1,4,5,down,64,9.5,"],
    )
    landscape = read_landscape(path)
    up = landscape.times_us["up", 2]
    assert up == {KernelConfig(16, 32, 64, 1, 4, 5): 17.256, KernelConfig(16, 32, 64, 1, 8, 5): None}
    assert landscape.times_us["down", 64] == {KernelConfig(16, 32, 64, 1, 4, 5): 9.5}
    assert landscape.name == "small"


def test_the_facts_become_a_problem(tmp_path: Path) -> None:
    facts = FACTS | {"dtype": "fp8_w8a8", "block_shape": [128, 128]}
    problem = read_landscape(write(tmp_path, ["16,32,64,1,4,5,up,2,17.2,"], facts)).problem
    assert (problem.E, problem.topk, problem.K, problem.N) == (256, 8, 3072, 256)
    assert problem.gpu.torch_name == "NVIDIA H200"
    assert problem.quantization.dtype is Dtype.FP8_W8A8
    assert problem.quantization.block_shape == (128, 128)


def test_every_recorded_landscape_is_read() -> None:
    paths = sorted(RECORDED.glob("*.csv.gz"))
    assert len(paths) >= 26
    for path in paths:
        assert read_landscape(path).times_us


@pytest.mark.parametrize(
    ("rows", "facts", "words"),
    [
        ([], FACTS, "no times"),
        (["16,32,64,1,4,5,up,2,nan,"], FACTS, "line 2"),
        (["16,32,64,1,4,5,up,2,-1,"], FACTS, "line 2"),
        (["16,32,64,1,4,5,sideways,2,1,"], FACTS, "sideways"),
        (["16,32,64,1,4,5,up,0,1,"], FACTS, "line 2"),
        (["16,thirty,64,1,4,5,up,2,1,"], FACTS, "thirty"),
        (["16,32,64"], FACTS, "line 2"),
        (["16,32,64,1,4,5,up,2,1,"], FACTS | {"topk": 0}, "topk"),
        (["16,32,64,1,4,5,up,2,1,"], FACTS | {"topk": True}, "topk"),
        (["16,32,64,1,4,5,up,2,1,"], FACTS | {"dtype": "fp3"}, "fp3"),
        (["16,32,64,1,4,5,up,2,1,"], FACTS | {"dtype": 3}, "dtype"),
        (["16,32,64,1,4,5,up,2,1,"], FACTS | {"block_shape": [128]}, "block_shape"),
        (["16,32,64,1,4,5,up,2,1,"], FACTS | {"device": "../../etc"}, "etc"),
        (["16,32,64,1,4,5,up,2,1,"], [1, 2], "object"),
    ],
)
def test_a_broken_landscape_is_an_error_that_says_where(
    tmp_path: Path, rows: list[str], facts: object, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        read_landscape(write(tmp_path, rows, facts))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="median_us"):
        read_landscape(write(tmp_path, ["1,2"], header="block_size_m,kernel"))


def test_a_missing_or_truncated_file_is_an_error_for_people(tmp_path: Path) -> None:
    path = write(tmp_path, ["16,32,64,1,4,5,up,2,17.256,"] * 500)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        read_landscape(path)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(InputError, match="cannot be read"):
        read_landscape(path)
    with pytest.raises(InputError, match="does not exist"):
        read_landscape(tmp_path / "missing.csv.gz")


def test_a_bomb_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetune.domain.landscape.MAX_BYTES", 10_000)
    with pytest.raises(InputError, match="expands"):
        read_landscape(write(tmp_path, ["16,32,64,1,4,5,up,2,17.256,"] * 5000))


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    path = write(folder, [])
    path.write_bytes(gzip.compress(HEADER.encode() + b"\n" + data))
    with contextlib.suppress(InputError):
        assert read_landscape(path).times_us


@pytest.mark.parametrize(
    "quantization",
    [
        Quantization(),
        Quantization(Dtype.FP8_W8A8, dynamic_activation=True),
        Quantization(Dtype.FP8_W8A8, block_shape=(128, 128), dynamic_activation=True),
        Quantization(Dtype.INT8_W8A8, per_channel=True, dynamic_activation=True),
        Quantization(Dtype.INT8_W8A16, per_channel=True),
        Quantization(Dtype.INT4_W4A16, group_size=128, zero_point=True),
    ],
    ids=str,
)
def test_the_facts_that_an_exhaustive_run_writes_are_those_of_its_problem(
    tmp_path: Path, quantization: Quantization
) -> None:
    measured = replace(problem(), gpu=find_gpu("NVIDIA H200"), quantization=quantization)
    facts = landscape_facts(measured, {})
    assert read_landscape(write(tmp_path, ["16,32,64,1,4,5,up,2,17.2,"], facts)).problem == measured


def test_a_second_pass_is_read_where_there_was_one(tmp_path: Path) -> None:
    header = HEADER.replace("error", "second_us,error")
    rows = ["16,32,64,1,4,5,up,2,17.2,16.9,", "16,32,64,1,8,5,up,2,27.2,,", "16,64,64,1,4,5,up,2,,,no"]
    landscape = read_landscape(write(tmp_path, rows, header=header))
    assert landscape.second_us == {("up", 2): {KernelConfig(16, 32, 64, 1, 4, 5): 16.9}}
    assert len(landscape.times_us["up", 2]) == 3


@pytest.mark.parametrize("facts", [{"per_channel": "yes"}, {"group_size": -1}, {"zero_point": 1}])
def test_facts_of_a_format_that_are_none_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(facts))):
        read_landscape(write(tmp_path, ["16,32,64,1,4,5,up,2,17.2,"], FACTS | facts))

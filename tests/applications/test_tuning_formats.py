"""`moetune tune` measures every format for which a server runs its Triton kernel, and says what it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.measure_request import MeasureRequest
from moetune.applications.measured_answer import MeasuredTuning
from moetune.applications.output import State
from moetune.applications.targets import NotMeasurableError
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_measured import tune_measured
from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.kernel_format import KernelFormat, Scales, kernel_format, whole_groups
from moetune.domain.quantization import Dtype, Quantization
from tests.applications.fake_machine import PROBLEM, SERVER, FakeMachine

MODEL = "Qwen/Qwen3.5-122B-A10B"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(EFFORTS["quick"], rounds=(2, 2), limit=12, layer_rounds=5, budget_seconds=None)
    monkeypatch.setattr("moetune.applications.tuning_measured.EFFORTS", {**EFFORTS, "quick": quick})


def tune(machine: FakeMachine, quant: str, server: str, version: str) -> MeasuredTuning:
    request = MeasureRequest(
        MODEL,
        tp=4,
        server=server,
        server_version=version,
        quant=quant,
        m="1,64",
        max_m=64,
        offline=True,
        out=machine.folder / "out",
        state=machine.folder / "state",
    )
    return tune_measured(request, {}, gpus=machine.devices(), command=machine.command, pool=machine.pool)


@pytest.mark.parametrize(
    ("quant", "server", "version", "name"),
    [
        ("fp8-static", "sglang", "0.5.23", "N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8"),
        ("fp8-channel", "sglang", "0.5.23", "dtype=fp8_w8a8,per_channel_quant=True"),
        ("int8", "sglang", "0.5.23", "dtype=int8_w8a8,per_channel_quant=True"),
        ("int8-block", "sglang", "0.5.23", "dtype=int8_w8a8,block_shape=[128, 128]"),
        ("int8_w8a16", "sglang", "0.5.23", "dtype=int8_w8a16"),
        ("int4", "sglang", "0.5.23", "N=128,device_name=NVIDIA_H200,dtype=int4_w4a16"),
        ("int4", "vllm", "0.33.0", "N=256,device_name=NVIDIA_H200,dtype=int4_w4a16"),
        ("fp8-static", "vllm", "0.12.0", "dtype=fp8_w8a8"),
    ],
)
def test_every_format_is_measured_and_written(
    quant: str, server: str, version: str, name: str, tmp_path: Path
) -> None:
    # Both servers' defaults for weights that are converted: whatever the model picks first beats them here.
    slow = {"16x32x64 g1 w4 s3": 2.0, "64x64x32 g8 w4 s3": 2.0}
    tuned = tune(FakeMachine(tmp_path, settings={"slow": slow}), quant, server, version)
    assert tuned.gains
    assert all(file.state is State.WRITTEN for file in tuned.files)
    assert name in tuned.files[0].path.name


def test_a_cuda_kernel_of_the_server_is_no_candidate(tmp_path: Path) -> None:
    """vLLM before 0.27 multiplies few rows of int4 groups with a kernel that is not Triton's."""
    with pytest.raises(NotMeasurableError, match=r"m = 1 to 192: vllm 0\.12\.0 runs a CUDA kernel"):
        tune(FakeMachine(tmp_path), "int4", "vllm", "0.12.0")


def _quantized(dtype: Dtype, **rest: Any) -> Any:
    return replace(PROBLEM, quantization=Quantization(dtype, "made", **rest))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (_quantized(Dtype.MXFP4, group_size=32), "has no mxfp4"),
        (_quantized(Dtype.FP8_W8A16), "has no fp8_w8a16"),
        (_quantized(Dtype.INT4_W4AFP8, group_size=128), "has no int4_w4afp8"),
        (_quantized(Dtype.INT4_W4A16), "int4 with groups only"),
        (_quantized(Dtype.INT4_W4A16, group_size=-1), "int4 with groups only"),
        (replace(_quantized(Dtype.INT4_W4A16, group_size=128), N=200), "whole groups only"),
        (replace(_quantized(Dtype.INT4_W4A16, group_size=128), bias=True), "no bias with int4_w4a16"),
        (_quantized(Dtype.FP8_W8A8, per_channel=True, dynamic_activation=False), "not by channel"),
        (replace(PROBLEM, activation_dtype=Dtype.FP32), "has no fp32"),
    ],
)
def test_what_no_kernel_has_is_named(problem: Any, reason: str) -> None:
    task = compile_task(SERVER.launch(problem, "up", KernelConfig(64, 64, 32, 1, 4, 3)), problem)
    assert isinstance(task, str)
    assert reason in task
    assert "kernel" in task  # by which the tuner knows that no config is to blame


def test_groups_are_halved_until_both_sizes_are_whole_ones() -> None:
    assert whole_groups(128, 3072, 256) == 128
    assert whole_groups(128, 3072, 192) == 64
    assert whole_groups(128, 3072, 224) == 32
    assert whole_groups(128, 3072, 208) is None
    found = kernel_format(replace(_quantized(Dtype.INT4_W4A16, group_size=128, zero_point=True), N=192))
    assert isinstance(found, KernelFormat)
    assert (found.scales, found.group_size, found.weight_bits) == (Scales.GROUP, 64, 4)
    assert found.zero_point
    assert not found.quantizes_activations


def test_a_task_of_every_format_survives_json() -> None:
    problem = _quantized(Dtype.INT4_W4A16, group_size=128, zero_point=True)
    task = compile_task(SERVER.launch(problem, "down", KernelConfig(64, 64, 32, 1, 4, 3)), problem)
    assert isinstance(task, CompileTask)
    assert task.grouped
    assert CompileTask.from_json(task.to_json()) == task

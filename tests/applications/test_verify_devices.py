"""On which GPU files are verified, and why on none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.applications.measuring_devices import GpuBusyError
from moetune.applications.verify_devices import WrongGpuError
from moetune.domain.errors import InputError
from moetune.domain.gpu import find_gpu
from tests.applications.fake_machine import PROBLEM, SERVER, FakeMachine
from tests.applications.verify_world import (
    DOWN,
    GOOD_DOWN,
    GOOD_UP,
    UP,
    lay,
    measure,
)


def test_another_gpu_is_refused_naming_both(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    machine = FakeMachine(tmp_path, gpus=2)
    other = [replace(machine.devices()[0], name="NVIDIA H100 80GB HBM3")]
    with pytest.raises(
        WrongGpuError, match="for NVIDIA H200, and this GPU is NVIDIA H100 80GB HBM3"
    ) as caught:
        measure(machine, *paths, gpus=other)
    assert "--lookup-only" in str(caught.value.hint)
    (one,) = measure(machine, *paths, gpus=other, lookup_only=True).problems
    assert one.gpu.reason == "--lookup-only"
    # Of two kinds the files' own is taken, unless another is asked for.
    both = [other[0], machine.devices()[1]]
    (one,) = measure(machine, *paths, gpus=both).problems
    assert {line["gpu"] for line in machine.log("time")} == {"GPU-1"}
    with pytest.raises(WrongGpuError):
        measure(machine, *paths, gpus=both, devices=(0,))
    with pytest.raises(InputError, match="has 2 GPUs"):
        measure(machine, *paths, gpus=both, devices=(2,))


def test_of_files_for_several_gpus_those_of_this_one_are_measured(tmp_path: Path) -> None:
    other = SERVER.file_name(replace(PROBLEM, gpu=find_gpu("NVIDIA L40S")), "up")
    paths = lay(tmp_path, {UP: GOOD_UP, other: GOOD_UP})
    found = measure(FakeMachine(tmp_path), *paths)
    reasons = {one.looked.files[0].path: one.gpu.reason for one in found.problems}
    assert reasons[str(paths[0])] == ""
    assert "for NVIDIA L40S, and this GPU is NVIDIA H200" in reasons[str(paths[1])]
    with pytest.raises(WrongGpuError, match="NVIDIA L40S"):
        measure(FakeMachine(tmp_path), paths[1])


def test_a_gpu_in_use_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    machine = FakeMachine(tmp_path)
    with pytest.raises(GpuBusyError, match="in use by other processes \\(4242\\)"):
        measure(machine, *paths, gpus=machine.devices(os.getpid(), 4242))
    assert not machine.log("open")
    assert not measure(machine, *paths, gpus=machine.devices(4242), share_gpu=True).is_no


def test_without_k_and_topk_the_lookup_is_verified_and_the_option_that_is_missing_is_named(
    tmp_path: Path,
) -> None:
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    (one,) = measure(machine, *paths, hidden=None, topk=None).problems
    assert all(file.reads for file in one.looked.files)
    assert "--model MODEL, or --hidden and --topk" in one.gpu.reason
    assert not one.is_no
    assert not machine.log("open")


def test_nothing_to_import_is_a_reason_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    (one,) = measure(machine, *paths).problems
    assert "torch and triton cannot be imported here" in one.gpu.reason
    assert "--python" in one.gpu.reason

"""From a request to measured files: provenance, resuming, nothing left, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.exhaustive import write_landscape
from moetune.applications.measure_request import MeasureRequest
from moetune.applications.measured_answer import MeasuredTuning
from moetune.applications.measuring_devices import GpuBusyError
from moetune.applications.nvml import Device
from moetune.applications.output import State
from moetune.applications.replay import replay
from moetune.applications.targets import Target
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_measured import tune_measured
from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.landscape import read_landscape
from tests.applications.fake_machine import PROBLEM, FakeMachine

MODEL = "Qwen/Qwen3.5-122B-A10B"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick effort that is quicker still."""
    quick = replace(EFFORTS["quick"], rounds=(2, 2), limit=12, layer_rounds=5, budget_seconds=None)
    monkeypatch.setattr("moetune.applications.tuning_measured.EFFORTS", {**EFFORTS, "quick": quick})


def request(machine: FakeMachine, **changes: Any) -> MeasureRequest:
    values: dict[str, Any] = {
        "tp": 4,
        "server": "sglang",
        "server_version": "0.5.23",
        "m": "1,64,2048",
        "max_m": 2048,
        "offline": True,
        "out": machine.folder / "out",
        "state": machine.folder / "state",
    }
    return MeasureRequest(MODEL, **{**values, **changes})


def tune(machine: FakeMachine, gpus: list[Device] | None = None, **changes: Any) -> MeasuredTuning:
    return tune_measured(
        request(machine, **changes),
        {},
        gpus=machine.devices() if gpus is None else gpus,
        command=machine.command,
        pool=machine.pool,
    )


def test_measured_files_are_written_with_their_provenance(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    tuned = tune(machine)
    assert tuned.gains
    assert tuned.found
    assert [file.state for file in tuned.files] == [State.WRITTEN] * 2
    up, down = (json.loads(file.path.read_text()) for file in tuned.files)
    assert {"1", "64", "2048"} <= set(up) == set(down)
    beside = json.loads(tuned.files[0].provenance.read_text())
    assert beside["kind"] == "measured"
    checks = {check["name"]: check["passed"] for check in beside["checks"]}
    assert checks["matches the fp32 reference"] is True
    assert checks["nothing compiled while measuring"] is True
    assert checks["measured with the Triton of the server"] is True
    assert beside["conditions"]["l2"] == "cold"
    assert beside["conditions"]["noise"] >= 0.005
    document = tuned.to_json()
    assert json.loads(json.dumps(document, allow_nan=False))["kind"] == "measured"


def test_an_interpreter_without_triton_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    machine = FakeMachine(tmp_path)
    for path in (str(bare), str(tmp_path / "missing")):
        with pytest.raises(InputError, match="no interpreter with Triton"):
            tune(machine, python=path)


def test_the_triton_that_measures_names_the_files(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.5.1\n")
    other.chmod(0o755)
    tuned = tune(machine, python=str(other))
    assert all("triton_3_5_1" in str(file.path) for file in tuned.files)
    beside = json.loads(tuned.files[0].provenance.read_text())
    checks = {check["name"]: check["passed"] for check in beside["checks"]}
    assert checks["measured with the Triton of the server"] is False  # the worker's is 3.6.0


def test_a_second_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    first = tune(machine)
    asked = len((tmp_path / "log").read_text().splitlines())
    second = tune(machine)
    assert not first.nothing_left
    assert second.nothing_left
    assert second.measured.measured == 0
    assert second.measured.choices == first.measured.choices
    assert [file.state for file in second.files] == [State.UNCHANGED] * 2
    assert len((tmp_path / "log").read_text().splitlines()) == asked, "a GPU was touched"


def test_another_m_is_something_left_to_do_and_what_is_known_is_used(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    tune(machine)
    again = tune(machine, m="1,64,512,2048", force=True)
    assert not again.nothing_left
    assert again.measured.known > 0
    assert again.measured.measured > 0


def test_a_killed_run_goes_on_and_writes_the_same_files_as_its_journal_says(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    first = tune(machine)
    texts = [file.path.read_text() for file in first.files]
    lines = first.journal.read_bytes().splitlines(keepends=True)
    # Killed after the last measurement, before the files: everything is in the journal but the end.
    first.journal.write_bytes(b"".join(line for line in lines if b'"done"' not in line))
    for file in first.files:
        file.path.unlink()
        file.provenance.unlink()
    second = tune(machine)
    assert second.measured.measured == 0
    assert [file.path.read_text() for file in second.files] == texts


def test_where_nothing_beats_the_default_nothing_is_written(tmp_path: Path) -> None:
    tuned = tune(FakeMachine(tmp_path, settings={"flat": True}))
    assert not tuned.gains
    assert tuned.files == ()
    assert not (tmp_path / "out").exists()
    assert tuned.to_json()["gains"] is False


def test_a_gpu_with_other_processes_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with pytest.raises(GpuBusyError, match="in use by other processes \\(4242\\)") as caught:
        tune(machine, machine.devices(os.getpid(), 4242))
    assert "--share-gpu" in str(caught.value.hint)
    assert not machine.log("open")
    assert tune(machine, machine.devices(4242), share_gpu=True).gains


def test_a_machine_without_a_gpu_says_what_can_be_done(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with pytest.raises(MoetuneError, match="no GPU") as caught:
        tune_measured(request(machine), {})
    assert "--effort predict" in str(caught.value.hint)


def test_gpus_of_two_kinds_and_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, gpus=2)
    devices = machine.devices()
    other = replace(devices[1], name="NVIDIA H100 80GB HBM3")
    with pytest.raises(InputError, match="different kinds"):
        tune(machine, [devices[0], other], devices=(0, 1))
    with pytest.raises(InputError, match="has 2 GPUs"):
        tune(machine, devices, devices=(2,))
    with pytest.raises(InputError, match="this GPU is NVIDIA H200"):
        tune(machine, devices, gpu="NVIDIA L40S")


@pytest.mark.parametrize(
    "changes",
    [
        {"effort": "mad"},
        {"only": "sideways"},
        {"budget": 0.0},
        {"budget": float("nan")},
        {"devices": (0, 0)},
        {"devices": (-1,)},
        {"tp": 0},
    ],
)
def test_senseless_requests_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        request(FakeMachine(tmp_path), **changes)


def test_two_gpus_share_a_run(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, gpus=2)
    tuned = tune(machine, devices=(0, 1))
    assert tuned.gains
    assert {line["gpu"] for line in machine.log("time")} == {"GPU-0", "GPU-1"}


def test_what_cannot_be_measured_yet_says_so_before_a_gpu_is_touched(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with pytest.raises(MoetuneError, match="cannot measure this problem") as caught:
        tune(machine, quant="fp32", assume_triton=True)
    assert "--effort predict" in str(caught.value.hint)
    assert not machine.log("open")


def test_a_landscape_that_was_written_is_replayed(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    configs = [
        KernelConfig(m, n, 64, g, 4, s)
        for m in (16, 64)
        for n in (32, 64, 128)
        for g in (1, 16)
        for s in (2, 3)
    ]
    broken = configs[3]
    machine.set(faults={f"up {broken}": "over shared memory"})
    ms = (1, 64)
    with machine.journal() as journal, machine.laboratory(journal, ms) as laboratory:
        laboratory.want(Target(kernel, m, c) for kernel in ("up", "down") for m in ms for c in configs)
        laboratory.want([Target("up", 3, configs[0])])  # a look between the keys: no landscape
        laboratory.run()
        path = write_landscape(tmp_path, PROBLEM, laboratory, ms)
        first = path.read_bytes()
        write_landscape(tmp_path, PROBLEM, laboratory, ms)
        assert path.read_bytes() == first
    landscape = read_landscape(path)
    assert landscape.problem.E == PROBLEM.E
    assert landscape.problem.gpu == PROBLEM.gpu
    assert landscape.times_us["up", 64][broken] is None
    assert {m for _, m in landscape.times_us} == set(ms)
    for (kernel, m), times in landscape.times_us.items():
        for config, time_us in times.items():
            assert laboratory.known.times[Target(kernel, m, config)] == (
                None if time_us is None else pytest.approx(time_us, rel=1e-5)
            )
    replayed = replay(path, 8)
    assert len(replayed.problems) == 4

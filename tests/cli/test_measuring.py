"""`moetune tune` where it measures: which effort is meant, what is shown, what the document holds."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications import tuning_measured
from moetune.applications.gpu_health import Health, HealthMonitor
from moetune.applications.live import Live
from moetune.applications.targets import Progress, Target
from moetune.applications.tuning_efforts import EFFORTS
from moetune.cli.main import run
from moetune.cli.measuring import LiveLine, chosen_effort, take_measure
from moetune.cli.output import Sink
from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError
from tests.applications.fake_machine import FakeMachine
from tests.cli.test_schemas import validate
from tests.measure.server_files import kernel_file

if TYPE_CHECKING:
    from pathlib import Path

NOTHING = {
    **dict.fromkeys(("budget", "kernel", "only", "python", "routing", "server_files")),
    "devices": (),
    "share_gpu": False,
}
ARGUMENTS = ["tune", "Qwen/Qwen3.5-122B-A10B", "--tp", "4", "--server", "sglang", "--offline"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """A machine with a GPU that is not there, and a quick effort that is quicker still."""
    made = FakeMachine(tmp_path)
    measure = functools.partial(
        tuning_measured.tune_measured, gpus=made.devices(), command=made.command, pool=made.pool
    )
    quick = replace(EFFORTS["quick"], rounds=(2, 2), limit=12, layer_rounds=5, budget_seconds=None)
    monkeypatch.setattr(tuning_measured, "EFFORTS", {**EFFORTS, "quick": quick})
    monkeypatch.setattr(tuning_measured, "tune_measured", measure)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOETUNE_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    return made


def options(*more: str) -> list[str]:
    return [*ARGUMENTS, "--m", "1,64,2048", "--max-m", "2048", "--effort", "quick", *more]


def test_the_table_the_files_and_the_next_command_are_shown(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options()) == 0
    out = capsys.readouterr().out
    assert "measured: microseconds of one launch, weights cold" in out
    for word in ("default us", "tuned us", "gain", "layer", "skewed", "numerics", "noise", "journal"):
        assert word in out
    assert "measured files" in out
    assert "export SGLANG_MOE_CONFIG_DIR=" in out
    assert run(options()) == 0
    assert "nothing is left to measure" in capsys.readouterr().out
    assert len(machine.log("open")) == 1


def test_the_document_obeys_its_schema(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    for expected in (False, True):
        assert run(options("--json")) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["nothing_left"] is expected
        validate(document, "measured")
    for beside in machine.folder.rglob("*.provenance.json"):
        validate(json.loads(beside.read_text()), "provenance")


def test_no_gain_is_exit_code_1_and_nothing_is_written(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.set(flat=True)
    assert run(options()) == 1
    out = capsys.readouterr().out
    assert "nothing beats the server's default by more than" in out
    assert "nothing was written" in out
    assert run(options("--exit-zero")) == 0


def test_culprits_are_named(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    default = "16x32x64 g1 w4 s3"
    machine.set(faults={f"up {default}": "abort"})
    assert run(options()) == 0
    assert f"failed: up {default}: killed the worker: ended with signal 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("effort", "gpus", "measure", "expected"),
    [
        (None, ("NVIDIA H200",), {}, "predict"),
        (None, (), {}, "predict"),  # no driver on this machine
        (None, (), {"devices": (0,)}, "quick"),
        (None, ("NVIDIA H200",), {"budget": 9.0}, "quick"),
        ("full", (), {}, "full"),
        ("predict", ("NVIDIA H200",), {}, "predict"),
    ],
)
def test_the_effort_that_is_meant(
    effort: str | None,
    gpus: tuple[str, ...],
    measure: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moetune.cli.measuring._can_measure", lambda: False)
    assert chosen_effort(effort, gpus, {**NOTHING, **measure}) == expected


def test_a_machine_with_a_gpu_measures_unless_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetune.cli.measuring._can_measure", lambda: True)
    assert chosen_effort(None, (), NOTHING) == "quick"
    assert chosen_effort(None, ("NVIDIA L40S",), NOTHING) == "predict"


def test_options_of_measuring_beside_predict_are_an_error() -> None:
    with pytest.raises(InputError, match="--share-gpu say how to measure"):
        chosen_effort("predict", (), {**NOTHING, "share_gpu": True})


@pytest.mark.parametrize("text", ["a", "0,,1", "-1", "0 1", "99999", "\u0661"])
def test_devices_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        take_measure({**NOTHING, "devices": text})


def live(phase: str, health: Health) -> Live:
    target = Target("up", 64, KernelConfig(16, 64, 64, 1, 4, 3))
    return Live(Progress(phase, 3, 9, target, 12.0, 11.5), health, 4.2)


def test_the_live_line_is_written_over_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = LiveLine(Sink())
    line.show(live("search 1/3", Health(1980, 55, ("power",))))
    text = capsys.readouterr().err
    assert text.startswith("\r")
    assert "\n" not in text
    for part in ("3/9", "m=64", "best 11.5 us", "1980 MHz", "55 C", "slowed by power"):
        assert part in text
    line.clear()
    assert capsys.readouterr().err.strip(" \r") == ""


def test_without_a_terminal_a_phase_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = LiveLine(Sink())
    for phase in ("a", "a", "b"):
        line.show(live(phase, Health()))
    assert [text.split()[-1] for text in capsys.readouterr().err.splitlines()] == ["a", "b"]


class Nvml:
    """What NVML would say of a GPU that is too hot."""

    def nvmlInit(self) -> None:  # noqa: N802 - the binding's name
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetCurrentClocksEventReasons(self, _: str) -> int:  # noqa: N802
        return 0x1 | 0x4 | 0x20 | 0x40

    def nvmlDeviceGetClockInfo(self, _: str, kind: int) -> int:  # noqa: N802
        return 1410 if kind == 1 else 0

    def nvmlDeviceGetTemperature(self, _: str, __: int) -> int:  # noqa: N802
        raise RuntimeError("not supported")


def test_throttling_is_told_with_its_reasons_and_what_is_unknown_is_none() -> None:
    nvml: Any = Nvml()
    assert HealthMonitor("GPU-0", nvml).look() == Health(1410, None, ("power", "temperature"))
    assert HealthMonitor("GPU-0").look() == Health()  # no driver here


@pytest.mark.usefixtures("machine")
def test_the_kernel_that_is_named_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options("--server-version", "0.5.23", "--kernel", "own", "--json")) == 0
    assert '"asked": "own"' in capsys.readouterr().out
    assert run(options("--server-version", "0.5.23", "--kernel", "server")) == 2
    error = capsys.readouterr().err
    assert "sglang is not installed in" in error
    assert "add --kernel own to time moetune's own kernel instead" in error
    assert run(options("--kernel", "theirs")) == 2


def test_the_kernel_is_that_of_the_folder_that_is_named(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kernel_file("sglang", "0.5.23", machine.folder / "wheel")
    given = ("--server-version", "0.5.23", "--server-files", str(machine.folder / "wheel"))
    assert run(options(*given, "--json")) == 0
    out = capsys.readouterr().out
    validate(json.loads(out), "measured")
    assert f'"kernel_source": "{file.source}"' in out
    assert run(options(*given, "--kernel", "own")) == 2
    assert "--server-files names the server's kernel" in capsys.readouterr().err

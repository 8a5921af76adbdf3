"""Which kernel is timed, and that times of one kernel never stand for another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications import server_kernels
from moetune.applications.environment import Installed
from moetune.applications.measure_request import MeasureRequest
from moetune.applications.measured_answer import MeasuredTuning
from moetune.applications.server_kernels import NoKernelError, choose_kernel, version_in
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_measured import tune_measured
from moetune.domain.errors import InputError
from moetune.servers.registry import open_server
from tests.applications.fake_machine import FakeMachine
from tests.measure.server_files import kernel_file

SERVER = open_server("sglang", "0.5.23")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder that the wheel of SGLang 0.5.23 was unpacked into."""
    folder = tmp_path / "wheel"
    kernel_file("sglang", "0.5.23", folder)
    (folder / "sglang-0.5.23.dist-info").mkdir()
    return folder


def install(monkeypatch: pytest.MonkeyPatch, wheel: Path, version: str = "0.5.23") -> None:
    """Have this environment hold the server."""
    installed = Installed("sglang", version, wheel / "sglang")
    monkeypatch.setattr(
        server_kernels, "find_installed", lambda name: installed if name == "sglang" else None
    )


def test_auto_takes_the_servers_kernel_where_that_version_is_installed(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, wheel)
    chosen = choose_kernel("auto", SERVER)
    assert chosen.file is not None
    assert chosen.source.startswith("sglang 0.5.23 ")
    assert Path(chosen.file.path).is_relative_to(wheel)
    own = choose_kernel("own", SERVER)
    assert (own.file, own.source) == (None, "moetune")


def test_auto_takes_moetunes_own_else_and_says_why(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_kernels, "find_installed", lambda _: None)
    chosen = choose_kernel("auto", SERVER)
    assert chosen.file is None
    assert "sglang is not installed in" in chosen.text
    install(monkeypatch, wheel, "0.5.20")
    chosen = choose_kernel("auto", SERVER)
    assert chosen.file is None
    assert "sglang 0.5.20 is installed where is measured, and 0.5.23 is tuned for" in chosen.text


def test_the_servers_kernel_that_is_not_there_is_an_error_with_a_hint(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_kernels, "find_installed", lambda _: None)
    with pytest.raises(NoKernelError, match="sglang is not installed") as caught:
        choose_kernel("server", SERVER)
    assert "--kernel own" in str(caught.value.hint)
    install(monkeypatch, wheel, "0.5.20")
    with pytest.raises(NoKernelError, match=r"sglang 0\.5\.20 is installed") as caught:
        choose_kernel("server", SERVER)
    assert "--server-version 0.5.20" in str(caught.value.hint)


def test_a_folder_of_another_version_or_without_kernels_is_refused(wheel: Path, tmp_path: Path) -> None:
    assert version_in("sglang", wheel) == "0.5.23"
    for asked in ("auto", "server"):
        with pytest.raises(NoKernelError, match=r"holds sglang 0\.5\.23, and 0\.5\.20") as caught:
            choose_kernel(asked, open_server("sglang", "0.5.20"), files=wheel)
        assert caught.value.hint == "add --server-version 0.5.23"
        with pytest.raises(NoKernelError, match="with a kernel fused_moe_kernel"):
            choose_kernel(asked, SERVER, files=tmp_path)
        with pytest.raises(NoKernelError, match="cannot be read as a directory"):
            choose_kernel(asked, SERVER, files=tmp_path / "missing")
    with pytest.raises(InputError, match="--kernel own another"):
        choose_kernel("own", SERVER, files=wheel)
    (wheel / "sglang-0.5.20.dist-info").mkdir()
    with pytest.raises(NoKernelError, match=r"0\.5\.20 and 0\.5\.23"):
        choose_kernel("auto", SERVER, files=wheel)


def test_a_kernel_with_a_parameter_that_no_release_had_is_refused(wheel: Path) -> None:
    (path,) = (path for path in wheel.rglob("*.py") if "def fused_moe_kernel(" in path.read_text())
    path.write_text(path.read_text().replace("def fused_moe_kernel(", "def fused_moe_kernel(\n    new_ptr,"))
    with pytest.raises(NoKernelError, match="new_ptr"):
        choose_kernel("auto", SERVER, files=wheel)


def tune(machine: FakeMachine, **changes: Any) -> MeasuredTuning:
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
    request = MeasureRequest("Qwen/Qwen3.5-122B-A10B", **{**values, **changes})
    return tune_measured(request, {}, gpus=machine.devices(), command=machine.command, pool=machine.pool)


def test_each_kernel_has_a_journal_and_a_second_run_has_nothing_left(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(EFFORTS["quick"], rounds=(2, 2), limit=12, layer_rounds=5, budget_seconds=None)
    monkeypatch.setattr("moetune.applications.tuning_measured.EFFORTS", {**EFFORTS, "quick": quick})
    machine = FakeMachine(tmp_path)
    own = tune(machine, kernel="own")
    theirs = tune(machine, kernel="server", server_files=wheel, force=True)
    assert theirs.measured.known == 0, "a time of the other kernel was taken"
    assert theirs.journal != own.journal
    source = choose_kernel("server", SERVER, files=wheel).source
    assert theirs.to_json()["kernel_source"] == source
    beside = json.loads(theirs.files[0].provenance.read_text())
    assert source in json.dumps(beside)
    again = tune(machine, kernel="server", server_files=wheel)
    assert again.nothing_left
    assert (again.measured.measured, again.journal) == (0, theirs.journal)
    # Another text of the kernel is another kernel.
    (path,) = (path for path in wheel.rglob("*.py") if "def fused_moe_kernel(" in path.read_text())
    path.write_text(path.read_text() + "\n")
    changed = tune(machine, kernel="server", server_files=wheel, force=True)
    assert changed.journal not in (own.journal, theirs.journal)

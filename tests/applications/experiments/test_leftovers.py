"""What a killed moetune leaves is found by what was written down, named and ended; nobody else is hurt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.experiments.arm_errors import CannotStartError, CannotStopError
from moetune.applications.experiments.leftovers import find, leftovers
from moetune.applications.experiments.ports import is_free, listeners
from moetune.applications.experiments.processes import MARK, boot_id, read_process
from moetune.applications.experiments.start_record import (
    ProcessId,
    StartRecord,
    read_records,
    remove_record,
    write_record,
)
from tests.applications.experiments.arm_world import (
    alive,
    begin,
    first_port,
    held,
    names_of_records,
    plan_of,
    running,
    until,
)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WORLD", str(tmp_path))
    yield
    monkeypatch.undo()
    assert until(lambda: not running(tmp_path)), running(tmp_path)


@pytest.fixture
def sleeper() -> Any:
    with held("sleep", "600", start_new_session=True) as process:
        yield process


def record_of(**fields: Any) -> StartRecord:
    values: dict[str, Any] = {
        "name": "b00-01",
        "mark": "0" * 32,
        "boot": boot_id(),
        "command": ("serve", "--api-key", "(redacted)"),
        "stop_s": 1.0,
    }
    return StartRecord(**values | fields)


def test_what_is_left_when_moetune_and_its_supervisor_are_killed_is_named_and_ended(tmp_path: Path) -> None:
    """The server dies with its supervisor; its grandchild in another session is found by its mark."""
    server = begin(plan_of(faults=("grandchild",), stop_s=0.5), tmp_path)
    server.wait_ready()
    assert until(lambda: len(listeners(server.port)) == 2)
    (record,) = read_records(tmp_path)
    assert record.server is not None
    os.kill(server._supervised.pid, signal.SIGKILL)
    server._supervised.close()
    server._supervised.wait_until_gone(5)
    assert until(lambda: record.server is not None and not alive(record.server.pid)), (
        "it dies with its parent"
    )
    (left,) = leftovers(tmp_path)
    (pid,) = listeners(server.port)
    assert left.describe().startswith(f"start one on port {server.port}: still runs as process {pid} (")
    left.stop()
    assert not alive(pid)
    assert is_free(server.port)
    assert leftovers(tmp_path) == ()
    assert not names_of_records(tmp_path)


def test_a_start_waits_for_what_is_left_of_another(tmp_path: Path) -> None:
    mark = "e" * 32
    with held("sleep", "600", env={MARK: mark, "PATH": os.environ["PATH"]}) as process:
        record = record_of(mark=mark)
        write_record(tmp_path, record)
        assert until(lambda: find(record))
        with pytest.raises(CannotStartError) as error:
            begin(plan_of(), tmp_path)
        assert (
            f"an earlier start is not over: start b00-01 on port 0: still runs as process {process.pid} ("
            in (error.value.message)
        )
        process.kill()
    with begin(plan_of(), tmp_path) as server:
        server.wait_ready()


def test_a_supervisor_that_still_works_is_asked_to_end_its_server(tmp_path: Path) -> None:
    server = begin(plan_of(), tmp_path)
    server.wait_ready()
    (left,) = leftovers(tmp_path)
    left.stop()
    assert "orderly end" in server.log.read_text()
    assert not names_of_records(tmp_path)
    server.stop()


def test_a_process_that_only_has_the_id_of_an_old_one_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    now = read_process(sleeper.pid)
    assert now is not None
    recycled = ProcessId(now.pid, now.started - 1)
    write_record(tmp_path, record_of(server=recycled, supervisor=recycled))
    assert leftovers(tmp_path) == ()
    assert alive(sleeper.pid)
    assert not names_of_records(tmp_path)
    same = record_of(server=ProcessId(now.pid, now.started))
    write_record(tmp_path, same)
    (left,) = leftovers(tmp_path)
    assert [process.pid for process in left.processes] == [now.pid]
    # It ends, and another process gets its id before we come to end it.
    write_record(tmp_path, replace(same, server=recycled))
    (changed,) = [replace(left, record=record) for record in read_records(tmp_path)]
    changed.stop()
    assert alive(sleeper.pid)
    left.stop()
    assert not alive(sleeper.pid)


def test_ids_of_another_boot_mean_nothing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    now = read_process(sleeper.pid)
    assert now is not None
    write_record(tmp_path, record_of(boot="another", server=ProcessId(now.pid, now.started)))
    assert leftovers(tmp_path) == ()
    assert alive(sleeper.pid)


def test_a_process_without_ids_is_found_by_its_mark(tmp_path: Path) -> None:
    """Moetune was killed between writing the record and writing the ids."""
    mark = "f" * 32
    with held("sleep", "600", env={MARK: mark, "PATH": os.environ["PATH"]}) as process:
        record = record_of(mark=mark)
        write_record(tmp_path, record)
        assert until(lambda: find(record))
        assert [found.pid for found in find(record)] == [process.pid]
        assert find(record_of(mark="f" * 31)) == ()
        (left,) = leftovers(tmp_path)
        left.stop()
        assert process.wait() == -signal.SIGTERM


def test_the_stop_command_of_a_container_is_run(tmp_path: Path) -> None:
    code = "import socket, time; s = socket.create_server(('127.0.0.1', PORT)); time.sleep(600)"
    port = first_port() + 1
    with held(sys.executable, "-S", "-c", code.replace("PORT", str(port))) as container:
        assert until(lambda: listeners(port))
        stop = ("kill", str(container.pid))
        write_record(tmp_path, record_of(port=port, stop=stop))
        (left,) = leftovers(tmp_path)
        assert "its processes are gone and something listens on its port" in left.describe()
        write_record(tmp_path, record_of(port=port, stop=(*stop, "(redacted)"), stop_redacted=True))
        (secret,) = leftovers(tmp_path)
        with pytest.raises(CannotStopError, match="a command with a secret"):
            secret.stop()
        left.stop()
        assert container.wait() == -signal.SIGTERM
    assert not names_of_records(tmp_path)


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    assert leftovers(tmp_path / "none") == ()
    write_record(tmp_path, record_of())
    folder = tmp_path / "running"
    text = (folder / "b00-01.json").read_text()
    document = json.loads(text)
    (folder / "broken.json").write_text(text[:-20])
    (folder / "other.json").write_text(text)
    (folder / "climbs.json").write_text(json.dumps(document | {"name": "../../climbs"}))
    (folder / "newer.json").write_text(json.dumps(document | {"name": "newer", "schema": "moetune.start/2"}))
    (folder / "more.json").write_text(json.dumps(document | {"name": "more", "unknown": 1}))
    (folder / "deep.json").write_text("[" * 5000)
    assert [record.name for record in read_records(tmp_path)] == ["b00-01", "more"]
    remove_record(tmp_path, "b00-01")
    remove_record(tmp_path, "b00-01")
    assert names_of_records(tmp_path) == ["more"]

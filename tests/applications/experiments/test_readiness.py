"""When a server is ready: a whole answer of 200 from its endpoint, and its log where a text is named."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.experiments import readiness
from moetune.applications.experiments.arm_errors import NeverReadyError, StartCancelledError
from moetune.applications.experiments.log_file import TextSearch
from moetune.applications.experiments.readiness import Readiness, wait_until_ready
from tests.applications.experiments.arm_world import begin, plan_of, running, until


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WORLD", str(tmp_path))
    yield
    monkeypatch.undo()
    assert until(lambda: not running(tmp_path)), running(tmp_path)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("never ready", "/health answers 503"),
        ("500", "/health answers 500"),
        ("redirect", "/health answers 302"),
        ("nothing", "/health gives no whole answer within 0.3 s"),
        ("half an answer", "/health gives no whole answer within 0.3 s"),
        ("endless answer", "/health gives no whole answer within 0.3 s"),
    ],
)
def test_a_server_that_does_not_answer_well_is_never_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_S", 0.3)
    with begin(plan_of(faults=(fault,), ready_s=1.2, stop_s=1), tmp_path) as server:
        with pytest.raises(NeverReadyError) as error:
            server.wait_ready()
        assert server.alive()
    assert f"was not ready within 1.2 s: {says}" in error.value.message
    assert "its last lines: " in error.value.message
    assert "server.ready_s" in str(error.value.hint)


def test_a_server_that_never_listens_is_told_so(tmp_path: Path) -> None:
    plan = plan_of(ready_s=0.3, stop_s=1)
    plan = type(plan)("other", ("sleep", "60"), port=plan.port, ready_s=0.3, stop_s=1)
    with begin(plan, tmp_path) as server, pytest.raises(NeverReadyError) as error:
        server.wait_ready()
    assert f"nothing listens on port {server.port}" in error.value.message
    assert "it printed nothing" in error.value.message


def test_a_server_is_ready_when_it_stops_answering_503(tmp_path: Path) -> None:
    with begin(plan_of("--ready-after", "0.7"), tmp_path) as server:
        assert server.wait_ready() > 0.5


@pytest.mark.parametrize("step", [1e9, -1e9])
def test_a_clock_that_jumps_changes_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    times = itertools.count(1e9, step)
    monkeypatch.setattr(time, "time", lambda: next(times))
    with begin(plan_of("--ready-after", "0.5", ready_s=20), tmp_path) as server:
        assert 0 < server.wait_ready() < 20


def test_the_log_has_to_say_it_too(tmp_path: Path) -> None:
    with begin(plan_of(ready_log="ready to roll", ready_s=0.5), tmp_path) as server:
        with pytest.raises(NeverReadyError) as error:
            server.wait_ready()
        assert 'its log does not say "ready to roll"' in error.value.message
    with begin(plan_of("--print", "is ready to roll!", ready_log="ready to roll"), tmp_path, "two") as server:
        server.wait_ready()


def test_waiting_can_be_cancelled(tmp_path: Path) -> None:
    asked = itertools.count()
    with begin(plan_of(faults=("never ready",)), tmp_path) as server, pytest.raises(StartCancelledError):
        server.wait_ready(lambda: next(asked) > 3)


def test_no_proxy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with begin(plan_of(), tmp_path) as server:
        server.wait_ready()


def test_a_text_is_found_wherever_a_log_is_read_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    search = TextSearch(log, "fired up")
    assert not search.found()
    log.write_bytes(b"x" * 65533 + b"fire")
    assert not search.found()
    with log.open("ab") as file:
        file.write(b"d u")
        file.flush()
        assert not search.found()
        file.write(b"p")
    assert search.found()
    # A log that was cut is another file; what was there before may be gone and has been seen.
    other = TextSearch(log, "after the cut")
    assert not other.found()
    new = tmp_path / "new"
    new.write_text("after the cut" + "y" * 70000)
    new.replace(log)
    assert other.found()
    assert TextSearch(log, "").found()


def test_a_start_that_is_over_is_not_waited_for(tmp_path: Path) -> None:
    looked = Readiness("http://127.0.0.1:9", "/health", tmp_path / "log", "never")
    assert wait_until_ready(looked, 1e9, lambda: True) is None

"""One pass of the load with real processes: generators that work, fail, hang, lie or leave things behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from moetune.applications.experiments import load as load_module
from moetune.applications.experiments.load import measure, run_pass
from moetune.applications.experiments.load_errors import LoadCancelledError, LoadError, LoadResultError
from moetune.applications.experiments.log_file import LogLimits
from moetune.applications.experiments.processes import MARK, all_processes, read_process
from moetune.domain.errors import OutputError
from moetune.domain.experiment_plan import LoadPlan

URL = "http://127.0.0.1:30001"
GENERATOR = Path(__file__).parent / "generator_double.py"


def load_that(behaviour: str, *arguments: str, **changes: object) -> LoadPlan:
    """A load whose generator is a real process with a behaviour."""
    plan = LoadPlan(
        "sglang.bench_serving",
        command=(sys.executable, str(GENERATOR), behaviour),
        arguments=arguments,
        requests=10,
        concurrency=2,
        input_tokens=8,
        output_tokens=4,
        limit_s=30.0,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def run(plan: LoadPlan, folder: Path) -> None:
    run_pass(replace(plan, folder=plan.folder or str(folder)), URL, "made", folder, "pass")


def refused(plan: LoadPlan, folder: Path) -> LoadError:
    with pytest.raises(LoadError) as caught:
        run(plan, folder)
    assert caught.value.message.isprintable()
    assert caught.value.hint
    return caught.value


def pids(folder: Path) -> list[int]:
    """Processes that the generator said it was and started."""
    return [int(word) for word in (folder / "pids").read_text().split()]


def all_gone(folder: Path) -> bool:
    return not any((found := read_process(pid)) is not None and found.runs for pid in pids(folder))


# --- a pass that works


def test_a_pass_gives_the_generators_numbers(tmp_path: Path) -> None:
    result = run_pass(load_that("work", folder=str(tmp_path)), URL, "made", tmp_path, "pass")

    assert (result.requested, result.completed, result.output_tokens) == (10, 10, 40)
    assert result.output_tokens_per_s == 20.0
    assert result.ttft_ms == 5.0


def test_the_log_says_what_was_started_and_what_it_printed(tmp_path: Path) -> None:
    run(load_that("work"), tmp_path)

    log = (tmp_path / "pass.log").read_text()
    assert log.startswith("[moetune: ")
    assert "--num-prompts 10" in log.splitlines()[0]
    assert "sending 10 requests" in log
    assert (tmp_path / "pass.log").stat().st_mode & 0o077 == 0


def test_no_secret_of_the_plan_stands_in_the_log_though_the_generator_prints_it(tmp_path: Path) -> None:
    plan = load_that(
        "print",
        *("--header", "Authorization=planted-secret-1", "--api-key", "planted-secret-2"),
        environment={"HF_TOKEN": "planted-secret-3", "MODE": "plain"},
    )

    run(plan, tmp_path)

    log = (tmp_path / "pass.log").read_text()
    assert "MODE=plain" in log
    assert "--api-key" in log
    assert "planted-secret" not in log


def test_a_short_secret_is_hidden_where_its_name_stands_beside_it(tmp_path: Path) -> None:
    run(load_that("work", "--api-key", "pw9x", environment={"API_KEY": "pw8x"}), tmp_path)

    first = (tmp_path / "pass.log").read_text().splitlines()[0]
    assert "--api-key" in first
    assert "pw9x" not in first
    assert "pw8x" not in first


def test_a_measurement_leaves_the_first_pass_out_and_has_a_seed_for_each(tmp_path: Path) -> None:
    plan = load_that("work", passes=2, seed=70, folder=str(tmp_path))

    results = measure(plan, URL, "made", tmp_path, "start")

    # The double reports its seed as input tokens.
    assert [result.input_tokens for result in results] == [71, 72]
    assert {path.name for path in tmp_path.glob("*.log")} == {f"start-pass{n}.log" for n in range(3)}


def test_a_generator_runs_in_the_plans_folder(tmp_path: Path) -> None:
    folder = tmp_path / "where"
    folder.mkdir()
    (folder / "generate").symlink_to(sys.executable)

    run(load_that("work", command=("./generate", str(GENERATOR), "work"), folder=str(folder)), tmp_path)

    assert (folder / "pids").exists()


# --- numbers that do not count


def test_a_generator_that_ends_well_with_every_request_failed_gives_no_numbers(tmp_path: Path) -> None:
    error = refused(load_that("fail-all"), tmp_path)

    assert "0 of 10 requests were answered" in error.message
    assert "connection refused" in error.message


def test_a_request_without_an_answer_spoils_the_pass(tmp_path: Path) -> None:
    assert "9 of 10 requests were answered" in refused(load_that("fail-one"), tmp_path).message


def test_a_generator_that_sends_fewer_requests_is_seen(tmp_path: Path) -> None:
    plan = load_that("fewer", generator="vllm bench serve")

    assert "sent 5 requests where the plan says 10" in refused(plan, tmp_path).message


def test_tokens_that_were_not_asked_for_are_seen(tmp_path: Path) -> None:
    assert "40 tokens were asked for and 39 counted" in refused(load_that("short"), tmp_path).message


def test_lengths_that_the_plan_lets_vary_are_taken_as_they_come(tmp_path: Path) -> None:
    run(load_that("short", "--random-range-ratio", "0.5"), tmp_path)


def test_answers_without_a_token_are_none(tmp_path: Path) -> None:
    plan = load_that("empty", "--random-range-ratio", "0.5")

    assert "not one token" in refused(plan, tmp_path).message


def test_a_metric_of_infinity_is_refused_with_its_name(tmp_path: Path) -> None:
    error = refused(load_that("infinity"), tmp_path)

    assert isinstance(error, LoadResultError)
    assert "median_ttft_ms" in error.message
    assert "inf" in error.message


# --- the file


def test_an_older_result_is_never_taken_for_this_pass(tmp_path: Path) -> None:
    run(load_that("work"), tmp_path)

    assert "wrote no result" in refused(load_that("nothing"), tmp_path).message


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("nothing", "wrote no result"),
        ("link", "wrote no result"),
        ("pipe", "no plain file"),
        ("folder", "no plain file"),
        ("huge", "more than 64 MiB"),
        ("bytes", "not UTF-8"),
        ("deep", "deeper than"),
        ("half", "not JSON"),
    ],
)
def test_a_result_that_is_none_is_named(tmp_path: Path, behaviour: str, message: str) -> None:
    error = refused(load_that(behaviour), tmp_path)

    assert isinstance(error, LoadResultError)
    assert message in error.message


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "pass.log").symlink_to(victim)

    with pytest.raises(OutputError, match="cannot be written"):
        run(load_that("work"), tmp_path)
    assert victim.read_text() == "precious"


def test_a_result_that_cannot_be_replaced_is_said(tmp_path: Path) -> None:
    (tmp_path / "pass.jsonl").mkdir()

    with pytest.raises(OutputError, match="cannot be replaced"):
        run(load_that("work"), tmp_path)


def test_a_log_has_a_limit_and_keeps_its_head_and_its_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "LOG_LIMITS", LogLimits(head_bytes=4096, tail_bytes=4096))

    run(load_that("chatter"), tmp_path)

    log = (tmp_path / "pass.log").read_bytes()
    assert len(log) < 20_000
    assert log.startswith(b"[moetune: ")
    assert b"the last line" in log


# --- the process


def test_a_generator_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    error = refused(load_that("crash"), tmp_path)

    assert "sglang.bench_serving failed with exit status 3" in error.message
    assert "ValueError: Warmup failed" in error.message
    assert str(tmp_path / "pass.log") in (error.hint or "")


def test_a_generator_that_is_killed_is_told_apart(tmp_path: Path) -> None:
    assert "killed by signal 9" in refused(load_that("killed"), tmp_path).message


@pytest.mark.parametrize("program", ["/no/such/python", "no-such-generator", "/etc/passwd"])
def test_a_missing_generator_comes_with_how_to_get_it(tmp_path: Path, program: str) -> None:
    error = refused(load_that("work", command=(program, "x")), tmp_path)

    assert program in error.message
    assert "comes with SGLang" in (error.hint or "")


def test_a_program_that_is_none_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nothing of the kind")
    program.chmod(0o755)

    assert "could not be started" in refused(load_that("work", command=(str(program),)), tmp_path).message


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no directory"):
        run(load_that("work", folder=str(tmp_path / "gone")), tmp_path)


@pytest.mark.parametrize("behaviour", ["hang", "hang-bare", "sleep-bare"])
def test_a_generator_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    # It ignores SIGTERM, and so does its child, which has left the session and holds the output open; a
    # bare one has none of its variables either, and with "sleep" its parent is gone before it.
    monkeypatch.setattr(load_module, "_STOP_S", 0.3)

    error = refused(load_that(behaviour, limit_s=1.5), tmp_path)

    assert "longer than its limit of 1.5 s" in error.message
    assert "still sending" in error.message
    assert len(pids(tmp_path)) == 2
    assert all_gone(tmp_path)


def test_a_pass_that_is_cancelled_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_STOP_S", 0.3)
    plan = load_that("hang", folder=str(tmp_path))

    with pytest.raises(LoadCancelledError):
        run_pass(plan, URL, "made", tmp_path, "pass", lambda: (tmp_path / "pids").exists())
    assert all_gone(tmp_path)


def test_what_a_generator_leaves_behind_is_ended_though_it_did_well(tmp_path: Path) -> None:
    run(load_that("leave"), tmp_path)

    assert len(pids(tmp_path)) == 2
    assert all_gone(tmp_path)


def test_an_error_in_between_ends_the_generator_too(tmp_path: Path) -> None:
    def interrupt() -> NoReturn:
        while not (tmp_path / "pids").exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    plan = load_that("sleep", folder=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_pass(plan, URL, "made", tmp_path, "pass", interrupt)
    assert all_gone(tmp_path)


def test_a_generator_dies_with_moetune(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            run(load_that("sleep"), tmp_path)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while not all_gone(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all_gone(tmp_path)


def test_a_clock_that_jumps_ends_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))

    run(load_that("work", limit_s=20.0), tmp_path)


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    other = os.spawnvpe(os.P_NOWAIT, "sleep", ["sleep", "30"], {**os.environ, MARK: "another-start"})
    try:
        run(load_that("leave"), tmp_path)
        assert other in all_processes()
        assert os.waitpid(other, os.WNOHANG) == (0, 0)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


# --- a user's own command


def test_a_users_own_command_is_loaded_with_and_read_by_its_places(tmp_path: Path) -> None:
    plan = LoadPlan(
        "command",
        command=(sys.executable, str(GENERATOR), "own", "{result}", "{requests}", "{url}"),
        requests=6,
        result={"completed": "done.count", "duration_s": "ms / 1000", "output_tokens": "tokens"},
    )

    result = run_pass(plan, URL, "made", tmp_path, "pass")

    assert (result.requested, result.completed, result.duration_s) == (6, 6, 1.5)
    assert json.loads((tmp_path / "pass.json").read_text())["url"] == URL


def test_an_argument_that_a_key_sets_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"load\.requests sets"):
        run(load_that("work", "--num-prompts", "3"), tmp_path)
    assert not (tmp_path / "pids").exists()

"""`moetune experiment` for real: its own process, real servers, signals, and what is left of all that."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetune.cli.main import run
from tests.applications.experiments.stub_world import HERE, World
from tests.applications.install_world import FOLDER, snapshot
from tests.cli.conftest import clean_environment, moetune
from tests.cli.test_schemas import validate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.applications.install_world import Kept
    from tests.cli.conftest import Result


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, free_port())
    yield made
    assert running(made) == []


def running(world: World) -> list[str]:
    """Processes of the stub that are left, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "stub_" in command and str(world.folder) in command:
                found.append(f"{entry.name} {command}")
    return found


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {one["arm"]: one["verdict"] for one in document["arms"]}


def measured(document: dict[str, Any]) -> list[tuple[object, ...]]:
    """Starts that count; one that fills caches is not repeated when it was killed after they were full."""
    return [
        (*one["result"]["start"].values(), one["attempt"])
        for one in document["starts"]
        if not one["preparing"]
    ]


def tables(found: dict[str, Kept | None]) -> dict[str, bytes]:
    return {path: kept.content for path, kept in found.items() if kept is not None}


FASTER = {"name": "faster", "arguments": ["--enable-mixed-chunk"]}
SLOWER = {"name": "slower", "environment": {"STUB_FAST": "0.8"}, "proof": "stub FAST"}


def faulty(fault: str) -> dict[str, object]:
    return {"name": fault, "environment": {"STUB_FAULT": fault}, "proof": "stub FAULT"}


def tuned(world: World) -> dict[str, object]:
    return {"name": "tuned", "configs": [str(world.folder / "better")]}


@dataclass(frozen=True)
class Whole:
    """An experiment in one piece, that several tests look at."""

    world: World
    before: dict[str, Kept | None]
    result: Result
    document: dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    world = World(tmp_path_factory.mktemp("whole"), free_port())
    world.write_plan([tuned(world), FASTER])
    before = snapshot(world.root)
    result = world.run("--json", "--markdown", "page.md")
    assert result.code == 0, result.err
    assert running(world) == []
    return Whole(world, before, result, json.loads(result.out))


def test_what_helps_stays_and_is_taken_back(whole: Whole) -> None:
    world, document = whole.world, whole.document
    validate(document, "experiment")
    assert verdicts(document) == {"tuned": "helps", "faster": "helps", "all that helped": "helps"}
    assert document["kept"]["interventions"] == ["tuned", "faster"]
    assert document["kept"]["flags"] == [{"change": "add", "words": "--enable-mixed-chunk"}]
    assert document["kept"]["command"].endswith(f"--port {world.port} --enable-mixed-chunk")
    after = tables(snapshot(world.root))
    assert [path for path in after if "provenance" not in path] == list(tables(whole.before))
    for path, content in after.items():
        assert content == (world.folder / "better" / Path(path).name).read_bytes()
    assert "| tuned | helps |" in (world.folder / "page.md").read_text()
    # The same command again has nothing to do, and says the same.
    again = world.run("--json")
    assert (again.code, json.loads(again.out)) == (0, document)
    assert "begins" not in again.err
    # How long it takes is now known.
    outlook = json.loads(world.run("--dry-run", "--json").out)
    assert outlook["start_seconds_measured"] is True
    assert outlook["finished_starts"] == len(document["starts"])
    assert 0 < outlook["start_seconds"] < 15
    _take_back(world, document, whole.before)


def _take_back(world: World, document: dict[str, Any], before: dict[str, Kept | None]) -> None:
    """`status` shows it, `uninstall` brings bytes, modes and times back, once."""
    name = document["id"]
    state = ("--state", str(world.state))
    said = moetune("status", *state, "--json", cwd=world.folder)
    shown = json.loads(said.out)
    validate(shown, "status")
    assert [(one["id"], one["standing"]) for one in shown["experiments"]] == [(name, "done")]
    assert shown["experiments"][0]["next"] == f"moetune uninstall {name}"
    dry = moetune("uninstall", name, *state, "--dry-run", "--json", cwd=world.folder)
    validate(json.loads(dry.out), "experiment-taken-back")
    assert snapshot(world.root) != before
    back = moetune("uninstall", name, *state, "--json", cwd=world.folder)
    assert back.code == 0, back.err
    answer = json.loads(back.out)
    validate(answer, "experiment-taken-back")
    assert answer["changed"] == []
    assert answer["command"].endswith(f"--port {world.port}")
    assert snapshot(world.root) == before
    assert moetune("uninstall", name, *state, cwd=world.folder).code == 0
    assert snapshot(world.root) == before
    human = moetune("status", *state, cwd=world.folder)
    assert f"experiment {name}: taken back" in human.out


def test_a_config_table_can_be_taken_away(world: World) -> None:
    world.write_plan([{"name": "none", "without_configs": True}])
    before = snapshot(world.root)
    result = world.run("--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    # The table that lies there slows the stub down: without it, it is faster.
    assert verdicts(document) == {"none": "helps"}
    assert tables(snapshot(world.root)) == {}
    name = document["id"]
    assert moetune("uninstall", name, "--state", str(world.state), cwd=world.folder).code == 0
    assert snapshot(world.root) == before


def test_the_dry_run_starts_nothing_and_changes_nothing(world: World) -> None:
    odd = {"name": "odd", "arguments": ["--served-model-name", "it's one"]}
    world.write_plan([tuned(world), odd])
    before = snapshot(world.folder)
    result = world.run("--dry-run", "--json")
    assert result.code == 0, result.err
    assert snapshot(world.folder) == before
    document = json.loads(result.out)
    validate(document, "experiment-outlook")
    assert [one["name"] for one in document["arms"]] == ["baseline", "tuned", "odd"]
    assert document["arms"][2]["command"].endswith("--served-model-name 'it'\"'\"'s one'")
    assert len(document["schedule"]) == document["planned_blocks"] * 4
    assert document["start_seconds_measured"] is False
    human = world.run("--dry-run")
    assert "at most: the limits of the plan" in human.out
    assert "block 1" in human.out


FAULTS = {
    "dies at start": "cannot start: the server died before it was ready",
    "never ready": "not ready within",
    "dies under load": "died under load",
    "killed": "memory",
    "answers 500": "load failed",
    "loses requests": "50 of 100 requests were answered",
    "infinity": "load failed",
    "hangs": "longer than its limit",
}


def test_faults_of_arms_are_told_and_the_others_go_on(world: World) -> None:
    world.server = {"ready_s": 2, "stop_s": 1}
    world.load = {"limit_s": 2}
    world.budget = {"starts": 32}  # one block
    broken = world.folder / "broken" / "E=64,N=256,device_name=NVIDIA_H200.json"
    broken.parent.mkdir()
    broken.write_text('{"1": {"BLOCK_SIZE_M": 0}}')
    world.write_plan(
        [
            *map(faulty, FAULTS),
            {"name": "fewer tokens", "environment": {"STUB_KV": "50000"}, "may_change": ["other"]},
            {"name": "silent", "environment": {"STUB_SILENT": "1"}, "proof": "never printed"},
            {"name": "broken", "configs": [str(broken.parent)]},
            {"name": "deaf", "environment": {"STUB_FAULT": "deaf", "STUB_FAST": "1.2"}, "proof": "stub FAST"},
        ]
    )
    before = snapshot(world.root)
    outlook = json.loads(world.run("--dry-run", "--json").out)
    assert [one["intervention"] for one in outlook["refused"]] == ["broken"]
    result = world.run("--json")
    assert result.code == 1, result.err
    document = json.loads(result.out)
    validate(document, "experiment")
    arms = {one["arm"]: one for one in document["arms"]}
    for name, said in FAULTS.items():
        assert (name, arms[name]["verdict"]) == (name, "failed")
        assert any(said in note for note in arms[name]["notes"]), arms[name]["notes"]
    assert {name: arms[name]["verdict"] for name in ("fewer tokens", "silent", "broken", "deaf")} == {
        "fewer tokens": "INVALID",
        "silent": "INVALID",
        "broken": "cannot activate",
        # One that does not listen to SIGTERM is killed, and its numbers count; one block decides nothing.
        "deaf": "inconclusive",
    }
    assert "kv_tokens" in arms["fewer tokens"]["validity"]["problems"][0]
    assert arms["deaf"]["comparisons"][0]["ratio"] == pytest.approx(1.2, abs=0.02)
    assert document["kept"]["interventions"] == []
    assert snapshot(world.root) == before


def test_a_known_good_server_that_does_not_run_ends_it(world: World) -> None:
    world.variables = {"STUB_FAULT": "dies at start"}
    world.write_plan([tuned(world)])
    before = snapshot(world.root)
    result = world.run()
    assert result.code == 2
    assert "the known-good server failed twice in a row" in result.err
    assert "the stub dies as it was told" in result.err
    assert snapshot(world.root) == before
    assert "half-way" in moetune("status", "--state", str(world.state), cwd=world.folder).out


def test_nothing_helps_is_1(world: World) -> None:
    world.budget = {"starts": 6}
    world.write_plan([SLOWER])
    result = world.run()
    assert result.code == 1
    assert "nothing helped, and nothing is left in place" in result.out
    assert world.run("--exit-zero").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_server_and_names_the_command_that_goes_on(
    number: signal.Signals, world: World
) -> None:
    world.load = {"limit_s": 60}
    world.variables = {"STUB_SLOW": "0.4"}
    world.write_plan([tuned(world)])
    before = snapshot(world.root)
    process = _begin(world)
    # While the tuned table lies there and its server is under load.
    _wait_for(lambda: _table_is(world, "better") and "begins" in _said(world))
    process.send_signal(number)
    assert process.wait(30) == 130
    assert running(world) == []
    assert snapshot(world.root) == before
    assert re.search(r"run it again: moetune experiment \S+plan\.toml", _said(world))


def _begin(world: World) -> subprocess.Popen[bytes]:
    with (world.folder / "said").open("wb") as said:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "moetune.cli.main",
                "experiment",
                str(world.plan),
                "--state",
                str(world.state),
            ],
            cwd=world.folder,
            env=clean_environment(),
            stdout=said,
            stderr=said,
        )


def _said(world: World) -> str:
    return (world.folder / "said").read_text()


def _table_is(world: World, folder: str) -> bool:
    """Whether the table of a folder lies where the server reads; it may be written at this moment."""
    try:
        return all(
            (world.root / FOLDER / name).read_bytes() == content
            for name, content in tables(snapshot(world.folder / folder)).items()
        )
    except OSError:
        return False


def _wait_for(holds: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


KILLER = textwrap.dedent(
    """
    import os, signal, sys
    from moetune.applications.journal import Journal
    from moetune.applications.atomic import Places
    from moetune.applications.experiments.arm_server import ArmServer

    where, left = sys.argv[1], int(sys.argv[2])

    def dying(function, before):
        def wrapped(*arguments, **named):
            global left
            left -= 1
            if left == 0 and before:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = function(*arguments, **named)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        return wrapped

    owner, name = {
        "line": (Journal, "append"),
        "file": (Places, "put"),
        "gone": (Places, "remove"),
        "ready": (ArmServer, "wait_ready"),
        "stop": (ArmServer, "stop"),
    }[where.partition("-")[0]]
    setattr(owner, name, dying(getattr(owner, name), where.endswith("-before")))
    sys.argv[1:] = sys.argv[3:]
    from moetune.cli.main import main
    main()
    """
)


def _run_and_kill(world: World, where: str, count: int) -> int:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLER,
            where,
            str(count),
            "experiment",
            str(world.plan),
            "--state",
            str(world.state),
        ],
        cwd=world.folder,
        env=clean_environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    return result.returncode


KILLS = (
    *(("line", count) for count in (1, 3, 4)),
    # From here on the tuned table is to be put in place for the start that is next.
    *(("file", count) for count in (5, 7, 8, 9, 11)),
    ("gone", 2),
    ("ready", 1),
    ("stop-before", 1),
    ("stop", 1),
    ("line-before", 3),
)


def test_killed_at_each_step_it_goes_on_and_the_state_comes_back(world: World, whole: Whole) -> None:
    world.write_plan([tuned(world), FASTER])
    before = snapshot(world.root)
    seen = []
    for where, count in KILLS:
        assert _run_and_kill(world, where, count) == -signal.SIGKILL, (where, count)
        seen.append({path: kept and kept.content for path, kept in snapshot(world.root).items()})
    # Some of the kills came in the middle of putting a table in place, or before it was taken back.
    states = [state for number, state in enumerate(seen) if state not in seen[:number]]
    assert len(states) >= 4
    result = world.run("--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert running(world) == []
    assert verdicts(document) == {"tuned": "helps", "faster": "helps", "all that helped": "helps"}
    done = measured(document)
    assert len(set(done)) == len(done)
    lines = [line for line in world.journal() if line["kind"] == "start" and not line["preparing"]]
    assert len(lines) == len(done)
    # What an experiment in one piece sees and says.
    assert measured(whole.document) == done
    assert [(one["arm"], one["verdict"], one["comparisons"]) for one in document["arms"]] == [
        (one["arm"], one["verdict"], one["comparisons"]) for one in whole.document["arms"]
    ]
    assert _table_is(world, "better")
    back = moetune("uninstall", document["id"], "--state", str(world.state), cwd=world.folder)
    assert back.code == 0, back.err
    assert snapshot(world.root) == before


def test_after_a_kill_uninstall_alone_brings_the_state_back(world: World) -> None:
    world.write_plan([tuned(world)])
    before = snapshot(world.root)
    for _ in range(8):
        if _table_is(world, "better"):
            break
        # Killed while the server of an arm runs: that of the tuned table comes within a few.
        assert _run_and_kill(world, "line", 4) == -signal.SIGKILL
        assert _run_and_kill(world, "ready", 1) == -signal.SIGKILL
    assert snapshot(world.root) != before
    (run,) = world.runs
    shown = moetune("status", "--state", str(world.state), cwd=world.folder)
    assert f"experiment {run.name}: half-way" in shown.out
    assert f"moetune experiment {world.plan}" in shown.out
    back = moetune("uninstall", run.name, "--state", str(world.state), cwd=world.folder)
    assert back.code == 0, back.err
    assert snapshot(world.root) == before
    assert running(world) == []


def test_somebody_who_changes_the_files_meanwhile_is_told(world: World) -> None:
    world.variables = {"STUB_SLOW": "0.3"}
    world.load = {"limit_s": 60}
    world.write_plan([FASTER, tuned(world)])
    process = _begin(world)
    _wait_for(lambda: "caches filled" in _said(world))
    target = next(path for path in world.root.rglob("*.json") if "down" not in path.name)
    target.write_text("{}")
    assert process.wait(30) == 2
    assert "are not as before the experiment" in _said(world)
    assert target.read_text() == "{}"


BAD_PLANS = {
    "no baseline": ("[load]\ngenerator = 'guidellm'\n[[intervention]]\nname = 'x'\n", "server"),
    "an unknown key": ("[server]\nname = 'sglang'\ncommand = ['x']\nspeed = 1\n", "speed"),
    "a negative budget": ("[budget]\nstarts = -1\n", "starts"),
    "no TOML": ("[[[[", "line 1"),
    "control characters": ("name = 'a\\u001b'\n\x1b[31m", "plan.toml"),
}


@pytest.mark.parametrize("case", sorted(BAD_PLANS))
def test_a_bad_plan_is_an_error_with_its_place(
    case: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = BAD_PLANS[case]
    world.plan.write_text(text)
    for more in ((), ("--dry-run",), ("--json",)):
        code = run(["experiment", str(world.plan), "--state", str(world.state), *more])
        err = capsys.readouterr().err
        assert code == 2
        assert said in err
        assert "Traceback" not in err
        assert "\x1b" not in err
    assert not world.runs


def test_two_arms_alike_and_a_plan_that_is_not_there(world: World) -> None:
    world.write_plan([FASTER, {**FASTER, "name": "again"}])
    result = world.run()
    assert result.code == 2
    assert "does the same as" in result.err
    world.plan.unlink()
    assert world.run().code == 2


def test_no_secret_of_the_plan_is_written_or_shown(world: World) -> None:
    secret = "correct-horse-battery-staple"
    token = "hf_" + "abcdefghijklmnop" * 2
    world.flags = ("--api-key", secret)
    world.variables = {"STUB_SAY": f"the key is {secret}, the token {token}", "HF_TOKEN": token}
    world.write_plan([faulty("dies at start")])
    shown = [world.run("--dry-run"), world.run("--dry-run", "--json"), world.run(), world.run("--json")]
    shown.append(moetune("status", "--state", str(world.state), cwd=world.folder))
    shown.append(moetune("uninstall", world.runs[0].name, "--state", str(world.state), cwd=world.folder))
    texts = [text for result in shown for text in (result.out, result.err)]
    texts += [path.read_text(errors="replace") for path in world.state.rglob("*") if path.is_file()]
    assert all(secret not in text and token not in text for text in texts)


def test_a_full_disk_ends_it_in_order_and_it_goes_on_with_room(world: World) -> None:
    world.budget = {"starts": 6}
    world.write_plan([tuned(world)])
    before = snapshot(world.root)
    limited = 'ulimit -f 10; exec "$@"'  # blocks of 1024 bytes (bash)
    command = [
        sys.executable,
        "-m",
        "moetune.cli.main",
        "experiment",
        str(world.plan),
        "--state",
        str(world.state),
    ]
    result = subprocess.run(
        ["bash", "-c", limited, "bash", *command],
        cwd=world.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(world.root) == before
    assert running(world) == []
    assert world.run().code == 1  # so few starts decide nothing


def test_the_live_view_draws_over_itself_and_is_gone_at_the_end(world: World) -> None:
    world.budget = {"starts": 6}
    world.write_plan([FASTER])
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "moetune.cli.main",
            "experiment",
            str(world.plan),
            "--state",
            str(world.state),
        ],
        cwd=world.folder,
        env=clean_environment(TERM="xterm", COLUMNS="90", LINES="30"),
        stdin=child,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(parent)
    assert process.wait(30) == 1
    text = seen.decode()
    assert "at most" in text
    assert "left" in text
    assert re.search(r"\x1b\[\dA\x1b\[J", text)
    assert re.search(r"faster: inconclusive so far", text)
    # After the last of what is drawn over comes the report, whole.
    report = text.rpartition("\x1b[J")[2]
    assert "nothing helped" in report
    assert "so far" not in report


def test_a_terminal_that_is_closed_ends_it_in_order(world: World) -> None:
    world.variables = {"STUB_SLOW": "0.4"}
    world.load = {"limit_s": 60}
    world.write_plan([tuned(world)])
    before = snapshot(world.root)
    pid, parent = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
        os.chdir(world.folder)
        command = ["-m", "moetune.cli.main", "experiment", str(world.plan), "--state", str(world.state)]
        os.execve(sys.executable, [sys.executable, *command], clean_environment(TERM="xterm"))
    _wait_for(lambda: _table_is(world, "better"))
    os.close(parent)  # as when a window is closed: SIGHUP, and every write fails
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 130
    assert snapshot(world.root) == before
    assert running(world) == []


def test_help_fits_100_columns(tmp_path: Path) -> None:
    result = moetune("experiment", "--help", cwd=tmp_path, COLUMNS="100")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 100
    assert str(HERE) not in result.out


def test_each_fault_of_a_plan_has_a_line_of_its_own(tmp_path: Path) -> None:
    plan = tmp_path / "p.toml"
    plan.write_text('[server]\nname = "sgl\\nhint: rm"\n[buget]\n[load]\ngenerator = "wrk"\n')
    result = moetune("experiment", str(plan), cwd=tmp_path)
    assert result.code == 2
    *faults, hint = result.err.splitlines()
    assert len(faults) >= 3
    assert all(fault.startswith(f"error: {plan}: ") for fault in faults)
    assert hint.startswith("hint: ")

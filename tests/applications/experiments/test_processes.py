"""A server of an experiment: started on a free port, seen dying, ended with all that it started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.experiments import arm_server, processes
from moetune.applications.experiments.arm_errors import (
    CannotStartError,
    CannotStopError,
    ForeignProcessError,
    PortKeptError,
)
from moetune.applications.experiments.arm_server import ArmServer
from moetune.applications.experiments.caches import cache_folder, needs_preparing
from moetune.applications.experiments.command_line import ArmCommand, arm_command
from moetune.applications.experiments.endings import counted, ending_text
from moetune.applications.experiments.gpu_room import GpuRoom
from moetune.applications.experiments.leftovers import leftovers
from moetune.applications.experiments.log_file import BoundedLog, LogLimits, last_lines
from moetune.applications.experiments.ports import first_free, is_free, listeners
from moetune.applications.experiments.processes import MARK, Process, end_processes, read_process, send
from moetune.applications.experiments.starting import Machine
from moetune.applications.nvml import Detected, Device, GpuProcess
from moetune.domain.experiment_plan import ServerPlan
from tests.applications.experiments.arm_world import (
    NO_GPUS,
    ROOT,
    SERVER,
    alive,
    begin,
    first_port,
    get,
    held,
    names_of_records,
    plan_of,
    running,
    until,
)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test of this module leaves no process, whatever it does to them."""
    monkeypatch.setenv("WORLD", str(tmp_path))
    yield
    monkeypatch.undo()
    assert until(lambda: not running(tmp_path)), running(tmp_path)


def test_a_server_runs_until_it_is_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    plan = plan_of(faults=("child",))
    with begin(plan, tmp_path) as server:
        assert server.wait_ready() >= 0
        assert server.alive()
        assert get(server.url + "/health") == 200
        assert names_of_records(tmp_path) == ["one"]
        pids = listeners(server.port)
        # Ctrl-C in a terminal goes to the processes of one session: not to the server.
        assert [os.getsid(pid) for pid in pids] == list(pids)
        assert pids[0] != os.getsid(0)
        assert server.log.read_text() == "fired up\n"
    assert not server.alive()
    assert server.log.read_text() == "fired up\norderly end\n"
    assert is_free(server.port)
    assert not names_of_records(tmp_path)
    server.stop()  # again does nothing


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dies at start", "it ended with exit status 7; its last lines: ValueError: no such model"),
        ("killed for memory", "it was ended by SIGKILL, as the kernel does when memory runs out"),
    ],
)
def test_a_server_that_dies_before_it_is_ready_says_how(tmp_path: Path, fault: str, says: str) -> None:
    with begin(plan_of(faults=(fault,)), tmp_path) as server:
        with pytest.raises(CannotStartError) as error:
            server.wait_ready()
        assert says in error.value.message
        assert not server.alive()


def test_a_server_that_dies_under_load_is_seen_and_its_children_end(tmp_path: Path) -> None:
    with begin(plan_of(faults=("child",)), tmp_path) as server:
        server.wait_ready()
        assert get(server.url + "/die") == 0
        assert until(lambda: not server.alive())
        assert "it ended with exit status 3" in server.ending()
        assert running(tmp_path), "a child outlives its server"
        server.stop()
        assert not running(tmp_path)


@pytest.mark.parametrize(
    ("command", "folder", "says"),
    [
        (("/no/such/server", "--port", "{port}"), "", "/no/such/server: No such file or directory"),
        (("no-such-server-on-the-path",), "", "no-such-server-on-the-path: No such file or directory"),
        (("/etc/passwd",), "", "Permission denied"),
        (("true",), "/no/such/folder", "/no/such/folder: No such file or directory"),
        (("true", "\0"), "", "embedded null byte"),
    ],
)
def test_a_command_that_cannot_run_is_named(
    tmp_path: Path, command: tuple[str, ...], folder: str, says: str
) -> None:
    plan = ServerPlan("other", command, port=first_port(), folder=folder)
    with pytest.raises(CannotStartError) as error:
        begin(plan, tmp_path)
    assert says in error.value.message
    assert until(lambda: not names_of_records(tmp_path))


def test_a_command_that_goes_to_the_background_is_told_about_stop(tmp_path: Path) -> None:
    plan = ServerPlan("other", ("true",), port=first_port(), ready_s=5)
    with begin(plan, tmp_path) as server, pytest.raises(CannotStartError) as error:
        server.wait_ready()
    assert "needs server.stop" in error.value.message


@pytest.mark.parametrize("fault", ["ignores SIGTERM", "grandchild"])
def test_what_ignores_the_orderly_stop_is_killed(tmp_path: Path, fault: str) -> None:
    """A grandchild in a session of its own holds the port; both are found."""
    with begin(plan_of(faults=(fault,), stop_s=0.5), tmp_path) as server:
        server.wait_ready()
        if fault == "grandchild":
            assert until(lambda: len(listeners(server.port)) == 2)
            pids = listeners(server.port)
            assert len({os.getsid(pid) for pid in pids}) == 2
    assert is_free(server.port)
    assert not running(tmp_path)


def test_each_start_takes_the_first_free_port(tmp_path: Path) -> None:
    plan = plan_of()
    port = first_free(plan.port)
    assert port is not None
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with begin(plan, tmp_path) as server:
            assert server.port > port
            server.wait_ready()
            assert get(server.url) == 200
        fixed = ServerPlan("other", (*SERVER[:-1], str(port)), port=port)
        with pytest.raises(CannotStartError) as error:
            begin(fixed, tmp_path, "two")
    assert f"port {port} is held by process {os.getpid()}" in error.value.message
    assert "{port}" in str(error.value.hint)


def test_somebody_elses_answer_is_not_taken_for_the_servers(tmp_path: Path) -> None:
    """The plan's command ignores the port, and somebody else's server takes it."""
    port = first_free(first_port())
    assert port is not None
    with begin(ServerPlan("other", ("sleep", "60"), port=port, stop_s=1, ready_s=20), tmp_path) as server:
        with begin(ServerPlan("other", (*SERVER[:-1], str(port)), port=port), tmp_path / "two") as other:
            other.wait_ready()
            with pytest.raises(CannotStartError) as error:
                server.wait_ready()
        assert f"port {port} is answered by another server: process " in error.value.message
        assert "small_server.py" in error.value.message


def test_a_server_that_prints_without_end_fills_no_disk(tmp_path: Path) -> None:
    limits = LogLimits(head_bytes=20_000, tail_bytes=50_000)
    plan = plan_of("--print", "the first line", faults=("prints without end",))
    with begin(plan, tmp_path, machine=Machine(detect=Detected, limits=limits)) as server:
        server.wait_ready()
        assert until(lambda: b"are left out here" in server.log.read_bytes())
        sizes = []
        for _ in range(20):
            time.sleep(0.02)
            sizes.append(server.log.stat().st_size)
        assert get(server.url) == 200
    text = server.log.read_text()
    assert max(sizes) < 20_000 + 2 * 50_000 + 100 + 2 * 65536
    assert text.startswith("the first line\n")
    (note,) = [line for line in text.splitlines() if "left out" in line]
    lines = [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]
    assert lines == sorted(lines)
    gaps = [a for a, b in pairwise(lines) if b != a + 1]
    assert len(gaps) == 1, "the head and the tail are whole"
    assert int(note.split()[1]) > 100_000


def test_a_log_is_cut_in_place_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = BoundedLog(tmp_path / "log", LogLimits(1000, 1000))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    for number in range(1000):
        log.write(b"line %d\n" % number)
    log.close()
    text = (tmp_path / "log").read_text()
    assert len(text) < 4000
    assert text.startswith("line 0\n")
    assert text.endswith("line 999\n")
    assert text.count("left out") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_secrets_stand_in_no_record_log_or_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "from-the-environment-1")
    printed = "args: from-the-environment-1 in-the-plan-2 on-the-line-3 default hf_0123456789abc"
    monkeypatch.setenv("AUTH_KEY", "default")
    plan = plan_of(
        *("--api-key", "on-the-line-3"),
        faults=("never ready",),
        environment={"OTHER_API_KEY": "in-the-plan-2", "PRINTED": printed},
    )
    with begin(plan, tmp_path) as server:
        assert until(lambda: "fired up" in server.log.read_text())
        record = (tmp_path / "running" / "one.json").read_text()
        texts = [record, server.log.read_text(), server.ending()]
        environ = Path(f"/proc/{json.loads(record)['server']['pid']}/environ").read_bytes()
        assert b"in-the-plan-2" in environ, "the server itself gets them"
        watchers = [text for text in running(tmp_path) if "supervisor" in text]
        assert not any("on-the-line-3" in text for text in watchers)
    for text in texts:
        for secret in ("from-the-environment-1", "in-the-plan-2", "on-the-line-3"):
            assert secret not in text
    # A value that is a word is kept where lines have to be read, and not shown.
    assert "(redacted) default" in texts[1]
    assert "default" not in texts[2]
    assert "hf_0123456789abc" not in texts[2]
    assert stat.S_IMODE(server.log.stat().st_mode) == 0o600


def test_a_variable_is_added_replaced_or_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEPT", "GONE", "NEW"):
        monkeypatch.setenv(name, "own")
    monkeypatch.setenv("EMPTY", "")
    plan = ServerPlan(
        "other",
        ("sh", "-c", 'echo "$KEPT ${GONE-none} $NEW ${EMPTY-none}."; exec sleep 60'),
        port=first_port(),
        environment={"GONE": "", "NEW": "plan"},
        stop_s=1,
    )
    with begin(plan, tmp_path) as server:
        assert until(lambda: server.log.read_text() == "own none plan .\n"), server.log.read_text()


def test_case_46_each_command_has_kernels_of_its_own_and_is_prepared_once(tmp_path: Path) -> None:
    printing = ("sh", "-c", "echo $TRITON_CACHE_DIR {cache}; exec sleep 60")
    plan = ServerPlan("other", printing, port=first_port(), stop_s=2)
    caches = tmp_path / "caches"
    command = arm_command(plan, ())
    assert needs_preparing(command, caches)
    with ArmServer.start(plan, command, tmp_path, name="one", caches=caches, machine=NO_GPUS) as server:
        assert until(lambda: server.log.read_text().count("\n"))
        one, two = server.log.read_text().split()
        assert one == two
        assert Path(one).is_relative_to(caches)
        assert stat.S_IMODE(Path(one).stat().st_mode) == 0o700
        assert needs_preparing(command, caches), "a start that was never loaded has not filled it"
        server.mark_prepared()
    assert not needs_preparing(command, caches)
    other = ServerPlan("other", (*printing, "more"), port=first_port())
    assert needs_preparing(arm_command(other, ()), caches)
    assert cache_folder(caches, arm_command(other, ())) != cache_folder(caches, command)


def test_a_server_that_writes_its_log_itself_has_a_log_of_limited_size(tmp_path: Path) -> None:
    with begin(plan_of("--log-file", "{log}"), tmp_path) as server:
        server.wait_ready()
        assert until(lambda: "this stands in the log file" in server.log.read_text())
    assert not (tmp_path / "one.pipe").exists()
    assert (tmp_path / "one.command.log").read_text() == "fired up\norderly end\n"


def container(tmp_path: Path, **fields: Any) -> ServerPlan:
    """A plan whose command only asks a daemon for a server, as `docker run -d` does."""
    pid, log = tmp_path / "pid", tmp_path / "container.log"
    words = " ".join(map(shlex.quote, SERVER))
    script = f"{words} >{log} 2>&1 & echo $! >{pid}"
    port = first_port()
    daemon = ("env", "-u", MARK, "setsid", "sh", "-c", script)
    # What a daemon starts descends from the daemon: here from the process that runs this test.
    (tmp_path / "daemon").write_text(json.dumps([word.replace("{port}", str(port)) for word in daemon]))
    client = ("sh", "-c", f"touch {tmp_path}/asked; while ! test -e {pid}; do sleep 0.02; done")
    values: dict[str, Any] = {"port": port, "stop_s": 3, "ready_s": 10} | fields
    return ServerPlan("other", client, **values)


@pytest.fixture
def docker(tmp_path: Path) -> Any:
    """A daemon that starts a server when a client asks for it."""
    code = (
        "import json, pathlib, subprocess, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "while not (here / 'asked').exists(): time.sleep(0.02)\n"
        "subprocess.run(json.loads((here / 'daemon').read_text()), cwd=sys.argv[2])\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(ROOT)])
    yield process
    process.kill()
    process.wait()
    if (tmp_path / "pid").exists():
        subprocess.run(["kill", "-9", (tmp_path / "pid").read_text().strip()], stderr=subprocess.DEVNULL)


@pytest.mark.usefixtures("docker")
def test_a_container_is_stopped_and_followed_by_the_commands_of_the_plan(tmp_path: Path) -> None:
    plan = container(
        tmp_path,
        stop=("sh", "-c", f"kill $(cat {tmp_path}/pid); echo stopped"),
        logs=("tail", "-n", "+1", "-F", f"{tmp_path}/container.log"),
        ready_log="fired up",
    )
    with begin(plan, tmp_path) as server:
        server.wait_ready()
        assert server.alive()
        assert server.log.read_text().count("fired up") == 1
    assert is_free(server.port)
    assert "orderly end" in (tmp_path / "container.log").read_text()
    assert (tmp_path / "one.command.log").read_text() == "stopped\n"
    assert not names_of_records(tmp_path)


@pytest.mark.usefixtures("docker")
def test_a_container_that_dies_is_seen(tmp_path: Path) -> None:
    plan = container(tmp_path, stop=("true",))
    with begin(plan, tmp_path) as server:
        server.wait_ready()
        get(server.url + "/die")
        assert until(lambda: not server.alive())


@pytest.mark.usefixtures("docker")
def test_a_container_that_is_left_keeps_its_port_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_server, "_PORT_FREE_S", 0.3)
    server = begin(container(tmp_path, stop=("sh", "-c", "exit 4")), tmp_path)
    server.wait_ready()
    with pytest.raises(PortKeptError) as error:
        server.stop()
    pid = (tmp_path / "pid").read_text().strip()
    assert f"by process {pid} (" in error.value.message
    assert "the stop command ended with 4" in error.value.message
    (left,) = leftovers(tmp_path)
    assert f"something listens on its port {server.port}: process {pid} (" in left.describe()
    with pytest.raises(CannotStopError, match="ended with 4"):
        left.stop()
    os.kill(int(pid), signal.SIGKILL)
    assert until(lambda: is_free(server.port))
    assert leftovers(tmp_path) == ()


def gpus(*processes: GpuProcess, used: int = 0, index: int = 0) -> Detected:
    return Detected(
        (Device(index, "NVIDIA H200", "9.0", f"GPU-{index}", 1 << 37, used, processes=processes),)
    )


def test_a_gpu_with_somebody_elses_process_is_refused_before_anything_starts(tmp_path: Path) -> None:
    busy = Machine(detect=lambda: gpus(GpuProcess(os.getpid(), 3 << 30)))
    with pytest.raises(ForeignProcessError) as error:
        begin(plan_of(), tmp_path, machine=busy)
    assert "GPU 0 (NVIDIA H200)" in error.value.message
    assert f"process {os.getpid()} (" in error.value.message
    assert "python" in error.value.message
    assert "3.0 GiB" in error.value.message
    assert not names_of_records(tmp_path)
    assert not running(tmp_path)
    with begin(plan_of(gpus=(1,)), tmp_path, machine=busy):
        """The server does not use that GPU."""


def test_gpu_memory_that_stays_is_told(tmp_path: Path) -> None:
    answers = [gpus(), gpus(used=9 << 30), gpus(used=1 << 20)]
    room = GpuRoom.take((), lambda: answers[0] if len(answers) == 1 else answers.pop(0))
    room.wait_until_freed()
    assert len(answers) == 1, "it waits until the driver has given it back"
    used = [0]
    machine = Machine(detect=lambda: gpus(used=used[0] << 30), freed_s=0)
    server = begin(plan_of(), tmp_path, machine=machine)
    used[0] = 40
    with pytest.raises(CannotStopError, match=r"GPU 0 \(NVIDIA H200\): 40.0 GiB more than before the start"):
        server.stop()


STAGES = {
    "before the supervisor": "arm_server.Supervised = die",
    "before the order": "supervised.json.dumps = die",
    "while it starts": "supervised.Supervised.wait = die",
    "started": "arm_server.ArmServer.wait_ready = die",
    "ready": "arm_server.ArmServer.mark_prepared = die",
    "while it stops": "supervised.Supervised.close = die",
}


@pytest.mark.parametrize("stage", STAGES)
def test_moetune_killed_at_any_stage_leaves_nothing_running(tmp_path: Path, stage: str) -> None:
    driver = f"""
        import os, signal, sys
        from pathlib import Path
        from moetune.applications.experiments import arm_server, supervised
        from tests.applications.experiments.arm_world import begin, plan_of

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        plan = plan_of(faults=("grandchild",), stop_s=0.5)
        {STAGES[stage]}
        server = begin(plan, Path({str(tmp_path)!r}))
        server.wait_ready()
        server.mark_prepared()
        server.stop()
        print("it lives")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(driver)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert until(lambda: not running(tmp_path)), running(tmp_path)
    if stage not in ("before the supervisor", "before the order"):
        assert until(lambda: not names_of_records(tmp_path)), "the supervisor says that it is over"
    assert leftovers(tmp_path) == ()
    assert not names_of_records(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_moetune_ends_its_server(tmp_path: Path, number: signal.Signals) -> None:
    driver = f"""
        from pathlib import Path
        from tests.applications.experiments.arm_world import begin, plan_of
        with begin(plan_of(faults=("never ready",)), Path({str(tmp_path)!r})) as server:
            print("started", flush=True)
            server.wait_ready()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(driver)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        # As a terminal does: to the whole group.
        os.killpg(process.pid, number)
    assert until(lambda: not running(tmp_path)), running(tmp_path)
    assert not names_of_records(tmp_path)


def test_a_supervisor_that_is_killed_is_seen_and_the_server_ends_all_the_same(tmp_path: Path) -> None:
    server = begin(plan_of(faults=("grandchild", "ignores SIGTERM"), stop_s=0.3), tmp_path)
    server.wait_ready()
    os.kill(server._supervised.pid, signal.SIGKILL)
    assert until(lambda: not server.alive())
    assert running(tmp_path), "the grandchild is in nobody's care"
    server.stop()
    assert is_free(server.port)
    assert not names_of_records(tmp_path)


def test_a_signal_reaches_no_process_that_only_has_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_KILL_S", 0.3)
    with held("sleep", "60") as process:
        found = read_process(process.pid)
        assert found is not None
        send(Process(found.pid, found.started + 1), signal.SIGKILL)
        orderly, left = end_processes(lambda: [Process(found.pid, 1, state="S")], None, 0.0, lambda: None)
        assert not orderly
        assert left
        assert alive(process.pid)
        send(found, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_how_a_process_ended_is_told_in_words(tmp_path: Path) -> None:
    counters = tmp_path / "memory.events"
    counters.write_text("low 0\noom 3\noom_kill 2\n")
    before = counted([counters, tmp_path / "none"])
    counters.write_text("low 0\noom 4\noom_kill 3\n")
    after = counted([counters])
    assert "host memory ran out" in ending_text(-9, before, after)
    assert str(counters) in ending_text(1, before, after)
    assert "host memory ran out" not in ending_text(-9, after, after)
    assert ending_text(-11, {}, {}) == "it was ended by SIGSEGV"
    assert "after SIGKILL" in ending_text(137, {}, {})
    assert "does not find" in ending_text(127, {}, {})


def test_the_last_lines_of_a_log_steer_no_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n" * 9 + b"0%\r50%\r100%\n\n\x1b[31mred\x1b[0m \xff\n" + b"y" * 5000)
    lines = last_lines(log)
    assert len(lines) == 6
    assert lines[-3] == "100%"
    assert lines[-2] == "red \ufffd"
    assert len(lines[-1]) == 300
    assert last_lines(tmp_path / "none") == ()


def test_a_run_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(Exception, match="it is a link"):
        begin(plan_of(), tmp_path / "link")
    with pytest.raises(ValueError, match="no name of a start"):
        begin(plan_of(), tmp_path, "../x")
    assert isinstance(arm_command(plan_of(), ()), ArmCommand)

"""Servers through ssh, against a real client and daemon of a few lines: started, cut off, ended, named."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.applications.experiments import remote, remote_script
from moetune.applications.experiments.arm_errors import (
    CannotStartError,
    CannotStopError,
    ForeignProcessError,
)
from moetune.applications.experiments.arm_server import ArmServer
from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.leftovers import leftovers
from moetune.applications.experiments.ports import is_free
from moetune.applications.experiments.processes import all_processes
from moetune.applications.experiments.start_record import read_records
from moetune.applications.experiments.starting import Machine
from moetune.applications.nvml import Detected
from moetune.domain.errors import InputError, OutputError
from moetune.domain.experiment_plan import ServerPlan
from tests.applications.experiments import arm_world
from tests.applications.experiments.arm_world import (
    HERE,
    ROOT,
    first_port,
    get,
    names_of_records,
    plan_of,
    until,
)

TOOL = HERE / "fake_ssh.py"
FAR = "127.0.0.2"


# A busy machine must not miss so many signs of life that a server is ended for it.
FAST = Machine(detect=Detected, beat_s=0.5)


def begin(plan: ServerPlan, folder: Path, machine: Machine = FAST) -> ArmServer:
    return arm_world.begin(plan, folder, machine=machine)


class Far:
    """Another machine: what it started, and what ssh was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.bin, self.temporary = self.home / "bin", self.home / "tmp"
        for place in (self.bin, self.temporary):
            place.mkdir(parents=True)
        self.calls = folder / "calls"

    def processes(self) -> list[str]:
        """Commands of what runs there, its daemon left out."""
        found = []
        for pid in all_processes():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if f"FAR={self.folder}".encode() in environment and b"--daemon" not in command:
                found.append(f"{pid} {command!r}")
        return found

    def clients(self) -> list[int]:
        """Processes of ssh on this machine."""
        found = []
        for pid in all_processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if str(TOOL).encode() in command and f"FAKE_SSH={self.folder}/".encode() in environment:
                found.append(pid)
        return found

    def script(self, name: str, text: str) -> None:
        """Put a command on the other machine."""
        (self.bin / name).write_text("#!/bin/sh\n" + textwrap.dedent(text))
        (self.bin / name).chmod(0o755)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    machine = Far(tmp_path)
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {TOOL} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    place = tmp_path / "socket"
    environment = {
        "PATH": f"{machine.bin}:{os.environ['PATH']}",
        "HOME": str(machine.home),
        "FAR": str(tmp_path),
        "TMPDIR": str(machine.temporary),
    }
    daemon = subprocess.Popen(
        [sys.executable, "-I", "-S", str(TOOL), "--daemon", str(place)],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=machine.home,
        start_new_session=True,
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == b"listens\n"
    monkeypatch.setenv("FAKE_SSH", str(place))
    monkeypatch.setenv("FAKE_SSH_LOG", str(machine.calls))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    try:
        yield machine
        assert until(lambda: not machine.processes()), machine.processes()
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()


def far_plan(*arguments: str, faults: tuple[str, ...] = (), **fields: Any) -> ServerPlan:
    values: dict[str, Any] = {"host": "far", "stop_s": 1.0} | fields
    return plan_of("--host", FAR, *arguments, faults=faults, **values)


def test_a_server_on_another_machine_runs_until_it_is_stopped(far: Far, tmp_path: Path) -> None:
    plan = far_plan(
        "--print",
        'it\'s $HOME; "a" `b`\n#c',
        environment={"A": "it's $HOME\n'x'", "HF_TOKEN": "hf_secretsecret"},
    )
    command = arm_command(plan, ())
    run, caches = tmp_path / "run", tmp_path / "caches"
    with ArmServer.start(plan, command, run, name="one", caches=caches, machine=FAST) as server:
        server.wait_ready()
        assert get(server.url + "/health") == 200
        assert server.alive()
        assert server.log.read_text().startswith('it\'s $HOME; "a" `b`\n#c\n')
        (pid,) = [int(text.split()[0]) for text in far.processes() if "small_server" in text]
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"A=it's $HOME\n'x'" in environment
        assert os.getsid(pid) == pid
        (cache,) = [value for value in environment if value.startswith(b"TRITON_CACHE_DIR=")]
        place = Path(cache.decode().partition("=")[2])
        assert place.is_relative_to(far.home / ".cache/moetune")
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        # What another user of either machine sees in its list of processes.
        seen = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in far.clients()]
        assert seen
        assert not any(b"hf_secretsecret" in text for text in seen)
        assert not any("hf_secretsecret" in text for text in far.processes())
    assert "orderly end" in server.log.read_text()
    assert not far.processes()
    assert is_free(server.port)
    assert not names_of_records(run)
    assert "hf_secretsecret" not in far.calls.read_text()
    for call in map(json.loads, far.calls.read_text().splitlines()):
        assert call[-3:-1] == ["--", "far"]
        assert "BatchMode=yes" in call
    assert not list(far.temporary.iterdir())


def test_what_ignores_the_orderly_stop_is_killed_there_too(far: Far, tmp_path: Path) -> None:
    with begin(far_plan(faults=("grandchild", "ignores SIGTERM")), tmp_path / "run") as server:
        server.wait_ready()
        assert until(lambda: len(far.processes()) > 1)
    assert not far.processes()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dies at start", "it ended with exit status 7; its last lines: ValueError: no such model"),
        ("killed for memory", "it ended with exit status 137, as a shell does after SIGKILL"),
    ],
)
def test_a_server_that_dies_there_says_how(far: Far, tmp_path: Path, fault: str, says: str) -> None:
    assert far.folder == tmp_path
    with begin(far_plan(faults=(fault,)), tmp_path / "run") as server:
        with pytest.raises(CannotStartError) as error:
            server.wait_ready()
        assert says in error.value.message


def test_a_command_that_is_not_there_is_named(far: Far, tmp_path: Path) -> None:
    plan = ServerPlan("other", ("no-such-server",), host="far", port=first_port(), stop_s=1)
    with begin(plan, tmp_path / "run") as server, pytest.raises(CannotStartError) as error:
        server.wait_ready()
    assert "no-such-server: not found" in error.value.message
    assert not far.processes()


def test_what_the_host_lacks_is_named(far: Far, tmp_path: Path) -> None:
    far.script("mktemp", "exit 1")
    with begin(far_plan(), tmp_path / "run") as server, pytest.raises(CannotStartError) as error:
        server.wait_ready()
    assert "far cannot run it: no temporary folder" in error.value.message


def cut_by_client(_: ArmServer, far: Far) -> None:
    (client,) = far.clients()
    os.kill(client, signal.SIGKILL)


def cut_by_supervisor(server: ArmServer, far: Far) -> None:
    assert far.processes()
    os.kill(server._supervised.pid, signal.SIGKILL)


def silence(_: ArmServer, far: Far) -> None:
    """The network is gone and neither end is told."""
    (client,) = far.clients()
    os.kill(client, signal.SIGSTOP)


@pytest.mark.parametrize("cut", [cut_by_client, cut_by_supervisor, silence])
def test_a_connection_that_ends_ends_the_server(far: Far, tmp_path: Path, cut: Any) -> None:
    # The end of a connection is noticed at once, not by the signs of life that stay away.
    machine = Machine(detect=Detected, beat_s=0.25 if cut is silence else 60.0)
    server = begin(far_plan(faults=("grandchild",)), tmp_path / "run", machine=machine)
    server.wait_ready()
    assert far.processes()
    cut(server, far)
    assert until(lambda: not far.processes()), "nothing there waits for a connection that never comes back"
    if cut is cut_by_client:
        assert until(lambda: not server.alive())
        assert "the connection to far ended (ssh: -9)" in server.ending()
    if cut is silence:
        for client in far.clients():
            os.kill(client, signal.SIGKILL)
    server.stop()
    assert until(lambda: not far.clients())


@pytest.mark.parametrize("stage", ["while it starts", "ready", "while it stops"])
def test_moetune_killed_leaves_nothing_on_the_other_machine(far: Far, tmp_path: Path, stage: str) -> None:
    patches = {
        "while it starts": "supervised.Supervised.wait = die",
        "ready": "arm_server.ArmServer.alive = lambda self: True; arm_server.ArmServer.mark_prepared = die",
        "while it stops": "supervised.Supervised.close = die",
    }
    driver = f"""
        import os, signal
        from pathlib import Path
        from moetune.applications.experiments import arm_server, supervised
        from tests.applications.experiments.test_remote import begin, far_plan

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        {patches[stage]}
        server = begin(far_plan(faults=("grandchild",)), Path({str(tmp_path / "run")!r}))
        server.wait_ready()
        server.mark_prepared()
        server.stop()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(driver)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert until(lambda: not far.processes() and not far.clients()), far.processes()
    assert until(lambda: not names_of_records(tmp_path / "run"))


def test_what_is_left_on_another_machine_is_named_and_ended(far: Far, tmp_path: Path) -> None:
    """All that watched over it, on both machines, was killed."""
    run = tmp_path / "run"
    server = begin(far_plan(), run)
    server.wait_ready()
    watchers = [int(text.split()[0]) for text in far.processes() if "small_server" not in text]
    for pid in [*watchers, server._supervised.pid]:
        os.kill(pid, signal.SIGKILL)
    server._supervised.close()
    server._supervised.wait_until_gone(5)
    assert until(lambda: not far.clients())
    (text,) = far.processes()
    (left,) = leftovers(run)
    assert left.describe().startswith("start one on far (")
    assert left.describe().endswith(f"still runs as process {text.split()[0]}")
    (record,) = read_records(run)
    hidden = far.folder / "socket"
    hidden.rename(far.folder / "hidden")
    (unknown,) = leftovers(run)
    assert "whether it still runs is not known" in unknown.describe()
    (far.folder / "hidden").rename(hidden)
    left.stop()
    assert not far.processes()
    assert leftovers(run) == ()
    assert record.host == "far"


def test_the_commands_of_a_container_run_on_its_machine(far: Far, tmp_path: Path) -> None:
    pid, log = far.home / "pid", far.home / "container.log"
    words = " ".join((sys.executable, "-S", str(HERE / "small_server.py"), "--host", FAR, "--port", "{port}"))
    # As `docker run -d`: the server gets away from whoever asked for it.
    start = f"env -u MOETUNE_START setsid {words} >{log} 2>&1 & echo $! >{pid}"
    plan = ServerPlan(
        "other",
        ("sh", "-c", start),
        host="far",
        port=first_port(),
        stop_s=2,
        ready_s=20,
        ready_log="fired up",
        stop=("sh", "-c", f"kill $(cat {pid}); echo stopped"),
        logs=("tail", "-n", "+1", "-F", str(log)),
    )
    with begin(plan, tmp_path / "run") as server:
        server.wait_ready()
        assert server.alive()
    assert "orderly end" in log.read_text()
    assert "stopped" in (tmp_path / "run" / "one.command.log").read_text()


def test_a_port_is_free_on_both_machines(far: Far, tmp_path: Path) -> None:
    plan = far_plan()
    first = remote.free_port("far", plan.port)
    assert first is not None
    with begin(plan, tmp_path / "run") as server:
        server.wait_ready()
        second = remote.free_port("far", first)
        assert second is not None
        assert second > first
    assert not far.processes()


def test_a_host_that_cannot_be_reached_is_named(far: Far, tmp_path: Path) -> None:
    with pytest.raises(CannotStartError) as error:
        begin(far_plan(host="refused"), tmp_path / "run")
    assert "ssh refused ended with 255: refused: Permission denied (publickey)." in error.value.message
    assert "ssh -o BatchMode=yes -- refused true" in str(error.value.hint)
    assert not names_of_records(tmp_path / "run")
    assert not far.processes()


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "a;b", "", "a\nb", "$(x)", "--"])
def test_what_is_no_host_never_reaches_ssh(host: str) -> None:
    with pytest.raises(InputError):
        remote.ssh_command(host)


def test_a_gpu_of_the_other_machine_that_is_in_use_is_refused(far: Far, tmp_path: Path) -> None:
    far.script(
        "nvidia-smi",
        """
        case "$1" in
          --query-gpu=*) echo '0, GPU-a, 3, 143771, NVIDIA H200'; echo '1, GPU-b, 9, 143771, NVIDIA H200' ;;
          *) echo 'GPU-b, 4242, 70000, python, -m, x' ;;
        esac
        """,
    )
    found = remote.detect_gpus("far").devices
    assert [(one.index, one.name, one.memory_used_bytes) for one in found] == [
        (0, "NVIDIA H200", 3 << 20),
        (1, "NVIDIA H200", 9 << 20),
    ]
    with pytest.raises(ForeignProcessError) as error:
        begin(far_plan(), tmp_path / "run")
    assert "GPU 1 (NVIDIA H200): process 4242 (on far, 68.4 GiB)" in error.value.message
    with begin(far_plan(gpus=(0,)), tmp_path / "run"):
        """That GPU is free."""


NAME = "E=8,N=64,device_name=NVIDIA_H200.json"


def test_config_files_are_put_there_as_they_are_and_removed(far: Far) -> None:
    files = {f"configs/triton_3_6_0/{NAME}": b"{\n 'a'\t$x `y` \\n %s}", NAME: "é\n\n".encode()}
    folder = Path(remote.put_files("far", files))
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json")} == files
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    remote.remove_files("far", str(folder))
    assert not folder.exists()
    remote.remove_files("far", str(folder))
    assert not far.processes()


@pytest.mark.parametrize("name", ["../x.json", "/etc/passwd", "a/../" + NAME, "x.json", "-rf", ""])
def test_only_names_of_config_files_are_put_there(name: str) -> None:
    with pytest.raises((InputError, OutputError)):
        remote.put_files("far", {name: b"{}"})


@pytest.mark.parametrize("folder", ["/", "/home", "/tmp/x/../moetune-files.abcdef", "moetune-files.abcdef"])
def test_only_folders_that_moetune_made_are_removed(folder: str) -> None:
    with pytest.raises(InputError):
        remote.remove_files("far", folder)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"environment": {"A B": "1"}}, "no name of a variable"),
        ({"environment": {"A;x": "1"}}, "no name of a variable"),
        ({"logs": ("cat", "{log}"), "command": ("x", "--log", "{log}")}, "is a file of this machine"),
    ],
)
@pytest.mark.usefixtures("far")
def test_what_another_machine_cannot_have_is_refused(tmp_path: Path, fields: Any, says: str) -> None:
    values: dict[str, Any] = {"command": ("x",), "host": "far", "port": first_port()} | fields
    with pytest.raises(InputError, match=says):
        begin(ServerPlan("other", **values), tmp_path / "run")


@pytest.mark.usefixtures("far")
def test_a_stop_command_that_fails_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotStopError, match="the stop command ended with 5"):
        remote.stop_marked("far", "0" * 32, ("sh", "-c", "exit 5"), 1.0)
    assert remote.marked_processes("far", "0" * 32) == ()
    assert tmp_path.exists()


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=15)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.dictionaries(st.sampled_from(["A1", "B2"]), TEXTS))
def test_any_argument_and_variable_arrives_as_it_is(words: list[str], variables: dict[str, str]) -> None:
    """Through the login shell, the script and the shell that becomes the server."""
    server = remote_script.FarServer((sys.executable, "-S", "-c", "PRINT", *words), variables, stop_s=1)
    code = "import json, os, sys; e = os.environ.get; print(json.dumps([sys.argv[1:], e('A1'), e('B2')]))"
    script = remote_script.server_script(server, "nonce", "0" * 32).replace("PRINT", shlex.quote(code))
    # The server alone, without those who watch over it.
    with tempfile.TemporaryDirectory() as folder:
        alone = f"\n(variables; export SHELL_FOLDER={folder}; server_command)\n"
        done = subprocess.run(
            ["sh", "-c", remote_script.BOOT],
            input=remote_script.framed(script.replace(remote_script.SERVER, alone)).encode(),
            capture_output=True,
            check=False,
            env={"PATH": os.environ["PATH"], "A1": "login", "LANG": "C.UTF-8"},
        )
    known = {"A1": "login"} | variables
    assert json.loads(done.stdout) == [words, known["A1"] or None, known.get("B2") or None]

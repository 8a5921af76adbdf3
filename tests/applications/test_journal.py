"""The journal: durable lines, a cut last one, locks, full disks, strangers."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.journal import (
    _OWN_KERNELS,
    Journal,
    JournalBusyError,
    own_kernel,
    run_folder,
    state_root,
)
from moetune.domain.errors import InputError, OutputError
from tests.applications.fake_machine import PROBLEM, ROOT


def lines_of(root: Path) -> list[dict[str, object]]:
    with Journal.open(root, PROBLEM, "GPU-0") as journal:
        return journal.lines


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        assert journal.lines == []
        journal.append("time", m=1, time_us=2.5)
        journal.append("failed", why="x")
    assert lines_of(tmp_path) == [{"kind": "time", "m": 1, "time_us": 2.5}, {"kind": "failed", "why": "x"}]


def test_every_cut_of_the_last_line_costs_that_line_only(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        journal.append("time", m=1)
        journal.append("time", m=2)
        path = journal.path
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
            assert journal.lines == [{"kind": "time", "m": 1}]
            assert journal.dropped is (cut > start)
            journal.append("time", m=3)
        assert lines_of(tmp_path) == [{"kind": "time", "m": 1}, {"kind": "time", "m": 3}]


def test_a_cut_header_begins_anew(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        path = journal.path
    path.write_bytes(path.read_bytes()[:20])
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        journal.append("time", m=1)
    assert lines_of(tmp_path) == [{"kind": "time", "m": 1}]


@given(cut=st.binary(min_size=1, max_size=40))
def test_a_broken_line_in_the_middle_is_an_error_that_names_it(
    cut: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("journal")
    with Journal.open(root, PROBLEM, "GPU-0") as journal:
        journal.append("time", m=1)
        path = journal.path
    header, line = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"{" + cut.replace(b"\n", b"") + b"\n" + line)
    with pytest.raises(InputError, match="broken in line 2"):
        Journal.open(root, PROBLEM, "GPU-0")


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0"), pytest.raises(JournalBusyError, match="another moetune"):
        Journal.open(tmp_path, PROBLEM, "GPU-0")
    # Another GPU is another journal, and a closed one is free.
    with Journal.open(tmp_path, PROBLEM, "GPU-0"), Journal.open(tmp_path, PROBLEM, "GPU-1"):
        pass


def test_each_problem_and_each_gpu_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = {
        run_folder(tmp_path, PROBLEM, "GPU-0"),
        run_folder(tmp_path, PROBLEM, "GPU-1"),
        run_folder(tmp_path, replace(PROBLEM, N=512), "GPU-0"),
        run_folder(tmp_path, replace(PROBLEM, routing="zipf:1.2"), "GPU-0"),
    }
    assert len(folders) == 4


def test_times_of_a_kernel_whose_text_changed_are_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        journal.append("time")
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        assert len(journal.lines) == 1
    changed = tmp_path / "measure"
    changed.mkdir()
    for name in _OWN_KERNELS:
        text = files("moetune.measure").joinpath(name).read_text("utf-8")
        (changed / name).write_text(text + "# another text\n")
    own_kernel.cache_clear()
    monkeypatch.setattr("moetune.applications.journal.files", lambda _: changed)
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        assert journal.lines == []
    # A server's kernel is named with the digest of its own file.
    of_server = replace(PROBLEM, kernel_source="sglang 0.5.23 03001b759f81")
    there = run_folder(tmp_path, of_server, "GPU-0")
    monkeypatch.undo()
    own_kernel.cache_clear()
    assert run_folder(tmp_path, of_server, "GPU-0") == there


def test_a_journal_of_another_problem_is_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        path = journal.path
    header = json.loads(path.read_text())
    path.write_text(json.dumps({**header, "gpu_uuid": "GPU-7"}) + "\n")
    with pytest.raises(InputError, match="no journal of this problem"):
        Journal.open(tmp_path, PROBLEM, "GPU-0")


def test_folders_are_private_and_those_of_others_are_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        folder = journal.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "journal.jsonl").stat().st_mode) == 0o600
    folder.chmod(0o777)
    with pytest.raises(OutputError, match="someone else"):
        Journal.open(tmp_path, PROBLEM, "GPU-0")


def test_a_linked_journal_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = run_folder(tmp_path, PROBLEM, "GPU-0")
    folder.mkdir(parents=True, mode=0o700)
    (folder / "journal.jsonl").symlink_to(victim)
    with pytest.raises(OutputError):
        Journal.open(tmp_path, PROBLEM, "GPU-0")
    assert victim.read_text() == "precious"


FULL_DISK = textwrap.dedent("""
    import resource, signal, sys
    from pathlib import Path
    from moetune.applications.journal import Journal
    from moetune.domain.errors import OutputError
    from tests.applications.fake_machine import PROBLEM
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Journal.open(Path(sys.argv[1]), PROBLEM, "GPU-0") as journal:
        size = journal.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        written = 0
        try:
            for number in range(100):
                journal.append("time", m=number)
                written += 1
        except OutputError as error:
            assert journal.path.read_bytes().endswith(bytes([10])), "half a line is left"
            print(written, error.message, "HINT", error.hint)
""")


def test_a_full_disk_keeps_what_was_written_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    written, _, message = done.stdout.partition(" ")
    assert int(written) > 1
    assert "cannot be written: File too large" in message
    assert "run the same command again" in message
    # Nothing of the line that did not fit is left.
    assert lines_of(tmp_path) == [{"kind": "time", "m": number} for number in range(int(written))]


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from moetune.applications.journal import Journal
    from tests.applications.fake_machine import PROBLEM
    with Journal.open(Path(sys.argv[1]), PROBLEM, "GPU-0") as journal:
        for number in range(5):
            journal.append("time", m=number)
        os.kill(os.getpid(), signal.SIGKILL)
""")


def test_a_killed_process_leaves_all_its_lines_and_no_lock(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["m"] for line in lines_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_line_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fsync

    def counted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    monkeypatch.setattr("os.fsync", counted)
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        journal.append("time", m=1)
        assert synced[-1] == journal.path.stat().st_size
        before = len(synced)
        journal.append("compiled", durable=False)
        assert len(synced) == before
        journal.append("time", m=2)
        assert synced[-1] == journal.path.stat().st_size


def test_the_state_directory_is_given_or_that_of_the_environment() -> None:
    assert state_root("/given", {"MOETUNE_STATE": "/variable"}) == Path("/given")
    assert state_root(None, {"MOETUNE_STATE": "/variable", "XDG_STATE_HOME": "/xdg"}) == Path("/variable")
    assert state_root(None, {"XDG_STATE_HOME": "/xdg", "HOME": "/home/a"}) == Path("/xdg/moetune")
    # The XDG specification: a relative path is to be ignored.
    assert state_root(None, {"XDG_STATE_HOME": "xdg", "HOME": "/home/a"}) == Path(
        "/home/a/.local/state/moetune"
    )

"""A set of files is there whole or not at all: full disks, interrupts, kills and other people's links."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications import atomic
from moetune.applications.atomic import open_places
from moetune.domain.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAIR = {"configs/triton_3_6_0/up.json": "new up", "configs/triton_3_6_0/down.json": "new down"}
OLD = {"configs/triton_3_6_0/up.json": "old up", "configs/triton_3_6_0/down.json": "old down"}


def write(root: Path, texts: Mapping[str, str]) -> None:
    with open_places(root, texts) as places:
        places.replace(texts)


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_files_and_their_directories_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", PAIR)
    assert tree(tmp_path / "a" / "b") == PAIR


def test_files_are_replaced(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    write(tmp_path, PAIR)
    assert tree(tmp_path) == PAIR


def test_new_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path, PAIR)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.json")} == {0o640}


def failing(monkeypatch: pytest.MonkeyPatch, name: str, at_call: int, failure: BaseException) -> None:
    """Let the n-th call of a function of `os` fail, and all before and after it work."""
    real: Callable[..., object] = getattr(os, name)
    calls = 0

    def call(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise failure
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("old", [{}, OLD], ids=["new", "over old files"])
@pytest.mark.parametrize(
    ("name", "at_call"), [("fsync", 1), ("fsync", 2), ("replace", 1), ("replace", 2), ("fsync", 3)]
)
@pytest.mark.parametrize(
    "failure", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["io", "ctrl-c"]
)
def test_a_failure_anywhere_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: dict[str, str],
    name: str,
    at_call: int,
    failure: BaseException,
) -> None:
    root = tmp_path / "out"
    if old:
        write(root, old)
    failing(monkeypatch, name, at_call, failure)
    wanted = OutputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        write(root, PAIR)
    monkeypatch.undo()
    assert tree(tmp_path) == {f"out/{path}": text for path, text in old.items()}
    assert bool(old) == root.exists()


def run_in_child(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


LIMITED = """
    import json, resource, sys
    from pathlib import Path
    from moetune.applications.atomic import open_places
    from moetune.domain.errors import OutputError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    texts = json.loads(sys.argv[2])
    try:
        with open_places(Path(sys.argv[1]), texts) as places:
            places.replace(texts)
    except OutputError as error:
        print(error.message, "|", error.hint)
        sys.exit(error.exit_code)
"""


def test_a_limit_on_file_sizes_leaves_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    larger = {"configs/triton_3_6_0/up.json": "small", "configs/triton_3_6_0/down.json": "x" * 5000}
    child = run_in_child(LIMITED, str(tmp_path), json.dumps(larger))
    assert child.returncode == 2
    assert "cannot write" in child.stdout
    assert "down.json: a limit on the size of files is reached" in child.stdout
    assert child.stderr == ""
    assert tree(tmp_path) == OLD


FULL = """
    import errno, os, sys
    from pathlib import Path
    from moetune.applications.atomic import open_places
    from moetune.domain.errors import OutputError
    root = Path(sys.argv[1])
    def write(texts):
        with open_places(root, texts) as places:
            places.replace(texts)
    write({"configs/t/up.json": "old up", "configs/t/down.json": "old down"})
    if sys.argv[2] == "simulated":
        def fsync(descriptor):
            if os.fstat(descriptor).st_size > 65536:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync = fsync
    try:
        write({"configs/t/up.json": "new up", "configs/t/down.json": "x" * 200_000})
    except OutputError as error:
        print(error.message, "|", error.hint)
    print(sorted((path.name, path.read_text()) for path in root.rglob("*") if path.is_file()))
"""
MOUNT = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1/out" real'


def test_a_full_disk_leaves_the_old_pair(tmp_path: Path) -> None:
    """On a real file system of 64 KiB; simulated only where this user may not mount one."""
    arguments = ["sh", "-c", MOUNT, "sh", str(tmp_path), sys.executable, textwrap.dedent(FULL)]
    for namespace in (["unshare", "-m"], ["unshare", "-rm"]):
        try:
            child = subprocess.run(
                [*namespace, *arguments], capture_output=True, text=True, timeout=60, check=False
            )
        except FileNotFoundError:
            continue
        if child.stdout:
            break
    else:
        child = run_in_child(FULL, str(tmp_path / "out"), "simulated")
    message, files = child.stdout.splitlines()
    assert "the disk is full | free some space" in message
    assert files == "[('down.json', 'old down'), ('up.json', 'old up')]"


LOOP = """
    import sys
    from pathlib import Path
    from moetune.applications.atomic import open_places
    root = Path(sys.argv[1])
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        text = f"{number} " + "x" * 20_000
        texts = {"configs/t/up.json": text, "configs/t/down.json": text}
        with open_places(root, texts) as places:
            places.replace(texts)
"""


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_interrupted_leaves_no_half_file(tmp_path: Path, kill: signal.Signals) -> None:
    root = tmp_path / "out"
    for attempt in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LOOP), str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.01 + 0.011 * attempt)
            child.send_signal(kill)
            child.wait(timeout=30)
        files = {path.name: path.read_text() for path in root.rglob("*.json")}
        for text in files.values():
            assert text.endswith(" " + "x" * 20_000)  # whole
        if kill == signal.SIGINT:
            assert len(set(files.values())) <= 1  # of one pair
            assert len(files) in (0, 2)
            assert not list(root.rglob(".moetune-*"))
    write(root, {"configs/t/up.json": "a", "configs/t/down.json": "b"})
    assert tree(root) == {"configs/t/up.json": "a", "configs/t/down.json": "b"}  # and no leftovers


def _write_many(root: str, name: str) -> None:
    for _ in range(20):
        write(Path(root), {"a/up.json": name, "a/down.json": name})


def test_two_writers_never_mix_their_pairs(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), name)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert tree(tmp_path) in ({"a/up.json": name, "a/down.json": name} for name in ("one", "two"))


def test_a_place_that_another_process_holds_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_LOCK_SECONDS", 0.05)
    with open_places(tmp_path, ["a/x"]), pytest.raises(OutputError, match="another process"):
        write(tmp_path, {"a/x": "text"})


def test_an_output_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="a file") as caught:
            write(root, PAIR)
        assert str(tmp_path / "file") in caught.value.message
        assert caught.value.hint is not None
        assert "--out" in caught.value.hint
    assert tree(tmp_path) == {"file": "mine"}


def test_an_output_directory_that_is_not_writable_is_named(tmp_path: Path) -> None:
    root = tmp_path / "locked"
    root.mkdir(mode=0o555)
    tmp_path.chmod(0o755)

    def attempt() -> None:
        os.chdir(tmp_path)  # the folders above may be closed to others
        if os.geteuid() == 0:
            os.setgroups([])
            os.setuid(65534)
        try:
            write(Path("locked"), PAIR)
        except OutputError as error:
            os._exit(2 if "permission denied" in error.message and "--out" in (error.hint or "") else 3)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=attempt)
    child.start()
    child.join(60)
    assert child.exitcode == 2
    assert list(root.iterdir()) == []


def test_a_linked_directory_below_the_root_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "out"
    (root / "configs").mkdir(parents=True)
    (root / "configs" / "triton_3_6_0").symlink_to(elsewhere)
    with pytest.raises(OutputError, match="symbolic link"):
        write(root, PAIR)
    assert list(elsewhere.iterdir()) == []


def test_a_linked_file_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "out"
    (root / "a").mkdir(parents=True)
    (root / "a" / "up.json").symlink_to(victim)
    with pytest.raises(OutputError, match="symbolic link"):
        write(root, {"a/down.json": "x", "a/up.json": "y"})
    assert victim.read_text() == "precious"
    assert [path.name for path in (root / "a").iterdir()] == ["up.json"]


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", {"a/x": "text"})
    assert tree(tmp_path / "real") == {"a/x": "text"}


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    with open_places(tmp_path, ["directory", "pipe", "large", "none"]) as places:
        for name in ("directory", "pipe"):
            with pytest.raises(OutputError, match="no plain file"):
                places.read(name, 10)
        with pytest.raises(OutputError, match="larger"):
            places.read("large", 10)
        assert places.read("large", 11) == b"x" * 11
        assert places.read("none", 10) is None


def test_directories_that_stayed_empty_are_removed(tmp_path: Path) -> None:
    with open_places(tmp_path / "a" / "b", ["c/d/x"]):
        assert (tmp_path / "a" / "b" / "c" / "d").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    write(tmp_path / "a", PAIR)
    write(tmp_path / "a", PAIR)
    (tmp_path / "file").write_text("")
    for root, path in ((tmp_path / "file", "x"), (tmp_path, "a"), (tmp_path, "a/configs")):
        with pytest.raises(OutputError):
            write(root, {path: "text"})
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("root", ["a\0b", "x" * 5000])
def test_a_root_that_is_no_path_is_named(root: str) -> None:
    with pytest.raises(OutputError) as caught:
        write(Path(root), PAIR)
    assert caught.value.message.isprintable()

"""A pair of files changes as one: killed at any step, every server starts, and the next command ends it."""

from __future__ import annotations

import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.install_plan import InstallRequest, prepare_install
from moetune.applications.installing import install
from moetune.applications.installs import status
from moetune.applications.manifest import open_ledger
from moetune.applications.uninstalling import UninstallRequest, uninstall
from moetune.domain.errors import OutputError
from tests.applications.install_world import DOWN, FOLDER, UP, pair, snapshot, start, table, texts, write

if TYPE_CHECKING:
    from collections.abc import Callable

# Both sides of the assertion (0.5.13) and of each change in the lookup of down files.
STARTED = ("0.5.5", "0.5.9", "0.5.12", "0.5.13", "0.5.16", "0.5.23")
STALE = "configs/triton_3_4_0"
TREES = {
    "a pair is replaced": pair(64, FOLDER),
    "a pair is new": {f"{FOLDER}/other.txt": "not ours\n"},
    "only an up file was there": {f"{FOLDER}/{UP}": table(64)},
    "an older pair of another Triton shows behind": {**pair(64, FOLDER), **pair(32, STALE)},
    "a new pair over an older one of another Triton": pair(32, STALE),
}
# What changes a file system, and what makes that last.
CALLS = ("open", "mkdir", "replace", "unlink", "rmdir", "fsync", "fchmod", "utime")


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", int)


def request(tmp_path: Path) -> InstallRequest:
    source = tmp_path / "source"
    if not source.exists():
        write(source, pair(16))
    return InstallRequest(
        paths=(source,),
        server="sglang",
        server_version="0.5.12",
        triton_version="3.6.0",
        root=tmp_path / "root",
        state=tmp_path / "state",
    )


def killed_at(call: int, action: Callable[[], object]) -> bool:
    """Run an action in a process that is killed before its n-th change; whether it came that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def function(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return real(*arguments, **options)

            return function

        try:
            for name in CALLS:
                # What a kill leaves does not depend on what reached the disk.
                setattr(os, name, counted(int if name == "fsync" else getattr(os, name)))
            action()
        finally:
            os._exit(0)
    _, code = os.waitpid(child, 0)
    return os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGKILL


STARTS: set[frozenset[tuple[str, str]]] = set()
"""Trees from which every server has been seen to start."""


def check_every_server_starts(root: Path) -> None:
    tree = frozenset(texts(root).items())
    for version in () if tree in STARTS else STARTED:
        start(version, root)
    STARTS.add(tree)
    names = [path.name for path in (root / "configs").iterdir()]
    # Case 55: an entry that begins so and is no version ends SGLang at the next miss.
    assert all(re.fullmatch(r"triton_[0-9_]+", name) for name in names if name.startswith("triton_"))


def without_times(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: None if kept is None else (kept.content, kept.mode) for name, kept in tree.items()}


@pytest.mark.parametrize("name", sorted(TREES))
def test_case_55_killed_at_any_step_of_an_install_every_server_starts(name: str, tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    write(root, TREES[name])
    before = snapshot(root)
    prepared = prepare_install(request(tmp_path), {})
    after = {**TREES[name], **pair(16, FOLDER)}
    ends: set[str] = set()
    kills = 0
    while killed_at(kills, lambda: install(prepared, {})):
        check_every_server_starts(root)
        answer = status(state, {})
        assert not answer.pending
        check_every_server_starts(root)
        ends.add("after" if texts(root) == after else "before")
        if texts(root) == after:
            # Whatever the kill left of the records, it can be taken back.
            assert [one.fine for one in answer.installs] == [True]
            uninstall(UninstallRequest(root=root, state=state), {})
        else:
            assert answer.installs == ()
        # An empty directory is what a kill before the first record leaves.
        made = {FOLDER: None} if FOLDER not in before else {}
        assert snapshot(root) in (before, {**before, **made})
        if made and (root / FOLDER).exists():
            (root / FOLDER).rmdir()
        kills += 1
        shutil.rmtree(state, ignore_errors=True)
    assert kills > 40
    assert ends == {"before", "after"}
    assert texts(root) == after


@pytest.mark.parametrize("name", sorted(TREES))
def test_case_55_killed_at_any_step_of_an_uninstall_every_server_starts(name: str, tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    kept_root, kept_state = tmp_path / "kept root", tmp_path / "kept state"
    write(root, TREES[name])
    before = snapshot(root)
    install(prepare_install(request(tmp_path), {}), {})
    shutil.copytree(root, kept_root)
    shutil.copytree(state, kept_state)
    back = UninstallRequest(root=root, state=state)
    kills = 0
    while killed_at(kills, lambda: uninstall(back, {})):
        check_every_server_starts(root)
        answer = status(state, {})
        check_every_server_starts(root)
        if answer.installs:
            uninstall(back, {})
        assert snapshot(root) == before
        kills += 1
        for live, kept in ((root, kept_root), (state, kept_state)):
            shutil.rmtree(live)
            shutil.copytree(kept, live)
    assert kills > 30
    assert snapshot(root) == before


def test_a_naive_exchange_ends_the_servers_that_assert(tmp_path: Path) -> None:
    """What the order of the steps is for: up first, or down removed first, and 0.5.12 does not start."""
    root = write(tmp_path, {**pair(64, FOLDER), **pair(32, "configs/triton_3_4_0")})
    (root / FOLDER / UP).write_text(table(16))
    with pytest.raises(AssertionError):
        start("0.5.12", root)
    (root / FOLDER / DOWN).unlink()
    with pytest.raises(AssertionError):
        start("0.5.12", root)
    (root / FOLDER / DOWN).write_text("{}\n")
    assert start("0.5.12", root)[64][1] is None


def failing(monkeypatch: pytest.MonkeyPatch, name: str, at_call: int) -> None:
    real = getattr(os, name)
    calls = 0

    def function(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, function)


# Four files that are kept, the journal, the empty table, up, down, and the manifest.
REPLACED = 9


@pytest.mark.parametrize("at_call", range(1, REPLACED + 1))
def test_a_full_disk_leaves_all_as_it_was(
    at_call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = write(tmp_path / "root", pair(64, FOLDER)), tmp_path / "state"
    before = snapshot(root)
    prepared = prepare_install(request(tmp_path), {})
    failing(monkeypatch, "replace", at_call)
    with pytest.raises(OutputError, match="disk is full") as failed:
        install(prepared, {})
    assert "--out" not in f"{failed.value.hint}"
    assert without_times(snapshot(root)) == without_times(before)
    assert status(state, {}).installs == ()


def test_no_more_is_written_than_was_let_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "root", pair(64, FOLDER))
    failing(monkeypatch, "replace", REPLACED + 1)
    assert install(prepare_install(request(tmp_path), {}), {}).found


def test_what_somebody_changed_after_a_kill_is_left(tmp_path: Path) -> None:
    root, state = write(tmp_path / "root", pair(64, FOLDER)), tmp_path / "state"
    prepared = prepare_install(request(tmp_path), {})
    kills = 0
    while killed_at(kills, lambda: install(prepared, {})):
        with open_ledger(state, writing=False) as ledger:
            under_way = ledger.journal() is not None
        if under_way and (root / FOLDER / DOWN).read_text() == "{}\n":
            break
        shutil.rmtree(state, ignore_errors=True)
        write(root, pair(64, FOLDER))
        for marker in (root / FOLDER).glob(".moetune*"):
            marker.unlink()
        kills += 1
    (root / FOLDER / UP).write_text(table(128))
    answer = status(state, {})
    assert answer.recovered is not None
    assert set(answer.recovered.left) == {f"{FOLDER}/{UP}", f"{FOLDER}/{DOWN}"}
    assert (root / FOLDER / UP).read_text() == table(128)
    assert answer.installs == ()
    check_every_server_starts(root)


def test_what_cannot_be_completed_now_is_named_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = write(tmp_path / "root", pair(64, FOLDER)), tmp_path / "state"
    prepared = prepare_install(request(tmp_path), {})
    kills = 0
    while not list((root / FOLDER).glob(".moetune-*.transaction")):
        shutil.rmtree(state, ignore_errors=True)
        assert killed_at(kills, lambda: install(prepared, {}))
        kills += 1
    with monkeypatch.context() as broken:
        failing(broken, "replace", 1)
        answer = status(state, {})
    assert "disk is full" in answer.pending
    assert not answer.fine
    answer = status(state, {})
    assert answer.fine
    assert texts(root) == pair(16, FOLDER)


def test_an_install_first_completes_what_was_interrupted(tmp_path: Path) -> None:
    root, state = write(tmp_path / "root", pair(64, FOLDER)), tmp_path / "state"
    first = prepare_install(request(tmp_path), {})
    kills = 0
    while not list((root / FOLDER).glob(".moetune-*.transaction")):
        shutil.rmtree(state, ignore_errors=True)
        assert killed_at(kills, lambda: install(first, {}))
        kills += 1
    other = write(tmp_path / "other", pair(32))
    done = install(prepare_install(replace(request(tmp_path), paths=(other,)), {}), {})
    assert done.recovered is not None
    assert done.recovered.completed
    assert texts(root) == pair(32, FOLDER)
    uninstall(UninstallRequest(what=done.id, root=root, state=state), {})
    assert texts(root) == pair(16, FOLDER)


def test_what_somebody_else_began_is_named_and_left_to_them(tmp_path: Path) -> None:
    root, state = write(tmp_path / "root", pair(64, FOLDER)), tmp_path / "state"
    first = prepare_install(request(tmp_path), {})
    kills = 0
    while not list((root / FOLDER).glob(".moetune-*.transaction")):
        shutil.rmtree(state, ignore_errors=True)
        assert killed_at(kills, lambda: install(first, {}))
        kills += 1
    (marker,) = (root / FOLDER).glob(".moetune-*.transaction")
    other = replace(request(tmp_path), paths=(write(tmp_path / "other", pair(32)),), state=tmp_path / "mine")
    done = install(prepare_install(other, {}), {})
    assert done.interrupted == (str(marker),)
    # Their next command sees that the files are no longer what it began with.
    answer = status(state, {})
    assert answer.recovered is not None
    assert set(answer.recovered.left) == {f"{FOLDER}/{UP}", f"{FOLDER}/{DOWN}"}
    assert answer.installs == ()
    assert texts(root) == pair(32, FOLDER)

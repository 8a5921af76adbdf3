"""What was there comes back byte for byte; what somebody changed since stays; records lead nowhere else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.install_plan import InstallRequest, prepare_install
from moetune.applications.installing import Installed, install
from moetune.applications.installs import Standing, status
from moetune.applications.manifest import open_ledger
from moetune.applications.uninstalling import Outcome, Uninstalled, UninstallRequest, uninstall
from moetune.domain.errors import InputError, MoetuneError, OutputError
from tests.applications.install_world import (
    DOWN,
    FOLDER,
    UP,
    install_package,
    pair,
    plain_environment,
    snapshot,
    start,
    table,
    texts,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HOME = "sglang/srt/layers/moe/moe_runner/triton_utils"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_environment(monkeypatch)
    monkeypatch.setattr(os, "fsync", int)


def put(tmp_path: Path, files: dict[str, str], **more: Any) -> Installed:
    number = len(list(tmp_path.glob("source*")))
    source = write(tmp_path / f"source{number}", files)
    given: dict[str, Any] = {
        "server": "sglang",
        "server_version": "0.5.12",
        "triton_version": "3.6.0",
        "root": tmp_path / "root",
        "state": tmp_path / "state",
    }
    request = InstallRequest(paths=(source,), **{**given, **more})
    return install(prepare_install(request, {}), {})


def take_back(tmp_path: Path, what: str | None = None, **more: Any) -> Uninstalled:
    request = UninstallRequest(what=what, **{"root": tmp_path / "root", "state": tmp_path / "state", **more})
    return uninstall(request, {})


def outcomes(answer: Uninstalled) -> list[str]:
    return [outcome.value for one in answer.removals for outcome in one.outcomes.values()]


def test_bytes_times_and_modes_come_back(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {f"{FOLDER}/{UP}": '{"8": {}}\r\n', f"{FOLDER}/notes": "x"})
    (root / FOLDER / UP).chmod(0o640)
    os.utime(root / FOLDER / UP, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    before = snapshot(root)
    put(tmp_path, pair(16))
    assert snapshot(root) != before
    assert (root / FOLDER / UP).stat().st_mode & 0o777 == 0o644
    answer = take_back(tmp_path)
    assert sorted(outcomes(answer)) == ["removed", "restored"]
    assert snapshot(root) == before
    assert (root / FOLDER / UP).stat().st_atime_ns >= 1_600_000_000_123_456_789
    assert status(tmp_path / "state", {}).installs == ()
    assert not list((tmp_path / "state").rglob("blobs/*"))


def test_directories_that_were_made_go_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "root" / "configs").mkdir(parents=True)
    before = snapshot(tmp_path / "root")
    put(tmp_path, pair(16))
    (tmp_path / "root" / "configs" / "triton_3_4_0").mkdir()
    take_back(tmp_path)
    assert snapshot(tmp_path / "root") == {**before, "configs/triton_3_4_0": None}


def test_case_54_what_an_upgrade_wrote_over_it_stays_and_is_named(tmp_path: Path) -> None:
    root = write(tmp_path / "root", pair(64, FOLDER))
    put(tmp_path, pair(16))
    for name in (UP, DOWN):
        (root / FOLDER / name).write_text(table(32))
    before = snapshot(root)
    assert [one.fine for one in status(tmp_path / "state", {}).installs] == [False]
    answer = take_back(tmp_path)
    assert set(answer.left) == {str(root / FOLDER / UP), str(root / FOLDER / DOWN)}
    assert not answer.did_something
    assert snapshot(root) == before
    # The record stays until somebody says that it is not needed.
    assert len(status(tmp_path / "state", {}).installs) == 1
    take_back(tmp_path, forget=True)
    assert snapshot(root) == before
    assert status(tmp_path / "state", {}).installs == ()


def test_case_54_a_file_that_an_upgrade_removed_is_not_put_back(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
    put(tmp_path, {UP: table(16)})
    (root / FOLDER / UP).unlink()
    answer = take_back(tmp_path)
    assert [one.standings for one in answer.removals] == [{f"{FOLDER}/{UP}": Standing.MISSING}]
    assert texts(root) == {}


def test_half_of_a_pair_does_not_go_back_beside_half_of_somebodys(tmp_path: Path) -> None:
    root = write(tmp_path / "root", pair(64, FOLDER))
    put(tmp_path, pair(16))
    (root / FOLDER / DOWN).write_text(table(16, GROUP_SIZE_M=32))
    answer = take_back(tmp_path)
    assert outcomes(answer) == ["left", "left"]
    start("0.5.12", root)
    assert (root / FOLDER / UP).read_text() == table(16)


def test_the_rest_of_an_install_is_taken_back(tmp_path: Path) -> None:
    other = "E=8,N=256,device_name=NVIDIA_H200.json"
    root = write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
    put(tmp_path, {UP: table(16), other: table(16)})
    (root / FOLDER / other).write_text(table(32))
    answer = take_back(tmp_path)
    assert answer.left == (str(root / FOLDER / other),)
    assert answer.did_something
    assert texts(root) == {f"{FOLDER}/{UP}": table(64), f"{FOLDER}/{other}": table(32)}


class TestOnTopOfEachOther:
    def test_the_later_one_first(self, tmp_path: Path) -> None:
        root = write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        before = snapshot(root)
        first, second = put(tmp_path, {UP: table(16)}), put(tmp_path, {UP: table(32)})
        take_back(tmp_path, second.id)
        assert texts(root) == {f"{FOLDER}/{UP}": table(16)}
        take_back(tmp_path, first.id)
        assert snapshot(root) == before

    def test_the_earlier_one_first(self, tmp_path: Path) -> None:
        root = write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        before = snapshot(root)
        first, second = put(tmp_path, {UP: table(16)}), put(tmp_path, {UP: table(32)})
        assert [one.fine for one in status(tmp_path / "state", {}).installs] == [True, True]
        assert outcomes(take_back(tmp_path, first.id)) == [Outcome.COVERED.value]
        assert texts(root) == {f"{FOLDER}/{UP}": table(32)}
        take_back(tmp_path, second.id)
        assert snapshot(root) == before

    def test_all_at_once(self, tmp_path: Path) -> None:
        root = write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        before = snapshot(root)
        for size in (16, 32, 128):
            put(tmp_path, {UP: table(size)})
        take_back(tmp_path, all=True)
        assert snapshot(root) == before
        assert not list((tmp_path / "state").rglob("blobs/*"))

    def test_again_after_somebody_restored_it(self, tmp_path: Path) -> None:
        root = write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        first = put(tmp_path, {UP: table(16)})
        (root / FOLDER / UP).write_text(table(64))
        again = put(tmp_path, {UP: table(16)})
        assert again.id == first.id
        assert len(status(tmp_path / "state", {}).installs) == 1
        take_back(tmp_path)
        assert texts(root) == {f"{FOLDER}/{UP}": table(64)}


class TestChosen:
    def test_by_file_always_the_pair(self, tmp_path: Path) -> None:
        other = "E=8,N=256,device_name=NVIDIA_H200.json"
        root = tmp_path / "root"
        put(tmp_path, {**pair(16), other: table(16)})
        uninstall(UninstallRequest(what=str(root / FOLDER / DOWN), state=tmp_path / "state"), {})
        assert texts(root) == {f"{FOLDER}/{other}": table(16)}
        assert [one.fine for one in status(tmp_path / "state", {}).installs] == [True]

    def test_by_what_was_installed(self, tmp_path: Path) -> None:
        put(tmp_path, pair(16))
        put(tmp_path, {"E=8,N=256,device_name=NVIDIA_H200.json": table(16)})
        take_back(tmp_path, str(tmp_path / "source0"))
        assert set(texts(tmp_path / "root")) == {f"{FOLDER}/E=8,N=256,device_name=NVIDIA_H200.json"}

    def test_one_of_several_must_be_named(self, tmp_path: Path) -> None:
        ids = [put(tmp_path, {UP: table(size)}).id for size in (16, 32)]
        with pytest.raises(InputError, match=ids[0]):
            take_back(tmp_path, root=None)

    def test_nothing_is_installed(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="nothing is installed"):
            take_back(tmp_path)

    def test_an_unknown_name(self, tmp_path: Path) -> None:
        put(tmp_path, pair(16))
        with pytest.raises(InputError, match="nothing is installed as"):
            take_back(tmp_path, "i000000000000")

    def test_a_dry_run_changes_nothing(self, tmp_path: Path) -> None:
        write(tmp_path / "root", pair(64, FOLDER))
        put(tmp_path, pair(16))
        before = snapshot(tmp_path)
        request = UninstallRequest(root=tmp_path / "root", state=tmp_path / "state")
        assert outcomes(uninstall(request, {}, dry_run=True)) == ["restored", "restored"]
        assert snapshot(tmp_path) == before


class TestStatus:
    def test_a_tree_without_records(self, tmp_path: Path) -> None:
        answer = status(tmp_path / "state", {})
        assert answer.fine
        assert answer.installs == ()
        assert not (tmp_path / "state").exists()

    def test_what_the_server_of_today_no_longer_finds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_package(tmp_path / "site", monkeypatch, "sglang", "0.5.12", {f"{HOME}/configs/README": ""})
        done = put(tmp_path, pair(16), root=None, server_version=None, triton_version=None)
        assert [one.fine for one in status(tmp_path / "state", {}).installs] == [True]
        # Another directory comes first now.
        environ = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "elsewhere")}
        (tmp_path / "elsewhere" / "configs").mkdir(parents=True)
        answer = status(tmp_path / "state", environ)
        assert [one.fine for one in answer.installs] == [False]
        assert {entry.standing for entry in answer.installs[0].entries} == {Standing.INTACT}
        assert done.prepared.target.place == "package"

    def test_a_server_that_is_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as here:
            install_package(tmp_path / "site", here, "sglang", "0.5.12", {f"{HOME}/configs/README": ""})
            put(tmp_path, pair(16), root=None, server_version=None, triton_version=None)
        (one,) = status(tmp_path / "state", {}).installs
        assert not one.fine
        assert one.note


class TestHostileRecords:
    """A manifest or journal that somebody else wrote must not make moetune touch other files."""

    def changed(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], None], name: str = "manifest"
    ) -> None:
        path = tmp_path / "state" / "installs" / f"{name}.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        "path",
        [
            "../victim/E=64,N=256,device_name=NVIDIA_H200.json",
            "configs/../../victim/E=64,N=256,device_name=NVIDIA_H200.json",
            "/etc/passwd",
            "configs/triton_3_6_0/passwd",
            "configs/triton_3_6_0_bak/E=64,N=256,device_name=NVIDIA_H200.json",
            ".ssh/E=64,N=256,device_name=NVIDIA_H200.json",
            "configs/triton_3_6_0/E=64,N=256,device_name=a/../../../x.json",
            "configs/triton_3_6_0/E=64,N=256,device_name=\x00.json",
            "",
        ],
    )
    def test_paths_out_of_the_grammar(self, path: str, tmp_path: Path) -> None:
        write(tmp_path / "root", pair(64, FOLDER))
        put(tmp_path, pair(16))
        self.changed(tmp_path, lambda document: document["installs"][0]["entries"][0].update(path=path))
        before = snapshot(tmp_path)
        for verb in (lambda: take_back(tmp_path), lambda: status(tmp_path / "state", {})):
            with pytest.raises(OutputError, match="not what moetune writes"):
                verb()
        assert snapshot(tmp_path) == before

    def test_a_root_that_nobody_named(self, tmp_path: Path) -> None:
        put(tmp_path, pair(16))
        victim = tmp_path / "victim"
        shutil.copytree(tmp_path / "root", victim)
        self.changed(tmp_path, lambda document: document["installs"][0].update(root=str(victim)))
        before = snapshot(victim)
        with pytest.raises(InputError, match="no server reads here"):
            take_back(tmp_path, root=None)
        assert snapshot(victim) == before
        # Whoever names it means it.
        take_back(tmp_path, str(victim), root=None)
        assert not victim.exists()

    @pytest.mark.parametrize("root", ["relative", "/a/../b", "", "/a\x00b"])
    def test_roots_that_are_none(self, root: str, tmp_path: Path) -> None:
        put(tmp_path, pair(16))
        self.changed(tmp_path, lambda document: document["installs"][0].update(root=root))
        with pytest.raises(OutputError, match="not what moetune writes"):
            take_back(tmp_path)

    def test_a_mode_that_gives_rights_away(self, tmp_path: Path) -> None:
        write(tmp_path / "root", pair(64, FOLDER))
        put(tmp_path, pair(16))

        def set_user_id(document: dict[str, Any]) -> None:
            document["installs"][0]["entries"][0]["before"]["attributes"]["mode"] = 0o4755

        self.changed(tmp_path, set_user_id)
        with pytest.raises(OutputError, match="not what moetune writes"):
            take_back(tmp_path)

    def test_a_backup_that_was_exchanged(self, tmp_path: Path) -> None:
        write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        put(tmp_path, {UP: table(16)})
        (backup,) = (tmp_path / "state" / "installs" / "blobs").iterdir()
        backup.write_text("evil")
        before = snapshot(tmp_path / "root")
        with pytest.raises(OutputError, match="damaged"):
            take_back(tmp_path)
        assert snapshot(tmp_path / "root") == before

    def test_a_journal_alone_does_nothing(self, tmp_path: Path) -> None:
        """Only a marker in the server's directory, which an install put there, makes it go on."""
        put(tmp_path, pair(16))
        victim = write(tmp_path / "victim", {f"{FOLDER}/{UP}": "{}\n"})
        with open_ledger(tmp_path / "state", writing=True) as ledger:
            digest = ledger.keep(b"evil")
        attributes = {"mode": 0o644, "uid": -1, "gid": -1, "mtime_ns": 0, "atime_ns": 0}
        step = {
            "path": f"{FOLDER}/{UP}",
            "before": None,
            "after": {"sha256": digest, "attributes": attributes},
        }
        journal = {
            "schema": "moetune.install-journal/1",
            "journal": {
                "token": "0" * 32,
                "action": "install",
                "root": str(victim),
                "steps": [step],
                "made": ["configs", "", FOLDER],
                "manifest": {"installs": []},
            },
        }
        (tmp_path / "state" / "installs" / "journal.json").write_text(json.dumps(journal))
        before = snapshot(victim)
        answer = status(tmp_path / "state", {})
        assert answer.recovered is not None
        assert not answer.recovered.completed
        assert snapshot(victim) == before

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"installs": []}', '{"schema": "x"}', "\xff"])
    def test_a_broken_manifest(self, text: str, tmp_path: Path) -> None:
        put(tmp_path, pair(16))
        (tmp_path / "state" / "installs" / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(OutputError, match="not what moetune writes"):
            status(tmp_path / "state", {})

    def test_records_that_are_a_link(self, tmp_path: Path) -> None:
        put(tmp_path, pair(16))
        manifest = tmp_path / "state" / "installs" / "manifest.json"
        manifest.rename(tmp_path / "elsewhere.json")
        manifest.symlink_to(tmp_path / "elsewhere.json")
        with pytest.raises(MoetuneError):
            status(tmp_path / "state", {})

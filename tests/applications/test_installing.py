"""Files go where the server looks, or nothing happens and it says why."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.install_plan import Change, InstallRequest, Prepared, _diff, prepare_install
from moetune.applications.installing import Installed, install
from moetune.applications.provenance import SCHEMA, text_sha256
from moetune.domain.errors import InputError, MoetuneError, OutputError
from tests.applications.install_world import (
    DOWN,
    FOLDER,
    UP,
    install_package,
    pair,
    plain_environment,
    shipped_files,
    snapshot,
    start,
    table,
    texts,
    write,
)
from tests.servers.vllm_loader import real as vllm_release

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME = "sglang/srt/layers/moe/moe_runner/triton_utils"
UNREAD = {
    "E=256,N=128,device_name=NVIDIA_H20,block_shape=[128, 128].json",
    "E=384,N=128,device_name=,dtype=int4_w4a16.json",
    "E=384,N=128,device_name=,dtype=int4_w4a16_down.json",
}
"""Files that SGLang 0.5.23 ships and never looks for: blocks without a dtype, a GPU without a name."""
HIDDEN = 360
"""Different names of the others."""
VLLM_HOME = "vllm/model_executor/layers/fused_moe/configs"
RTX = "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_environment(monkeypatch)
    monkeypatch.setattr(os, "fsync", int)


def asked(tmp_path: Path, *paths: Path, **more: Any) -> InstallRequest:
    given = {"server": "sglang", "server_version": "0.5.12", "triton_version": "3.6.0"}
    return InstallRequest(
        paths=paths, **{"root": tmp_path / "root", "state": tmp_path / "state", **given, **more}
    )


def do(request: InstallRequest, environ: dict[str, str] | None = None) -> Installed:
    return install(prepare_install(request, environ or {}), environ or {})


def changes(prepared: Prepared) -> dict[str, str]:
    return {one.path: one.change.value for one in prepared.changes}


class TestPlace:
    def test_below_a_root_nothing_is_needed_but_a_version(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", pair(16))
        done = do(asked(tmp_path, source))
        assert texts(tmp_path / "root") == pair(16, FOLDER)
        assert done.found
        assert done.use_command == f"export SGLANG_MOE_CONFIG_DIR={tmp_path / 'root'}"
        assert start("0.5.12", tmp_path / "root")[64][0]["BLOCK_SIZE_M"] == 16

    def test_the_folder_of_the_installed_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shipped = {f"{HOME}/configs/triton_3_4_0/{UP}": table(64)}
        install_package(tmp_path / "site", monkeypatch, "sglang", "0.5.12", shipped)
        source = write(tmp_path / "source", {UP: table(16)})
        done = do(asked(tmp_path, source, root=None, server_version=None, triton_version="3.6.0"))
        assert done.prepared.target.place == "package"
        assert (tmp_path / "site" / HOME / FOLDER / UP).read_text() == table(16)
        assert done.found
        assert done.use_command == ""
        assert done.prepared.checked.hidden == ()

    def test_the_same_folder_named_by_hand(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the command that is shown for sudo does."""
        shipped = {f"{HOME}/configs/triton_3_4_0/E=8,N=256,device_name=NVIDIA_H200.json": table(64)}
        install_package(tmp_path / "site", monkeypatch, "sglang", "0.5.12", shipped)
        source = write(tmp_path / "source", {UP: table(16)})
        done = do(asked(tmp_path, source, root=tmp_path / "site" / HOME))
        assert done.prepared.target.place == "package"
        assert done.use_command == ""
        assert done.prepared.checked.hidden == ()
        assert done.found
        # While the variable names another directory the server does not look there by itself.
        environ = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "mine")}
        again = do(asked(tmp_path, source, root=tmp_path / "site" / HOME), environ)
        assert again.prepared.target.place == "root"
        assert again.found
        assert again.use_command == f"export SGLANG_MOE_CONFIG_DIR={tmp_path / 'site' / HOME}"

    def test_the_directory_that_the_variable_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_package(tmp_path / "site", monkeypatch, "sglang", "0.5.12", {})
        source = write(tmp_path / "source", {UP: table(16)})
        environ = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "mine")}
        done = do(asked(tmp_path, source, root=None), environ)
        assert (tmp_path / "mine" / FOLDER / UP).exists()
        assert done.prepared.target.place == "variable"
        assert done.found

    def test_vllm_has_one_flat_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "E=64,N=256,device_name=NVIDIA_H200.json"
        install_package(tmp_path / "site", monkeypatch, "vllm", "0.33.0", {f"{VLLM_HOME}/{name}": table(64)})
        source = write(tmp_path / "source", {name: table(16)})
        of_vllm = {"server": "vllm", "server_version": None, "triton_version": None, "root": None}
        done = do(asked(tmp_path, source, **of_vllm))
        assert (tmp_path / "site" / VLLM_HOME / name).read_text() == table(16)
        assert done.found
        home = (tmp_path / "site" / VLLM_HOME).parent
        with vllm_release("0.33.0").world("NVIDIA H200", module=home) as world:
            assert world.get_moe_configs(64, 256, None)[1]["BLOCK_SIZE_M"] == 16

    def test_what_the_variable_hides_is_not_installed_unseen(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install_package(tmp_path / "site", monkeypatch, "vllm", "0.33.0", {})
        source = write(tmp_path / "source", {UP: table(16)})
        environ = {"VLLM_TUNED_CONFIG_FOLDER": str(tmp_path / "mine")}
        of_vllm = {"server": "vllm", "server_version": None, "triton_version": None, "root": None}
        done = do(asked(tmp_path, source, **of_vllm), environ)
        assert (tmp_path / "mine" / UP).exists()
        assert done.found

    def test_without_a_server_it_asks_for_a_root(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16)})
        with pytest.raises(InputError, match="not installed") as failed:
            prepare_install(asked(tmp_path, source, root=None), {})
        assert "--root" in str(failed.value.hint)

    def test_without_a_version_it_asks_for_one(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16)})
        with pytest.raises(InputError, match="which release") as failed:
            prepare_install(asked(tmp_path, source, server_version=None), {})
        assert "--server-version" in str(failed.value.hint)

    def test_provenance_says_server_and_versions(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16), f"{UP}.provenance.json": provenance(table(16))})
        blank = {"server": None, "server_version": None, "triton_version": None}
        prepared = prepare_install(asked(tmp_path, source, **blank), {})
        server = prepared.target.server
        assert (server.name, server.version, server.triton_version) == ("sglang", "0.5.12", "3.6.0")

    def test_what_a_shell_makes_of_a_star(self, tmp_path: Path) -> None:
        beside = f"{UP}.provenance.json"
        source = write(tmp_path / "source", {UP: table(16), beside: provenance(table(16))})
        do(asked(tmp_path, *sorted(source.iterdir())))
        assert set(texts(tmp_path / "root")) == {f"{FOLDER}/{UP}", f"{FOLDER}/{beside}"}
        with pytest.raises(InputError, match="no config file"):
            prepare_install(asked(tmp_path, source / beside), {})

    def test_files_of_another_triton_do_not_pass_for_tuned_ones(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", pair(16, "configs/triton_3_4_0"))
        with pytest.raises(InputError, match="triton_3_4_0") as failed:
            prepare_install(asked(tmp_path, source), {})
        assert "moetune borrow" in str(failed.value.hint)

    def test_of_a_tree_for_two_tritons_those_of_the_right_one_are_taken(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {**pair(64, "configs/triton_3_4_0"), **pair(16, FOLDER)})
        done = do(asked(tmp_path, source))
        assert texts(tmp_path / "root") == pair(16, FOLDER)
        assert "2 files of another Triton" in done.prepared.notes[0]

    def test_a_triton_version_that_sglang_cannot_read_is_refused(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16)})
        with pytest.raises(OutputError, match="triton_3_6_0") as failed:
            prepare_install(asked(tmp_path, source, triton_version="3.6.0+git1"), {})
        assert "--triton-version" in str(failed.value.hint)
        assert not (tmp_path / "root").exists()


def provenance(text: str, **more: Any) -> str:
    identity = {"server": "sglang", "server_version": "0.5.12", "triton_version": "3.6.0"}
    document = {
        "schema": SCHEMA,
        "kind": "predicted",
        "fingerprint": "0" * 32,
        "identity": identity,
        "config_sha256": text_sha256(text),
        **more,
    }
    return json.dumps(document)


FATAL = {
    "case 26: over the shared memory": (
        "MOE111",
        {
            f"E=8,N=256,device_name={RTX},dtype=fp8_w8a8.json": table(
                128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, num_stages=4, num_warps=8
            )
        },
    ),
    "case 27: a K tile over the group": (
        "MOE121",
        {
            "E=8,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json": table(
                64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=256
            )
        },
    ),
    "case 29: a key that ends the server": ("MOE102", {UP: '{"triton_version": "3.6.0", "1": {}}'}),
    "case 32: a pair that ends an assertion": ("MOE106", {UP: table(64), DOWN: table(16)}),
    "case 37: a name that no server looks for": (
        "MOE131",
        {UP.replace("H200", "H200,dtype=bf16"): table(16)},
    ),
    "case 38: no JSON": ("MOE101", {UP: "{'1': 2}"}),
}


class TestRefused:
    @pytest.mark.parametrize("case", sorted(FATAL))
    def test_what_lint_calls_fatal(self, case: str, tmp_path: Path) -> None:
        code, files = FATAL[case]
        source = write(tmp_path / "source", files)
        with pytest.raises(MoetuneError, match=code) as failed:
            prepare_install(asked(tmp_path, source), {})
        words = shlex.split(str(failed.value.hint).partition(": ")[2])
        assert words[:2] == ["moetune", "borrow"]
        assert Path(words[2]).exists()

    def test_a_down_file_over_a_default_that_asserts(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {DOWN: table(128)})
        with pytest.raises(MoetuneError, match="MOE106"):
            prepare_install(asked(tmp_path, source), {})
        do(asked(tmp_path, source, server_version="0.5.13"))
        start("0.5.13", tmp_path / "root")
        with pytest.raises(AssertionError):
            start("0.5.12", tmp_path / "root")

    def test_an_up_file_that_would_meet_an_older_down_file(self, tmp_path: Path) -> None:
        """Case 33: the server mixes Triton versions; here it would not even start."""
        write(tmp_path / "root", pair(64, "configs/triton_3_4_0"))
        source = write(tmp_path / "source", {UP: table(16)})
        with pytest.raises(MoetuneError, match="MOE106"):
            prepare_install(asked(tmp_path, source), {})
        shutil.copytree(tmp_path / "source", tmp_path / "root" / FOLDER)
        with pytest.raises(AssertionError):
            start("0.5.12", tmp_path / "root")

    def test_a_down_file_for_the_up_file_that_is_there(self, tmp_path: Path) -> None:
        write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        source = write(tmp_path / "source", {DOWN: table(16)})
        with pytest.raises(MoetuneError, match="MOE106"):
            prepare_install(asked(tmp_path, source), {})
        (source / DOWN).write_text(table(64))
        assert do(asked(tmp_path, source)).found

    def test_a_link_where_a_file_is_to_go(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_text("precious")
        write(tmp_path / "root", {f"{FOLDER}/x": ""})
        (tmp_path / "root" / FOLDER / UP).symlink_to(elsewhere)
        source = write(tmp_path / "source", {UP: table(16)})
        with pytest.raises(OutputError, match="symbolic link"):
            prepare_install(asked(tmp_path, source), {})
        assert elsewhere.read_text() == "precious"

    @pytest.mark.parametrize("level", ["configs", FOLDER])
    def test_a_directory_that_is_a_link(self, level: str, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "root" / level).parent.mkdir(parents=True)
        (tmp_path / "root" / level).symlink_to(tmp_path / "elsewhere")
        source = write(tmp_path / "source", {UP: table(16)})
        with pytest.raises(OutputError):
            do(asked(tmp_path, source))
        assert not any((tmp_path / "elsewhere").iterdir())

    def test_a_link_that_appears_after_the_look(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16)})
        prepared = prepare_install(asked(tmp_path, source), {})
        elsewhere = write(tmp_path / "elsewhere", {"precious": "1"})
        (tmp_path / "root" / "configs").mkdir(parents=True)
        (tmp_path / "root" / FOLDER).symlink_to(elsewhere)
        with pytest.raises(OutputError):
            install(prepared, {})
        assert texts(elsewhere) == {"precious": "1"}

    def test_two_files_for_one_place(self, tmp_path: Path) -> None:
        one, two = write(tmp_path / "1", {UP: table(16)}), write(tmp_path / "2", {UP: table(32)})
        with pytest.raises(InputError, match="two files for one place"):
            prepare_install(asked(tmp_path, one, two), {})

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        (tmp_path / "source").mkdir()
        with pytest.raises(InputError, match="no config file"):
            prepare_install(asked(tmp_path, tmp_path / "source"), {})


class TestShown:
    def test_the_difference_by_entry(self, tmp_path: Path) -> None:
        write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64, (1, 8, 64, 8192)), f"{FOLDER}/{DOWN}": "{}\n"})
        source = write(tmp_path / "source", {UP: table(16, (1, 64, 100, 8192)), DOWN: table(16)})
        prepared = prepare_install(asked(tmp_path, source), {})
        (up,) = [one for one in prepared.changes if one.path.endswith(UP)]
        assert up.change is Change.REPLACE
        assert up.diff == (
            (1, "64x64x64 g1 w4 s3", "16x64x64 g1 w4 s3"),
            (8, "64x64x64 g1 w4 s3", ""),
            (64, "64x64x64 g1 w4 s3", "16x64x64 g1 w4 s3"),
            (100, "", "16x64x64 g1 w4 s3"),
            (8192, "64x64x64 g1 w4 s3", "16x64x64 g1 w4 s3"),
        )

    def test_entries_that_leave_their_tile_to_the_server_and_broken_ones_are_compared_too(self) -> None:
        own, tuned = {"BLOCK_SIZE_M": 8, "GROUP_SIZE_M": 1}, json.loads(table(16, (64,)))["64"]
        before = {"8": own, "16": own, "64": tuned, "x": tuned, "9": {"BLOCK_SIZE_N": 3}}
        after = {"8": own | {"BLOCK_SIZE_M": 4}, "16": own, "64": own}
        texts = [json.dumps(document).encode() for document in (before, after)]
        assert _diff(texts[0], texts[1], "file") == (
            (8, "BLOCK_SIZE_M 8, the tile is the server's", "BLOCK_SIZE_M 4, the tile is the server's"),
            (64, "16x64x64 g1 w4 s3", "BLOCK_SIZE_M 8, the tile is the server's"),
        )
        assert _diff(b"[", b"{", "file") == ()

    def test_a_dry_run_changes_nothing(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", pair(16))
        before = snapshot(tmp_path)
        install(prepare_install(asked(tmp_path, source), {}), {}, dry_run=True)
        assert snapshot(tmp_path) == before

    def test_what_is_there_already_is_left_alone(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", pair(16))
        first = do(asked(tmp_path, source))
        before = snapshot(tmp_path / "root")
        second = do(asked(tmp_path, source))
        assert first.id
        assert not second.id
        assert second.found
        assert snapshot(tmp_path / "root") == before

    def test_what_changes_while_a_person_thinks_is_asked_again(self, tmp_path: Path) -> None:
        write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
        source = write(tmp_path / "source", {UP: table(16)})
        prepared = prepare_install(asked(tmp_path, source), {})
        (tmp_path / "root" / FOLDER / UP).write_text(table(32))
        with pytest.raises(OutputError, match="while you were asked"):
            install(prepared, {}, asked=True)
        assert (tmp_path / "root" / FOLDER / UP).read_text() == table(32)

    def test_measured_configs_are_not_replaced_by_predicted_ones_in_silence(self, tmp_path: Path) -> None:
        beside = f"{FOLDER}/{UP}.provenance.json"
        measured = provenance(table(64), kind="measured")
        write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64), beside: measured})
        source = write(tmp_path / "source", {UP: table(16), f"{UP}.provenance.json": provenance(table(16))})
        done = do(asked(tmp_path, source))
        assert any("measured" in note and "predicted" in note for note in done.prepared.notes)
        assert (tmp_path / "root" / beside).read_text() == provenance(table(16))

    def test_provenance_of_a_file_that_is_replaced_does_not_stay(self, tmp_path: Path) -> None:
        beside = f"{FOLDER}/{UP}.provenance.json"
        write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64), beside: provenance(table(64))})
        source = write(tmp_path / "source", {UP: table(16)})
        done = do(asked(tmp_path, source))
        assert changes(done.prepared)[beside] == "remove"
        assert not (tmp_path / "root" / beside).exists()

    def test_provenance_of_other_bytes_is_left_out(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16), f"{UP}.provenance.json": provenance(table(64))})
        done = do(asked(tmp_path, source))
        assert "changed since" in done.prepared.notes[0]
        blank = {"server": None, "server_version": None, "triton_version": None, "root": tmp_path / "other"}
        assert prepare_install(asked(tmp_path, source, **blank), {}).target.server.version == "0.5.12"
        assert set(texts(tmp_path / "root")) == {f"{FOLDER}/{UP}"}

    def test_a_backup_that_is_there_already_is_named(self, tmp_path: Path) -> None:
        """Case 55: install makes no such directory, and says so where somebody else did."""
        write(tmp_path / "root", {f"configs/triton_3_6_0_bak/{UP}": table(64)})
        source = write(tmp_path / "source", pair(16))
        done = do(asked(tmp_path, source))
        assert "MOE104" in [found.code.code for found in done.prepared.checked.remarks]

    def test_new_files_can_be_read_by_the_server(self, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            do(asked(tmp_path, write(tmp_path / "source", pair(16))))
        finally:
            os.umask(before)
        assert (tmp_path / "root" / FOLDER / UP).stat().st_mode & 0o777 == 0o644
        for folder in ("", "configs", FOLDER):
            assert (tmp_path / "root" / folder).stat().st_mode & 0o777 == 0o755


class TestHidden:
    @pytest.fixture
    def shipped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        files = shipped_files("sglang", "0.5.23")
        install_package(tmp_path / "site", monkeypatch, "sglang", "0.5.23", files)
        return files

    def own(self, tmp_path: Path, **more: Any) -> InstallRequest:
        source = write(tmp_path / "source", pair(16))
        of_newest = {"server_version": "0.5.23", "triton_version": "3.8.0"}
        return asked(tmp_path, source, **of_newest, **more)

    def test_case_35_the_shapes_that_a_directory_hides_are_listed(
        self, tmp_path: Path, shipped: dict[str, str]
    ) -> None:
        hidden = prepare_install(self.own(tmp_path), {}).checked.hidden
        # Each name once, from where the lookup takes it.
        names = {name.rpartition("/")[2] for name in shipped if HOME in name}
        assert {name.rpartition("/")[2] for name in hidden} == names - UNREAD
        assert len(hidden) == len(names - UNREAD) == HIDDEN
        for name in hidden:
            version = tuple(map(int, re.findall(r"\d+", name.partition("/")[0])))
            others = [other for other in shipped if other.endswith(name.partition("/")[2])]
            newest = max(
                tuple(map(int, re.findall(r"triton_(\d+)_(\d+)_(\d+)", other)[0])) for other in others
            )
            exact = any("triton_3_8_0" in other for other in others)
            assert version == ((3, 8, 0) if exact else newest)

    def test_case_35_the_same_list_without_the_server(self, tmp_path: Path) -> None:
        assert len(prepare_install(self.own(tmp_path), {}).checked.hidden) == HIDDEN

    def test_case_35_vllm_hides_nothing(self, tmp_path: Path) -> None:
        source = write(tmp_path / "source", {UP: table(16)})
        prepared = prepare_install(
            asked(tmp_path, source, server="vllm", server_version="0.33.0", triton_version="3.8.0"), {}
        )
        assert prepared.checked.hidden == ()

    def test_case_35_they_are_copied_in_when_asked(self, tmp_path: Path, shipped: dict[str, str]) -> None:
        done = do(self.own(tmp_path, copy_shipped=True))
        root = tmp_path / "root"
        assert len(done.prepared.copied) == HIDDEN
        assert done.prepared.checked.hidden == ()
        for path in done.prepared.copied:
            # Byte for byte: some of them have the line ends of another system.
            assert (root / path).read_bytes() == shipped[f"{HOME}/{path}"].encode()
        real = start("0.5.23", root, device="NVIDIA H200", triton="3.8.0")
        assert real[64][0]["BLOCK_SIZE_M"] == 16

    def test_case_35_without_the_server_there_is_nothing_to_copy(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="only where") as failed:
            prepare_install(self.own(tmp_path, copy_shipped=True), {})
        assert "environment" in str(failed.value.hint)


NOBODY = 65534


@contextlib.contextmanager
def somebody_elses(mode: int = 0o755) -> Iterator[Path]:
    """A directory that another user than `nobody` owns, on a way that everybody can go."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder)


def install_as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `moetune install` as a user without rights; as ourselves where we have none either."""
    code = f"""
        import os, sys
        from moetune.cli.main import run
        # The interpreter may lie where only root can go: all is imported before the rights are dropped.
        run(["install", *sys.argv[1:], "--dry-run"])
        print("--- dropped", file=sys.stderr)
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
        sys.exit(run(["install", *sys.argv[1:]]))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )


class TestSomebodyElse:
    def test_a_directory_of_another_user_names_the_command(self) -> None:
        with somebody_elses() as place, somebody_elses(0o777) as own:
            source = write(own / "a source", pair(16))
            for path in (source, *source.iterdir()):
                path.chmod(0o755)
            target = place / "it's here"
            target.mkdir(mode=0o755)
            if os.geteuid() != 0:
                target.chmod(0o555)
            run = install_as_nobody(
                *(str(source), "--root", str(target), "--server", "sglang"),
                *("--server-version", "0.5.12", "--triton-version", "3.6.0", "--state", str(own / "state")),
            )
            assert run.returncode == 2, run.stderr
            assert "permission denied" in run.stderr
            hint = run.stderr.partition("hint: ")[2]
            assert "sudo -H" in hint
            assert f"'{own}/a source'" in hint
            assert "it'\"'\"'s here" in hint
            if os.geteuid() == 0:
                assert "belongs to the user root (0)" in run.stderr
            assert "Traceback" not in run.stderr
            target.chmod(0o755)
            assert not any(target.iterdir())

    def test_read_only_site_packages_get_another_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = write(tmp_path / "source", pair(16))
        prepared = prepare_install(asked(tmp_path, source), {})
        real = os.mkdir

        def mkdir(name: Any, *arguments: Any, **options: Any) -> None:
            if str(name) == str(tmp_path / "root"):
                raise OSError(30, "Read-only file system")
            real(name, *arguments, **options)

        monkeypatch.setattr(os, "mkdir", mkdir)
        with pytest.raises(OutputError, match="read-only") as failed:
            install(prepared, {})
        assert "--root" in str(failed.value.hint)
        assert "SGLANG_MOE_CONFIG_DIR" in str(failed.value.hint)


def test_two_installs_at_once_do_not_tear_each_other(tmp_path: Path) -> None:
    """Two people, each with records of their own, install different pairs of one shape at one time."""
    code = """
        import sys
        from pathlib import Path
        from moetune.applications.install_plan import InstallRequest, prepare_install
        from moetune.applications.installing import install
        base, size = Path(sys.argv[1]), sys.argv[2]
        asked = InstallRequest(paths=(base / size,), server="sglang", server_version="0.5.12",
            triton_version="3.6.0", root=base / "root", state=base / ("state" + size))
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(15):
            install(prepare_install(asked, {}), {})
    """
    sizes = ("16", "64")
    for size in sizes:
        write(tmp_path / size, pair(int(size)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for size in sizes
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert texts(tmp_path / "root") in [pair(int(size), FOLDER) for size in sizes]
    start("0.5.12", tmp_path / "root")


def test_what_the_lookup_does_not_find_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is the server's: where its lookup ends elsewhere, nothing is installed."""
    from moetune.servers.protocol import Outcome
    from moetune.servers.sglang.server import SGLang

    real = SGLang.lookup

    def lookup(self: SGLang, *arguments: Any) -> Any:
        return replace(real(self, *arguments), outcome=Outcome.STALE)

    monkeypatch.setattr(SGLang, "lookup", lookup)
    source = write(tmp_path / "source", pair(16))
    with pytest.raises(MoetuneError, match="does not find it"):
        prepare_install(asked(tmp_path, source), {})


def test_mutated_files_are_installed_or_refused_with_a_reason(tmp_path: Path) -> None:
    """Seeded: one byte, one stretch or one end of a good pair changed, 400 times."""
    chance = random.Random(20260)
    good = {name: text.encode() for name, text in pair(16).items()}
    source = write(tmp_path / "source", pair(16))
    outcomes = set()
    said: list[tuple[str, str | None]] = []
    for _ in range(400):
        name = chance.choice(sorted(good))
        content = bytearray(good[name])
        start_, length = chance.randrange(len(content)), chance.choice((1, 1, 1, 7, 60))
        content[start_ : start_ + length] = chance.choice(
            (b"", bytes([chance.randrange(256)]), b"1", b"-", b'"', b"[[", b"{", b"e999", b"\x1b[2J")
        )
        (source / name).write_bytes(content)
        try:
            prepare_install(asked(tmp_path, source), {})
            # What is not refused is what a server starts with.
            shutil.copytree(source, tmp_path / "tree" / FOLDER, dirs_exist_ok=True)
            start("0.5.12", tmp_path / "tree")
            outcomes.add("fine")
        except MoetuneError as refused:
            outcomes.add("refused")
            said.append((refused.message, refused.hint))
        (source / name).write_bytes(good[name])
    assert outcomes == {"fine", "refused"}
    assert all(hint and message.isprintable() for message, hint in said)

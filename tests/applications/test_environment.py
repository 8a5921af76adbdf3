"""What is installed and which tuned files lie where is found without importing or changing anything."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications import environment
from moetune.applications.environment import (
    Installed,
    config_trees,
    find_installed,
    inspect_environment,
    listed_variables,
    read_tree,
    shipped_tree,
)
from moetune.domain.catalogue import published
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import Problem
from moetune.servers.sglang import open_sglang
from moetune.servers.vllm import open_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.servers.protocol import ConfigTree, Server

SERVER_EDITION = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MAX_Q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def problem(server: Server, gpu: str, E: int = 256, N: int = 256) -> Problem:
    return Problem(
        E=E,
        global_experts=E,
        topk=8,
        K=3072,
        N=N,
        file_n=N,
        gpu=find_gpu(gpu),
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
    )


def install(site: Path, name: str, version: str, *, package: bool = True) -> Path:
    """Lay an installed package into a site folder: metadata, and a module that must not be imported."""
    (site / f"{name}-{version}.dist-info").mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    (site / name).mkdir(exist_ok=True)
    if package:
        (site / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    return site / name


def contents(tree: ConfigTree) -> dict[str, set[str]]:
    assert tree.directories is not None
    return {directory: set(names) for directory, names in tree.directories.items()}


def lay(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("{}")


class TestInstalled:
    def test_versions_and_folders_are_found_without_importing(self, tmp_path: Path) -> None:
        folders = {name: install(tmp_path, name, "0.5.23.post1") for name in ("sglang", "vllm")}
        code = (
            "import json, sys; from moetune.applications.environment import inspect_environment as look; "
            "found = look({}); "
            "print(json.dumps([{p.name: [p.version, str(p.folder)] for p in found.servers}, "
            "[m for m in ('sglang', 'vllm', 'torch', 'triton') if m in sys.modules]]))"
        )
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        found, imported = json.loads(run.stdout)
        assert found == {name: ["0.5.23.post1", str(folder)] for name, folder in folders.items()}
        assert imported == []

    def test_what_is_not_installed_is_absent(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert find_installed("sglang") is None
        assert inspect_environment({}).servers == ()
        assert inspect_environment({}).version("sglang") is None

    def test_a_folder_that_only_has_the_name_is_no_server(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "vllm").mkdir()
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert find_installed("vllm") is None
        install(tmp_path, "vllm", "0.33.0", package=False)
        assert find_installed("vllm") == Installed("vllm", "0.33.0", None)

    def test_metadata_without_a_version_is_not_installed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "vllm-0.dist-info").mkdir()
        (tmp_path / "vllm-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert find_installed("vllm") is None

    def test_a_version_cannot_steer_the_terminal(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        install(tmp_path, "vllm", "1.0")
        metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\x1b[31mred\n"
        (tmp_path / "vllm-1.0.dist-info" / "METADATA").write_text(metadata)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        found = find_installed("vllm")
        assert found is not None
        assert found.version.isprintable()


class TestVariables:
    def test_secrets_are_redacted_and_strangers_left_out(self) -> None:
        shown = listed_variables(
            {
                "VLLM_API_KEY": "planted-1",
                "SGLANG_AUTH": "planted-2",
                "VLLM_S3_ACCESS_TOKEN": "planted-3",
                "SGLANG_MODEL": "hf_planted4aaaaaaaa",
                "VLLM_PROXY": "https://me:planted-5@host/x",
                "HF_TOKEN": "planted-6",
                "AWS_SECRET_ACCESS_KEY": "planted-7",
                "SGLANG_MOE_CONFIG_DIR": "/configs",
                "TRITON_CACHE_DIR": "/cache\x1b[2J",
                "HOME": "/root",
            }
        )
        assert "planted" not in json.dumps(shown)
        assert shown["SGLANG_MOE_CONFIG_DIR"] == "/configs"
        assert shown["TRITON_CACHE_DIR"].isprintable()
        assert set(shown) >= {"VLLM_API_KEY", "SGLANG_AUTH"}
        assert not {"HOME", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(shown)
        assert list(shown) == sorted(shown)


class TestReadTree:
    def test_directories_of_configs_and_whatever_else_lies_there(self, tmp_path: Path) -> None:
        lay(tmp_path, "configs/triton_3_6_0/a.json", "configs/triton_3_6_0_bak/b.json", "configs/README.md")
        lay(tmp_path, "elsewhere/c.json")
        (tmp_path / "configs/triton_3_7_1").mkdir()
        tree = read_tree(tmp_path, nested=True)
        assert tree.root == str(tmp_path)
        assert contents(tree) == {
            "triton_3_6_0": {"a.json"},
            "triton_3_6_0_bak": {"b.json"},
            "triton_3_7_1": set(),
            "README.md": set(),
        }

    def test_a_flat_folder(self, tmp_path: Path) -> None:
        lay(tmp_path, "a.json", "sub/b.json")
        assert contents(read_tree(tmp_path, nested=False)) == {"": {"a.json", "sub"}}

    @pytest.mark.parametrize("nested", [True, False])
    def test_what_does_not_exist_is_an_empty_answer(self, tmp_path: Path, nested: bool) -> None:
        assert read_tree(tmp_path / "missing", nested=nested).directories is None

    def test_case_35_a_folder_without_configs_below_it(self, tmp_path: Path) -> None:
        lay(tmp_path, "triton_3_6_0/a.json")
        assert read_tree(tmp_path, nested=True).directories is None

    @pytest.mark.parametrize("nested", [True, False])
    def test_a_file_is_refused(self, tmp_path: Path, nested: bool) -> None:
        lay(tmp_path, "file")
        with pytest.raises(InputError, match="directory"):
            read_tree(tmp_path / "file", nested=nested)

    def test_links_are_followed_as_the_servers_do_and_loops_end(self, tmp_path: Path) -> None:
        # A volume mounted from a Kubernetes ConfigMap: every name is a link.
        lay(tmp_path, "..2026/a.json")
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs/triton_3_6_0").symlink_to(tmp_path / "..2026")
        (tmp_path / "configs/triton_3_5_1").symlink_to(tmp_path / "configs/triton_3_5_1")
        (tmp_path / "configs/triton_3_4_0").symlink_to(tmp_path / "configs")
        (tmp_path / "configs/triton_3_3_1").symlink_to(tmp_path / "nowhere")
        tree = read_tree(tmp_path, nested=True)
        assert tree.has("triton_3_6_0", "a.json")
        assert tree.directories is not None
        assert tree.directories["triton_3_5_1"] == tree.directories["triton_3_3_1"] == frozenset()
        # One level and no further.
        assert "triton_3_4_0" in tree.directories["triton_3_4_0"]
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(InputError):
            read_tree(tmp_path / "loop", nested=False)

    def test_too_many_entries_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "_MAX_ENTRIES", 5)
        lay(tmp_path, *(f"configs/triton_3_6_0/{index}.json" for index in range(3)))
        lay(tmp_path, *(f"configs/triton_3_7_1/{index}.json" for index in range(2)))
        assert read_tree(tmp_path, nested=True).has("triton_3_7_1", "1.json")
        lay(tmp_path, "configs/triton_3_7_1/2.json")
        with pytest.raises(InputError, match="more than"):
            read_tree(tmp_path, nested=True)

    @given(st.text(max_size=60), st.booleans())
    def test_any_path_is_read_or_refused_with_a_harmless_message(self, path: str, nested: bool) -> None:
        from pathlib import Path

        message = ""
        try:
            read_tree(Path("/nonexistent-root") / path.lstrip("/"), nested=nested)
        except MoetuneError as error:
            message = error.message
        assert not {unicodedata.category(character) for character in message} & {"Cc", "Cf", "Cs"}


class TestTrees:
    def test_without_an_installation_the_published_wheel_stands_for_it(self) -> None:
        for server in (open_sglang("0.5.20", None), open_vllm("0.20.0", None)):
            (tree,) = config_trees(server, {}, None)
            known = published(server.name, tuple(map(int, server.version.split("."))))
            assert known is not None
            assert tree.directories == known.directories
            assert tree.root == known.home

    @pytest.mark.parametrize(
        ("server", "file"),
        [
            (open_sglang("0.5.23", None), "triton_utils/configs/triton_3_8_0/a.json"),
            (open_sglang("0.5.4", None), "fused_moe_triton/configs/triton_3_4_0/a.json"),
            (open_vllm("0.33.0", None), "fused_moe/configs/a.json"),
        ],
    )
    def test_an_installed_servers_own_files_come_before_the_published_ones(
        self, server: Server, file: str, tmp_path: Path
    ) -> None:
        known = published(server.name, tuple(map(int, server.version.split("."))))
        assert known is not None
        home = known.home.removesuffix("/configs")
        lay(tmp_path, f"{home.rpartition('/')[0]}/{file}")
        installed = Installed(server.name, server.version, tmp_path / server.name)
        tree = shipped_tree(server, installed)
        assert tree is not None
        assert tree.root == str(tmp_path / known.home)
        assert list(contents(tree).values()) == [{"a.json"}]

    def test_the_variables_folder_comes_first(self, tmp_path: Path) -> None:
        sglang, vllm = open_sglang("0.5.23", None), open_vllm("0.33.0", None)
        lay(tmp_path, "configs/triton_3_8_0/a.json", "b.json")
        variables = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path), "VLLM_TUNED_CONFIG_FOLDER": str(tmp_path)}
        first, shipped = config_trees(sglang, variables, None)
        assert contents(first) == {"triton_3_8_0": {"a.json"}}
        assert shipped.root.endswith("triton_utils")
        first, shipped = config_trees(vllm, variables, None)
        assert contents(first) == {"": {"b.json", "configs"}}
        assert shipped.root.endswith("fused_moe/configs")

    def test_a_release_that_does_not_know_the_variable_ignores_it(self, tmp_path: Path) -> None:
        trees = config_trees(open_sglang("0.5.2", None), {"SGLANG_MOE_CONFIG_DIR": str(tmp_path)}, None)
        assert [tree.root for tree in trees] == ["sglang/srt/layers/moe/fused_moe_triton"]

    def test_a_variables_folder_that_cannot_be_read_is_an_error_with_its_name(self, tmp_path: Path) -> None:
        lay(tmp_path, "file")
        with pytest.raises(InputError, match="file"):
            config_trees(open_sglang(None, None), {"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "file")}, None)

"""What a user relies on of each release of SGLang: versions, Triton, places."""

from __future__ import annotations

import pytest

from moetune.domain.errors import ServerError
from moetune.servers.protocol import Server
from moetune.servers.sglang import open_sglang
from tests.servers.sglang_problems import layer, shard


def test_it_is_a_server_and_the_newest_known_release_is_the_default() -> None:
    server = open_sglang()
    assert isinstance(server, Server)
    assert (server.name, server.version, server.triton_version) == ("sglang", "0.5.23", "3.8.0")
    assert not server.assumed


@pytest.mark.parametrize(
    ("version", "triton"),
    [
        ("0.4.9", "3.3.1"),
        ("0.5.2", "3.4.0"),
        ("0.5.5", "3.4.0"),
        ("0.5.6", "3.5.1"),
        ("0.5.10.post1", "3.5.1"),
        ("v0.5.12", "3.6.0"),
        ("0.5.18", "3.7.1"),
        ("0.5.21", "3.7.1"),
        ("0.5.22", "3.8.0"),
    ],
)
def test_each_release_comes_with_the_triton_that_its_torch_pins(version: str, triton: str) -> None:
    assert open_sglang(version).triton_version == triton


def test_a_newer_release_runs_by_the_newest_known_rules_and_says_so() -> None:
    server = open_sglang("0.6.1")
    assert server.assumed
    assert server.version == "0.6.1"
    assert not open_sglang("0.5.23.post1").assumed
    newest = open_sglang()
    problem = shard(layer())
    assert server.launch_classes(problem, "up", [1, 600], 16) == newest.launch_classes(
        problem, "up", [1, 600], 16
    )


@pytest.mark.parametrize("version", ["0.4.8", "0.3", "zero", "", "0.5.2/../x", "1" * 99])
def test_an_old_or_senseless_version_is_an_error_with_what_to_give_instead(version: str) -> None:
    with pytest.raises(ServerError) as refused:
        open_sglang(version)
    assert refused.value.hint


@pytest.mark.parametrize("triton", ["../3.6.0", "3.6.0/x", "x"])
def test_a_triton_version_cannot_leave_the_directory(triton: str) -> None:
    with pytest.raises(ServerError):
        open_sglang(None, triton)


def test_where_each_release_keeps_its_files_and_whether_a_variable_moves_them() -> None:
    assert open_sglang("0.5.2").directory_variable is None
    assert open_sglang("0.5.3").directory_variable == "SGLANG_MOE_CONFIG_DIR"
    assert open_sglang("0.5.10").home.endswith("moe/fused_moe_triton")
    assert open_sglang("0.5.11").home.endswith("moe/moe_runner/triton_utils")
    assert not open_sglang("0.5.4").separate_down_file
    assert open_sglang("0.5.5").separate_down_file

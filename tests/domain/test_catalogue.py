"""The catalogue says what the published wheels hold, proved against the wheels themselves."""

from __future__ import annotations

import re

import pytest

from moetune.domain.catalogue import indexed_versions, published
from moetune.domain.version import parse_release
from tests import wheels

# All of SGLang's, and the ends of vLLM's: those are large, and other tests read them anyway.
RELEASES = [("sglang", version) for version in indexed_versions("sglang")]
RELEASES += [("vllm", indexed_versions("vllm")[0]), ("vllm", indexed_versions("vllm")[-1])]


def files_in_wheel(server: str, version: str) -> dict[str, set[str]]:
    """Directory to names of the MoE kernel's tuned files, found by what only they look like."""
    found: dict[str, set[str]] = {}
    for path in wheels.members(server, version):
        match = re.search(r"/(fused_moe_triton|triton_utils|fused_moe)/configs/(.*?)/?(E=[^/]*\.json)$", path)
        if match:
            found.setdefault(match[2], set()).add(match[3])
    return found


@pytest.mark.parametrize(("server", "version"), RELEASES)
def test_the_catalogue_of_a_release_is_what_its_wheel_holds(server: str, version: str) -> None:
    known = published(server, parse_release(version))
    assert known is not None
    assert known.version == version
    held = files_in_wheel(server, version)
    assert sum(map(len, held.values())) > 100
    assert {directory: set(names) for directory, names in known.directories.items()} == held
    below = "configs/" if server == "sglang" else ""
    members = set(wheels.members(server, version))
    for directory, names in known.directories.items():
        for name in names:
            assert "/".join(filter(None, [f"{known.home}/{below}".rstrip("/"), directory, name])) in members


def test_the_newest_release_is_the_default() -> None:
    sglang, vllm = published("sglang"), published("vllm")
    assert sglang is not None
    assert vllm is not None
    assert (sglang.version, vllm.version) == ("0.5.23", "0.33.0")
    # Counted in shipped_configs of the specifications.
    assert sum(map(len, sglang.directories.values())) == 390
    assert set(vllm.directories) == {""}
    assert len(vllm.directories[""]) == 338


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("0.5.17", "0.5.16"),
        ("0.5.23.post1", "0.5.23"),
        ("9.9", "0.5.23"),
        ("0.1", "0.4.9"),
        ("0.5.16", "0.5.16"),
    ],
)
def test_a_release_that_was_not_indexed_gets_the_one_before_and_its_own_name(
    asked: str, answered: str
) -> None:
    known = published("sglang", parse_release(asked))
    assert known is not None
    assert known.version == answered


def test_a_file_that_a_release_dropped_is_gone_from_there_on() -> None:
    name = "E=128,N=768,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128, 128].json"

    def holders(version: str) -> list[str]:
        known = published("sglang", parse_release(version))
        assert known is not None
        return [directory for directory, names in known.directories.items() if name in names]

    assert holders("0.5.1") != holders("0.5.2")


def test_releases_are_ordered_by_number_not_by_letter() -> None:
    versions = indexed_versions("sglang")
    assert versions.index("0.5.9") + 1 == versions.index("0.5.10")


def test_an_unknown_server_has_no_catalogue() -> None:
    assert published("other") is None
    assert indexed_versions("other") == ()

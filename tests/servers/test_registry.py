"""Servers by name: those built in, and plug-ins."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING

import pytest

from moetune.domain.errors import ServerError
from moetune.servers import registry
from moetune.servers.protocol import Server
from moetune.servers.registry import open_server, server_names
from moetune.servers.sglang import SGLang, open_sglang

if TYPE_CHECKING:
    from collections.abc import Callable


class Third(SGLang):
    """A third server, as a plug-in would bring it."""

    name = "third"


def open_third(version: str | None, triton_version: str | None) -> Third:
    return Third(version, triton_version)


def open_nothing(version: str | None, triton_version: str | None) -> object:
    del version, triton_version
    return object()


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def provide(name: str, value: str) -> None:
        points = EntryPoints([EntryPoint(name, value, registry.GROUP)])
        monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))

    return provide


def test_sglang_is_opened_by_name_in_any_case_with_the_versions_that_are_asked_for() -> None:
    server = open_server(" SGLang ", "0.5.12", "3.6.0")
    assert isinstance(server, Server)
    assert (server.name, server.version, server.triton_version) == ("sglang", "0.5.12", "3.6.0")
    assert open_server("sglang").version == open_sglang().version


def test_both_servers_are_known_by_name() -> None:
    assert {"sglang", "vllm"} <= set(server_names())
    assert list(server_names()) == sorted(server_names())


@pytest.mark.parametrize("name", ["", "tgi", "sglang2", "\x1b[31mx", "../sglang", "x" * 500])
def test_an_unknown_name_is_an_error_with_the_known_ones(name: str) -> None:
    with pytest.raises(ServerError) as refused:
        open_server(name)
    assert refused.value.message.isprintable()
    assert refused.value.hint is not None
    assert "sglang, vllm" in refused.value.hint


def test_a_version_without_rules_is_the_servers_own_error() -> None:
    with pytest.raises(ServerError, match=r"0\.1"):
        open_server("sglang", "0.1")


def test_a_plug_in_is_opened_like_the_others(plug_in: Callable[[str, str], None]) -> None:
    plug_in("third", "tests.servers.test_registry:open_third")
    assert open_server("third", "0.5.12").name == "third"
    assert "third" in server_names()


def test_a_plug_in_cannot_take_the_name_of_a_server_that_is_built_in(
    plug_in: Callable[[str, str], None],
) -> None:
    plug_in("sglang", "tests.servers.test_registry:open_third")
    assert open_server("sglang").name == "sglang"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("tests.servers.no_such_module:x", "does not load"),
        ("tests.servers.test_registry:no_such_thing", "does not load"),
        ("tests.servers.test_registry:open_nothing", "lacks"),
        ("tests.servers.test_registry:__doc__", "nothing that can be called"),
    ],
)
def test_a_broken_plug_in_is_an_error_that_names_it(
    plug_in: Callable[[str, str], None], value: str, word: str
) -> None:
    plug_in("third", value)
    with pytest.raises(ServerError, match=word) as refused:
        open_server("third")
    assert "third" in refused.value.message

"""The servers by name: those built in, and plug-ins through the entry-point group `moetune.servers`."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError
from moetune.domain.text import printable
from moetune.servers.protocol import Server

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "moetune.servers"
# Also here, so that a checkout that was never installed has them; a plug-in cannot replace them.
_BUILT_IN = {"sglang": "moetune.servers.sglang:open_sglang", "vllm": "moetune.servers.vllm:open_vllm"}


def server_names() -> tuple[str, ...]:
    """Names that `open_server` takes, in alphabetical order."""
    return tuple(sorted({*_BUILT_IN, *_plug_ins()}))


def open_server(name: str, version: str | None = None, triton_version: str | None = None) -> Server:
    """A release of a server.

    Args:
        name: as `server_names` lists it, in any case.
        version: of the server; None: the newest whose rules are known.
        triton_version: None: the one that the server's version pins.

    Raises:
        ServerError: for an unknown name, a plug-in that does not load, or a version without rules.
    """
    key = name.strip().lower()
    if key in _BUILT_IN:
        module, attribute = _BUILT_IN[key].split(":")
        server = getattr(import_module(module), attribute)(version, triton_version)
    else:
        server = _plug_in(key, name)(version, triton_version)
    if not isinstance(server, Server):
        raise ServerError(
            f"the plug-in {key!r} is no server: it lacks {', '.join(_missing(server))}",
            "the protocol is moetune.servers.protocol.Server",
        )
    return server


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _BUILT_IN}


def _plug_in(key: str, name: str) -> Callable[[str | None, str | None], object]:
    point = _plug_ins().get(key)
    if point is None:
        known = ", ".join(server_names())
        raise ServerError(f"unknown server {printable(name, 40)!r}", f"use --server with one of: {known}")
    try:
        opener = point.load()
    except (ImportError, AttributeError) as broken:
        raise ServerError(
            f"the plug-in {key!r} ({printable(point.value, 80)}) does not load: {printable(str(broken))}",
            "repair or remove the package that provides it",
        ) from broken
    if not callable(opener):
        raise ServerError(f"the plug-in {key!r} ({printable(point.value, 80)}) is nothing that can be called")
    return opener  # type: ignore[no-any-return]


def _missing(server: object) -> list[str]:
    wanted = [*Server.__annotations__, *(name for name in vars(Server) if not name.startswith("_"))]
    return sorted({name for name in wanted if not hasattr(server, name)})

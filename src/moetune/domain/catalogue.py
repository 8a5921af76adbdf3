"""Names of the tuned files that the servers' published wheels hold, by release.

`data/published_configs.json` is made by `training/published_configs.py` from the wheels and holds
names only, each with the first release that has it (`first..last` where a later one dropped it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from moetune.domain.version import Release, parse_release


@dataclass(frozen=True, slots=True)
class Published:
    """The tuned files of one release of a server.

    Attributes:
        server: `sglang` or `vllm`.
        version: the release that was indexed; another than the one asked for when that was not.
        home: path below the site folder of what the server's lookup starts from: the folder that
            holds `configs` for SGLang, the folder of the files for vLLM.
        directories: directory name (`triton_3_6_0`; empty for vLLM) to the file names in it.
    """

    server: str
    version: str
    home: str
    directories: Mapping[str, frozenset[str]]


def published(server: str, release: Release | None = None) -> Published | None:
    """The tuned files that a release of a server ships.

    Args:
        server: `sglang` or `vllm`.
        release: a release; for one that was not indexed the newest indexed one before it, else the
            oldest. None takes the newest.

    Returns:
        None for a server whose wheels were not indexed.
    """
    if server not in _index():
        return None
    versions = indexed_versions(server)
    older = [version for version in versions if release is None or parse_release(version) <= release]
    return _published(server, older[-1] if older else versions[0])


def indexed_versions(server: str) -> tuple[str, ...]:
    """Releases of a server whose wheels were indexed, oldest first."""
    return tuple(sorted(_index().get(server, {"homes": {}})["homes"], key=parse_release))


@cache
def _published(server: str, version: str) -> Published:
    entry, release = _index()[server], parse_release(version)
    spans = {span for names in entry["files"].values() for span in names.values()}
    held = frozenset(span for span in spans if _holds(span, release))
    directories = {
        directory: frozenset(name for name, span in names.items() if span in held)
        for directory, names in entry["files"].items()
    }
    present = {directory: names for directory, names in directories.items() if names}
    return Published(server, version, entry["homes"][version], present)


def _holds(span: str, release: Release) -> bool:
    first, _, last = span.partition("..")
    return parse_release(first) <= release and (not last or release <= parse_release(last))


@cache
def _index() -> dict[str, Any]:
    text = (
        resources.files("moetune.domain")
        .joinpath("data")
        .joinpath("published_configs.json")
        .read_text("utf-8")
    )
    index: dict[str, Any] = json.loads(text)
    return index

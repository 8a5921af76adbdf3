"""Release numbers as tuples, enough to compare the versions of servers and of Triton."""

from __future__ import annotations

import re

from moetune.domain.errors import ServerError

Release = tuple[int, ...]

_RELEASE = re.compile(
    r"v?(\d{1,6}(?:\.\d{1,6}){0,4})(?:[._+-]?(?:post|rc|dev|a|b|g)[\w.+-]{0,64}|\+[\w.]{0,64})?", re.A
)


def parse_release(text: str) -> Release:
    """Read the release part of a version: `0.5.12.post1` gives `(0, 5, 12)`.

    Raises:
        ServerError: when the text is no version.
    """
    match = _RELEASE.fullmatch(text.strip())
    if match is None:
        raise ServerError(f"{text[:80]!r} is not a version", "give it as in 0.5.23")
    return tuple(int(part) for part in match.group(1).split("."))


def release_text(release: Release) -> str:
    """Write a release as it stands in a version: `(3, 6, 0)` gives `3.6.0`."""
    return ".".join(map(str, release))

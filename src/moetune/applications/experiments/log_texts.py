"""Looks for texts in a log of any size, line by line of any length, in constant memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CHUNK = 1 << 20
_BEFORE = 80
_SHOWN = 300
MAX_TEXTS = 256
LONGEST_TEXT = 1024


def find_texts(log: Path, texts: Sequence[str]) -> tuple[str, ...]:
    """Of these texts, those that the log holds: what stands around the first place of each.

    A text comes back with the beginning and the end of its line, as far as that fits: it is evidence
    for people, and the text itself always stands in it. Control characters are gone.

    Args:
        log: a file; one that cannot be read holds nothing.
        texts: to look for, as they stand in the log, in one line each.
    """
    wanted = {
        text: text.encode() for text in dict.fromkeys(texts[:MAX_TEXTS]) if 0 < len(text) <= LONGEST_TEXT
    }
    found: dict[str, str] = {}
    overlap = max((len(needle) for needle in wanted.values()), default=0) + _BEFORE + 4 * _SHOWN
    try:
        with log.open("rb") as stream:
            buffer = b""
            while len(found) < len(wanted) and (chunk := stream.read(_CHUNK)):
                buffer += chunk
                # What stands near the end is looked at again with what follows it.
                last = len(buffer) - overlap if len(chunk) == _CHUNK else len(buffer)
                for text, needle in wanted.items():
                    if text not in found and 0 <= (place := buffer.find(needle)) <= last:
                        found[text] = _around(buffer, place, text)
                buffer = buffer[max(0, last - _BEFORE) :]
            for text, needle in wanted.items():
                if text not in found and (place := buffer.find(needle)) >= 0:
                    found[text] = _around(buffer, place, text)
    except OSError:
        return ()
    return tuple(dict.fromkeys(found[text] for text in wanted if text in found))


def _around(buffer: bytes, place: int, text: str) -> str:
    """The line around a place; its text stays whole."""
    size = len(text.encode())
    first = max(buffer.rfind(b"\n", 0, place) + 1, place - _BEFORE)
    end = buffer.find(b"\n", place + size)
    end = min(len(buffer) if end < 0 else end, place + size + _SHOWN)
    before = printable(buffer[first:place].decode("utf-8", "replace"), _BEFORE)
    after = printable(buffer[place + size : end].decode("utf-8", "replace"), _SHOWN)
    return f"{before}{printable(text, LONGEST_TEXT)}{after}".strip()

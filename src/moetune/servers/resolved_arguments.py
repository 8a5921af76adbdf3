"""Every argument that a server prints when it starts: its log's longest line, taken apart.

SGLang prints `server_args=ServerArgs(name=value, ...)` up to 0.5.18 and the dictionary of the resolved
values from 0.5.20 (`entrypoints/engine.py`, `server_args.py` of the sglang wheels). vLLM prints
`non-default args: {...}` and the fields of its config, without brackets around them (`entrypoints/utils.py`
and `config/vllm.py:VllmConfig.__str__` of the vllm wheels). Values are printed by `repr` and hold objects of
all kinds, so that no literal parser reads them: here only brackets, quotation marks and commas count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MARKS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("server_args=ServerArgs(", "server_args={"),
    "vllm": ("non-default args: {", ") with config: "),
}
"""What stands before the arguments, by server; the last one of a start is the resolved one."""

_MAX_TEXT = 1 << 18
_MAX_ARGUMENTS = 4096
_MAX_VALUE = 1 << 14
_NAME = re.compile(r"\s*(?:'([A-Za-z_]\w{0,127})'\s?:|\"([A-Za-z_]\w{0,127})\"\s?:|([A-Za-z_]\w{0,127})=)\s?")
_OPEN, _CLOSE = "([{", ")]}"


def read_arguments(server: str, text: str) -> dict[str, str]:
    """The arguments that a line prints, name to value without quotes; nothing for any other line.

    Args:
        server: `sglang` or `vllm`.
        text: a line of its log.
    """
    for mark in MARKS.get(server, ()):
        place = text.find(mark)
        if place >= 0:
            return dict(_fields(text[place + len(mark) : place + len(mark) + _MAX_TEXT]))
    return {}


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """`name=value` and `'name': value` between commas outside of all brackets and quotes."""
    name, parts, count = "", [""], 0
    for piece in _pieces(text):
        match = _NAME.match(piece)
        if match is None:
            parts.append(piece)  # a comma inside a printed object
            continue
        if name:
            yield name, _value(",".join(parts))
            count += 1
            if count >= _MAX_ARGUMENTS:
                return
        name, parts = match[1] or match[2] or match[3], [piece[match.end() :]]
    if name:
        yield name, _value(",".join(parts))


def _pieces(text: str) -> Iterator[str]:
    """The text between commas, up to the bracket that closes what was open before it."""
    depth, quote, start, escaped = 0, "", 0, False
    for place, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
            if depth < 0:
                yield text[start:place]
                return
        elif character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _value(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        text = text[1:-1]
    return text[:_MAX_VALUE]

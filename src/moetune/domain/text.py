"""Text of other people's machines, made fit for a message."""

from __future__ import annotations

import re

# ECMA-48 control sequences and operating-system commands; each alternative is bounded, so that the
# expression runs in linear time.
_ESCAPE = re.compile(r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,16}[@-~]?|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?")


def printable(text: str, limit: int = 120) -> str:
    """Strip what could steer a terminal, and cut what is too long.

    Args:
        text: any text.
        limit: characters to keep; a cut is marked by an ellipsis.
    """
    text = text[: 16 * limit]
    if not (text.isascii() and text.isprintable()):
        text = _ESCAPE.sub("", text)
        # Not printable are controls, bidirectional overrides, zero width, separators, and what has no glyph.
        text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Lines of a log, without what container engines, orchestrators and ranks put before them.

Every expression here is bounded and runs in linear time. Formats: `docker compose logs`, docker's
json-file driver, `kubectl logs --prefix` and `--timestamps`, the CRI files below /var/log/pods,
`journalctl` in its short and JSON forms, ray, and the rank prefixes of SGLang and vLLM.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_TEXT = 1 << 20
"""Characters of a line that are looked at."""

_MAX_LAYERS = 6  # a compose prefix, a timestamp, a rank prefix, ... one inside the other
_MAX_JUNCTIONS = 5
_JSON_KEYS = ("log", "message", "msg", "MESSAGE")
_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"

_ANSI = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,16}[@-~]|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]?"
)
_CRI = re.compile(rf"{_ISO} (?:stdout|stderr) ([FP])(?: |$)")
_KUBECTL = re.compile(r"\[pod/([^\]\s]{1,300})\] ?")
_COMPOSE = re.compile(r"([A-Za-z0-9][\w.-]{0,100}) {0,64}\| ?")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) ")
_JOURNAL = re.compile(
    rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{{1,6}})?|{_ISO}) "
    r"[A-Za-z0-9][\w.-]{0,253} ([\w.@\\/-]{1,128})(?:\[\d{1,10}\])?: "
)
_PROCESS = re.compile(r"\(([^()\n]{0,100}?)\bpid=\d{1,10}(?:, ?ip=[\da-fA-F.:]{1,45})?\) ?")
_RANK = re.compile(r"(?:DP|TP|EP|PP|CP)\d{1,4}|\brank[= ]\d{1,4}", re.A)
# What pasting into a web page or a mail leaves: HTML of a coloured terminal, quotation marks, and
# colours that lost their escape character.
_TAG = re.compile(r"</?(?:font|span|b|i|u|pre|code|br)\b[^<>\n]{0,200}>")
_QUOTED = re.compile(r"(?:> ?){1,8}(?=\S)")
_BARE_COLOR = re.compile(r"\[\d{1,2}(?:;\d{1,3}){0,4}m ?")
# A record that begins inside a line: after a progress bar, or where line ends were lost.
_INSIDE = re.compile(
    r"(?=\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d|"
    r"\((?:Worker|VllmWorker|RayWorker|EngineCore|APIServer)[^()\n]{0,60}pid=\d)"
)
# How servers and Python begin a record: what follows a line without one is its continuation.
_HEADER = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \[[\w.]{1,60}:\d"
    r"|\[" + _ISO + r"(?P<rank>(?: (?:[A-Z_]{1,16}\d{1,4})){0,8})\] ?"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::| \d\d-\d\d \d\d:\d\d:\d\d)"
    rf"|{_ISO}"
    r"|Traceback \(most"
    r"|  File \""
    r"|[A-Za-z_][\w.]{0,100}(?:Error|Exception|OutOfResources)\b"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log.

    Attributes:
        text: what the program printed.
        rank: the rank that printed it (`TP0`), empty when it is not said.
        starts_record: it begins as records do; a line that does not may continue the one before.
        continues: the container engine cut the line here, and the next one continues it.
        wrapped_by: a container engine wrote the line, so that `continues` is known.
    """

    text: str
    rank: str = ""
    starts_record: bool = False
    continues: bool = False
    wrapped_by: str = ""


def read_line(raw: bytes) -> LogLine:
    """Take the prefixes off a line.

    Args:
        raw: the line without its end; what is no UTF-8 is replaced.
    """
    text = raw[: 4 * MAX_TEXT].decode("utf-8", "replace")[:MAX_TEXT].strip("\r\n")
    rank, continues, engine = "", False, ""
    text = _plain(text)
    for _ in range(_MAX_LAYERS):
        first = text[:1]
        if first == "{" and (inner := _json_text(text)) is not None:
            engine, continues = "json", not inner.endswith("\n") and '"log"' in text[:8]
            text = _plain(inner.rstrip("\r\n"))
        elif match := _CRI.match(text):
            engine, continues = "cri", match[1] == "P"
            text = text[match.end() :]
        elif (
            match := _KUBECTL.match(text)
            or _COMPOSE.match(text)
            or _JOURNAL.match(text)
            or _STAMP.match(text)
        ):
            text = text[match.end() :]
        elif match := _PROCESS.match(text):
            found = _RANK.findall(match[1].replace("_", " "))
            rank = " ".join(found) or rank or match[0].strip("() ")
            text = _plain(text[match.end() :])
        else:
            break
    header = _HEADER.match(text)
    if header is not None and header["rank"]:
        rank = header["rank"].strip()
    return LogLine(text, rank, header is not None, continues, engine)


def records(text: str) -> list[str]:
    """The records of a line: one as a rule, several where a bar or a paste put them into one line."""
    parts = _INSIDE.split(text)[:1024] if "[" in text or "(" in text else [text]
    return [part for part in parts if part] or [text]


def body(text: str) -> str:
    """A record without the time and the rank at its beginning: equal for equal messages of two ranks."""
    match = _HEADER.match(text)
    return text[match.end() :] if match is not None and match[0].startswith("[") else text


def joinings(parts: Sequence[str]) -> Iterator[str]:
    """Every way to join the pieces of a wrapped line: a terminal cuts anywhere, a wrapper at blanks.

    Args:
        parts: pieces in their order. Beyond five all junctions are joined alike.
    """
    pieces = [part.strip("\r\n") for part in parts]
    junctions = len(pieces) - 1
    if junctions > _MAX_JUNCTIONS:
        yield "".join(pieces)
        yield " ".join(piece.strip() for piece in pieces)
        return
    # The pieces of an indented continuation lost no character but blanks.
    stripped = [pieces[0], *(piece.lstrip() for piece in pieces[1:])]
    for glue in islice(product(("", " "), repeat=junctions), 1 << _MAX_JUNCTIONS):
        text = stripped[0]
        for space, piece in zip(glue, stripped[1:], strict=True):
            text = (text.rstrip() if space else text) + space + piece
        yield text


def _plain(text: str) -> str:
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "m" in text and text.startswith("["):
        text = _BARE_COLOR.sub("", text, count=1) if _BARE_COLOR.match(text) else text
    if "&" in text and ";" in text:
        text = html.unescape(text)
    if "</" in text or "<font" in text or "<span" in text:
        text = _TAG.sub("", text)
    quoted = _QUOTED.match(text)
    return text[quoted.end() :] if quoted is not None else text


def _json_text(text: str) -> str | None:
    """The message of a line that is a JSON object of a log driver; None for any other line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return next((value[key] for key in _JSON_KEYS if isinstance(value.get(key), str)), None)

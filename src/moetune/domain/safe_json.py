"""JSON from other people's machines: limits on size, depth and numbers; duplicate keys are seen.

What `json` alone lets through and what this refuses: NaN and infinities, numbers of thousands of
digits, nesting that exhausts the stack, lone surrogates (they fail when printed), and an object that
says the same key twice.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from moetune.domain.errors import InputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """What a document may hold.

    Attributes:
        max_bytes: of the text.
        max_depth: objects and lists inside one another.
        max_digits: of one number.
        non_finite: let NaN and infinities through, as Python's own reader does.
    """

    max_bytes: int = 8 << 20
    max_depth: int = 32
    max_digits: int = 64
    non_finite: bool = False


DEFAULT_LIMITS = JsonLimits()


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A JSON object as read.

    Attributes:
        value: the object; of a key that is there twice, the last value, as `json.load` keeps it.
        duplicate_keys: keys that an object holds twice, in the order of the text.
    """

    value: JsonObject
    duplicate_keys: tuple[str, ...] = ()


def load_json_object(
    text: str | bytes,
    source: str,
    limits: JsonLimits = DEFAULT_LIMITS,
    error: type[InputError] = InputError,
) -> JsonObject:
    """Read a JSON object, and refuse one that says a key twice.

    Args:
        text: the document; bytes are read as UTF-8.
        source: where it comes from, for the message.
        limits: what it may hold.
        error: the kind of error to raise.

    Raises:
        InputError: (or `error`) with what is wrong and where.
    """
    document = read_json_object(text, source, limits, error)
    if document.duplicate_keys:
        keys = ", ".join(repr(printable(key, 40)) for key in document.duplicate_keys[:5])
        raise error(
            f"{printable(source, 400)} says a key twice: {keys}", "remove the entry that is not meant"
        )
    return document.value


def read_json_object(
    text: str | bytes,
    source: str,
    limits: JsonLimits = DEFAULT_LIMITS,
    error: type[InputError] = InputError,
) -> JsonDocument:
    """Read a JSON object and report the keys that it says twice.

    The arguments and errors are those of `load_json_object`.
    """
    where = printable(source, 400)
    if len(text) > limits.max_bytes or len(_encoded(text)) > limits.max_bytes:
        raise error(f"{where} is larger than {limits.max_bytes} bytes, which no such file is")
    decoded = _decode(text, where, error)
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> JsonObject:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    duplicates.append(key)
                seen.add(key)
        return result

    def whole(digits: str) -> int:
        if len(digits) > limits.max_digits:
            raise _RefusedError(f"holds a number of {len(digits)} digits")
        return int(digits)

    def fraction(digits: str) -> float:
        if len(digits) > limits.max_digits:
            raise _RefusedError(f"holds a number of {len(digits)} digits")
        value = float(digits)
        if not math.isfinite(value):
            raise _RefusedError(f"holds {digits}, which is too large for a number")
        return value

    try:
        value = json.loads(
            decoded,
            object_pairs_hook=pairs,
            parse_int=whole,
            parse_float=fraction,
            parse_constant=float if limits.non_finite else _constant,
        )
    except _RefusedError as refused:
        raise error(f"{where} {refused}") from None
    except json.JSONDecodeError as broken:
        raise error(
            f"{where} is not JSON: {broken.msg} (line {broken.lineno}, column {broken.colno})",
            "check that the file is whole and was not edited into a shape that JSON does not have",
        ) from None
    except RecursionError:
        raise error(f"{where} is nested deeper than {limits.max_depth} levels") from None
    if not isinstance(value, dict):
        raise error(f"{where} holds {_KINDS.get(type(value), 'no object')} where an object is expected")
    problem = _examine(value, limits)
    if problem is not None:
        raise error(f"{where} {problem}")
    return JsonDocument(value, tuple(duplicates))


class _RefusedError(Exception):
    """A value that `json` would take and that we do not."""


_KINDS: Mapping[type, str] = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _constant(name: str) -> NoReturn:
    raise _RefusedError(f"holds {name}, which is no number in JSON")


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _decode(text: str | bytes, where: str, error: type[InputError]) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as broken:
            raise error(f"{where} is not UTF-8 text (byte {broken.start})") from None
    if text.startswith("\ufeff"):
        raise error(
            f"{where} begins with a byte order mark, which the servers' JSON reader refuses",
            "save the file as UTF-8 without a byte order mark",
        )
    return text


def _examine(value: JsonObject, limits: JsonLimits) -> str | None:
    """Say what is wrong with the depth or the texts of a document, level by level."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > limits.max_depth:
            return f"is nested deeper than {limits.max_depth} levels"
        deeper: list[Any] = []
        for holder in level:
            if isinstance(holder, dict):
                texts = [*holder, *(item for item in holder.values() if isinstance(item, str))]
                members = list(holder.values())
            else:
                texts = [item for item in holder if isinstance(item, str)]
                members = holder
            if any(not text.isascii() and _has_surrogate(text) for text in texts):
                return "holds half of a character (a lone surrogate)"
            deeper += [item for item in members if isinstance(item, (dict, list))]
        level = deeper
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)

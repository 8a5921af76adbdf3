"""Frozen dataclasses to JSON values and back, by the types of their fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from moetune.domain.errors import InputError
from moetune.domain.text import printable

T = TypeVar("T")


def to_json(value: object) -> Any:  # noqa: ANN401 - any JSON value
    """A JSON value: dataclasses as objects by field name, enums as their values, tuples as lists.

    A mapping has texts as its keys.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def from_json(cls: type[T], value: object, source: str) -> T:
    """Build a dataclass from a JSON value.

    Fields that the class does not know are passed over: a newer minor version may add some.

    Raises:
        InputError: naming the field that is missing or of another type.
    """
    return cast("T", _build(cls, value, printable(source, 400)))


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _build(kind: object, value: object, where: str) -> object:
    if is_dataclass(kind):
        return _dataclass(cast("type", kind), value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        rest = [argument for argument in get_args(kind) if argument is not type(None)]
        if len(rest) == 1:
            return _build(rest[0], value, where)
    elif origin is tuple:
        return _tuple(get_args(kind), value, where)
    elif origin is Mapping:
        if not isinstance(value, dict):
            raise _mismatch(value, where, "an object")
        kinds = get_args(kind)
        return {name: _build(kinds[1], item, f"{where}: {name}") for name, item in value.items()}
    elif origin is Literal:
        if value in get_args(kind) and isinstance(value, str):
            return value
        raise _mismatch(value, where, " or ".join(map(repr, get_args(kind))))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        known = {member.value: member for member in kind}
        if isinstance(value, str) and value in known:
            return known[value]
        raise _mismatch(value, where, "one of " + ", ".join(map(str, known)))
    elif kind in _SCALARS:
        return _scalar(kind, value, where)
    raise TypeError(f"{where}: no JSON form for {kind}")


def _dataclass(cls: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _mismatch(value, where, "an object")
    arguments = {}
    for field in fields(cls):
        if field.name in value:
            arguments[field.name] = _build(
                _hints(cls)[field.name], value[field.name], f"{where}: {field.name}"
            )
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where} lacks {field.name}")
    return cls(**arguments)


def _tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _mismatch(value, where, "a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise _mismatch(value, where, f"a list of {len(kinds)}")
    return tuple(_build(kind, item, where) for kind, item in zip(kinds, value, strict=True))


_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _scalar(kind: type, value: object, where: str) -> object:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if type(value) is kind:
        return value
    raise _mismatch(value, where, _SCALARS[kind])


def _mismatch(value: object, where: str, wanted: str) -> InputError:
    return InputError(f"{where} is {printable(repr(value), 40)}, not {wanted}")

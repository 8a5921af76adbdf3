"""The levels of a config.json: where the language model's config is nested, and what a field's keys say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune.domain.errors import ModelError
from moetune.domain.model_keys import FIELD_KEYS, NESTS, NO_NESTS, SWITCHES
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

Config = Mapping[str, Any]

BY_HAND = "give the numbers by hand: --experts E --topk T --hidden K --intermediate N"
_MAX_NESTING = 4
_MAX_NESTS = 64
_MAX_LIST = 4096
_MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class Reading:
    """A value and the key that it came from."""

    value: int
    key: str


@dataclass(frozen=True, slots=True)
class Level:
    """One object of a config.json, with the objects that hold it.

    Attributes:
        path: keys that lead to it from the top.
        chain: the object itself, then those around it, the top last.
    """

    path: tuple[str, ...]
    chain: tuple[Config, ...]

    def label(self, depth: int, key: str) -> str:
        """A key with the path to it, as a person would write it."""
        return ".".join((*self.path[: len(self.path) - depth], key))

    def raw(self, field: str) -> Iterator[tuple[str, object]]:
        """What the keys of a field hold on the innermost level that has any of them."""
        for depth, config in enumerate(self.chain):
            present = [(k, config[k]) for k in FIELD_KEYS[field] if config.get(k) is not None]
            if present:
                yield from ((self.label(depth, key), value) for key, value in present)
                return

    def number(self, field: str, moe_layers: tuple[int, ...] | None = None) -> Reading | None:
        """The whole number that a field's keys hold; None when there is none of them.

        A list of one value for each layer gives the value of the layers with experts.

        Raises:
            ModelError: when keys or layers contradict one another, or what is there is no size.
        """
        readings = [Reading(_whole(value, key, moe_layers), key) for key, value in self.raw(field)]
        return self.agreed(readings, field)

    def number_at(self, key: str, moe_layers: tuple[int, ...] | None = None) -> Reading | None:
        """The whole number under one key of the innermost level that has it."""
        for depth, config in enumerate(self.chain):
            if config.get(key) is not None:
                label = self.label(depth, key)
                return Reading(_whole(config[key], label, moe_layers), label)
        return None

    @staticmethod
    def agreed(readings: list[Reading], field: str) -> Reading | None:
        """The one value of all readings."""
        if len({reading.value for reading in readings}) > 1:
            shown = ", ".join(f"{reading.key}={reading.value}" for reading in readings)
            raise ModelError(f"the config gives different values for {field}: {shown}", BY_HAND)
        return readings[0] if readings else None

    def texts(self, key: str) -> Iterator[str]:
        """Texts under a key, innermost level first; of a list its first entry."""
        for config in self.chain:
            value = config.get(key)
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, str) and value:
                yield printable(value)

    @property
    def kinds(self) -> frozenset[str]:
        """Every `model_type` and first architecture on the way, in lower case."""
        return frozenset(t.lower() for key in ("model_type", "architectures") for t in self.texts(key))

    @property
    def switched_off(self) -> str | None:
        """The key that says that there are no experts, None when none does."""
        return next((key for key in SWITCHES if self.chain[0].get(key) is False), None)

    def seen(self) -> str:
        """The keys that could have to do with experts, for a message."""
        parts = ("expert", "moe", "top_k", "topk", "intermediate", "ffn", "hidden_size", "d_model")
        found = {
            self.label(depth, printable(key, 60)): printable(str(value)[:400], 40)
            for depth, config in enumerate(self.chain)
            for key, value in config.items()
            if any(part in key.lower() for part in parts) and isinstance(value, (int, list))
        }
        shown = ", ".join(f"{key}={value}" for key, value in list(found.items())[:16])
        return shown or "none"


def find_levels(config: Config) -> tuple[Level, ...]:
    """Every object that may hold the config of the language model, the top first."""
    top = Level((), (config,))
    return (top, *_below(top))


def expert_level(levels: tuple[Level, ...]) -> Level | None:
    """The level that holds the number of experts; None when none does.

    Raises:
        ModelError: when several do and they differ in their experts.
    """
    holders = [level for level in levels if level.switched_off is None and _has_experts(level)]
    listed = [level for level in holders if set(level.path) <= set(NESTS)]
    holders = listed or holders
    if len({_values(level) for level in holders}) > 1:
        shown = "; ".join(level.seen() for level in holders[:4])
        raise ModelError(f"several parts of the config have experts, and they differ: {shown}", BY_HAND)
    return max(holders, key=lambda level: len(level.path), default=None)


_SHAPE = ("num_experts", "topk", "hidden_size", "intermediate_size")


def _values(level: Level) -> tuple[str, ...]:
    return tuple(str([value for _, value in level.raw(field)][:1]) for field in _SHAPE)


def _has_experts(level: Level) -> bool:
    own = level.chain[0]
    values = [own[key] for key in FIELD_KEYS["num_experts"] if own.get(key) is not None]
    return any(_is_many(value) for value in values)


def _is_many(value: object) -> bool:
    if isinstance(value, list):
        return any(_is_many(item) for item in value[:_MAX_LIST] if not isinstance(item, list))
    # What is no number at all is kept: reading it then says what is wrong with it.
    return not (type(value) is int and value <= 1)


def _below(level: Level) -> Iterator[Level]:
    if len(level.path) == _MAX_NESTING:
        return
    for key, value in list(level.chain[0].items())[: _MAX_NESTS * 16]:
        if isinstance(value, Mapping) and _may_nest(key):
            deeper = Level((*level.path, key), (value, *level.chain))
            yield deeper
            yield from _below(deeper)


def _may_nest(key: str) -> bool:
    return key in NESTS or (key.endswith("_config") and not any(part in key.lower() for part in NO_NESTS))


def _whole(value: object, key: str, moe_layers: tuple[int, ...] | None) -> int:
    if isinstance(value, list):
        return _of_list(value, key, moe_layers)
    if type(value) is not int:
        raise ModelError(f"{key} is {printable(str(value)[:400], 40)!r}, not a whole number", BY_HAND)
    if not 0 <= value <= _MAX_SIZE:
        raise ModelError(f"{key} is {printable(str(value)[:400], 40)}, which no model has", BY_HAND)
    return value


def _of_list(values: list[object], key: str, moe_layers: tuple[int, ...] | None) -> int:
    if not values or len(values) > _MAX_LIST:
        raise ModelError(f"{key} is a list of {len(values)} values", BY_HAND)
    if any(isinstance(value, list) for value in values):
        raise ModelError(f"{key} is a list of lists", BY_HAND)
    every = [_whole(value, key, None) for value in values if value is not None]
    distinct = sorted({value for value in every if value > 0})
    if len(distinct) > 1 and moe_layers is not None and max(moe_layers, default=-1) < len(values):
        chosen = [values[layer] for layer in moe_layers]
        distinct = sorted({value for value in chosen if isinstance(value, int) and value > 0})
    if len(distinct) > 1:
        shown = ", ".join(map(str, distinct[:12]))
        raise ModelError(f"{key} differs between layers: {shown}", BY_HAND)
    return distinct[0] if distinct else 0

"""One kernel config, a table of them by m, and the JSON that holds a table."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from moetune.domain.errors import ConfigFileError
from moetune.domain.safe_json import read_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONFIG_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_REQUIRED = CONFIG_KEYS[:4]
_OPTIONAL = {"num_warps": 4, "num_stages": 3}  # what Triton takes on CUDA for an entry that lacks them
_USE_TMA = "USE_TMA"
# Keys become names of the kernel's keyword arguments; values its 32-bit integers.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_MAX_VALUE = 2**31 - 1
_MAX_ENTRIES = 4096
_MAX_KEY_CHARS = 20
_MAX_SOURCE_CHARS = 400  # a path, a file name and an entry


@dataclass(frozen=True, slots=True, order=True)
class KernelConfig:
    """A config of the fused-MoE kernel.

    `num_warps` and `num_stages` are Triton's own defaults (4 and 3) where an entry lacks them.

    Attributes:
        extra: further keys as they stand in the file (`SPLIT_K`, `waves_per_eu`, ...), sorted.
    """

    block_size_m: int
    block_size_n: int
    block_size_k: int
    group_size_m: int
    num_warps: int = 4
    num_stages: int = 3
    use_tma: bool = False
    extra: tuple[tuple[str, int | bool | str], ...] = ()

    def __str__(self) -> str:
        tma = " tma" if self.use_tma else ""
        return (
            f"{self.block_size_m}x{self.block_size_n}x{self.block_size_k} "
            f"g{self.group_size_m} w{self.num_warps} s{self.num_stages}{tma}"
        )

    @classmethod
    def from_json(cls, entry: object, source: str) -> KernelConfig:
        """Read one entry of a config file.

        Whether the values can run is not asked here.

        Args:
            entry: the JSON value of one m.
            source: where it stands, for the message.

        Raises:
            ConfigFileError: for what is no entry of this kernel.
        """
        where = printable(source, _MAX_SOURCE_CHARS)
        if not isinstance(entry, dict):
            raise ConfigFileError(f"{where} is no object with {', '.join(_REQUIRED)}")
        missing = [key for key in _REQUIRED if key not in entry]
        if missing:
            raise ConfigFileError(f"{where} lacks {', '.join(missing)}")
        values = (_whole(entry.get(key, _OPTIONAL.get(key)), key, where) for key in CONFIG_KEYS)
        m, n, k, group, warps, stages = values
        use_tma = entry.get(_USE_TMA, False)
        if not isinstance(use_tma, bool):
            raise ConfigFileError(f"{where}: USE_TMA is {_shown(use_tma)}, not true or false")
        known = {*CONFIG_KEYS, _USE_TMA}
        extra = sorted((key, _extra(value, key, where)) for key, value in entry.items() if key not in known)
        return cls(m, n, k, group, warps, stages, use_tma, tuple(extra))

    def to_json(self) -> dict[str, int | bool | str]:
        """The entry as it stands in a file: every key written out, USE_TMA only where it is on."""
        entry: dict[str, int | bool | str] = dict(zip(CONFIG_KEYS, self._values(), strict=True))
        if self.use_tma:
            entry[_USE_TMA] = True
        return entry | dict(self.extra)

    def sort_key(self) -> tuple[int | bool | str, ...]:
        """Orders any two configs, also those whose extra values are of different types."""
        return (*self._values(), self.use_tma, repr(self.extra))

    def _values(self) -> tuple[int, ...]:
        return (
            self.block_size_m,
            self.block_size_n,
            self.block_size_k,
            self.group_size_m,
            self.num_warps,
            self.num_stages,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """The m for which a server picks one key: `first` to `last`, both included."""

    key: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TableDiff:
    """What another table changes.

    Attributes:
        added: m that only the other table has, with its config.
        removed: m that only this table has, with its config.
        changed: m, the config here, the config there.
        unchanged: m with the same config in both.
    """

    added: tuple[tuple[int, KernelConfig], ...] = ()
    removed: tuple[tuple[int, KernelConfig], ...] = ()
    changed: tuple[tuple[int, KernelConfig, KernelConfig], ...] = ()
    unchanged: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """m to config, in the order of the file: a server breaks ties by it."""

    entries: tuple[tuple[int, KernelConfig], ...]

    def __post_init__(self) -> None:
        if len(dict(self.entries)) != len(self.entries):
            raise ValueError("a table holds each m once")

    @classmethod
    def of(cls, configs: Mapping[int, KernelConfig] | Iterable[tuple[int, KernelConfig]]) -> ConfigTable:
        """A table in ascending order of m; of an m that is there twice the last config."""
        return cls(tuple(dict(configs).items())).sorted()

    @classmethod
    def from_json(
        cls, document: Mapping[str, Any], source: str, ignored_keys: frozenset[str] = frozenset()
    ) -> ConfigTable:
        """Read the object of a config file.

        Both servers pass each key through `int`, so ` 8 ` and `1_0` are keys, and of two keys with
        one value the last entry stands at the place of the first.

        Args:
            document: the JSON object.
            source: the file, for the message.
            ignored_keys: top-level keys that the reader drops (`triton_version` in vLLM).

        Raises:
            ConfigFileError: for a key that is no number or an entry of another kernel.
        """
        where = printable(source, _MAX_SOURCE_CHARS)
        if len(document) > _MAX_ENTRIES:
            raise ConfigFileError(f"{where} has {len(document)} entries; no table needs {_MAX_ENTRIES}")
        entries: dict[int, KernelConfig] = {}
        for key, entry in document.items():
            if key not in ignored_keys:
                m = _table_key(key, where)
                entries[m] = KernelConfig.from_json(entry, f"{where}: entry {key!r}")
        return cls(tuple(entries.items()))

    @classmethod
    def parse(cls, text: str | bytes, source: str, ignored_keys: frozenset[str] = frozenset()) -> ConfigTable:
        """Read the text of a config file; of a key that is there twice the last entry counts.

        Raises:
            ConfigFileError: for what is no config file.
        """
        document = read_json_object(text, source, error=ConfigFileError)
        return cls.from_json(document.value, source, ignored_keys)

    def __len__(self) -> int:
        return len(self.entries)

    def to_json(self) -> dict[str, dict[str, int | bool | str]]:
        """The object of a config file, in this table's order."""
        return {str(m): config.to_json() for m, config in self.entries}

    def render(self) -> str:
        """The canonical text: ascending m, four spaces, a newline at the end."""
        return json.dumps(self.sorted().to_json(), indent=4) + "\n"

    def keys(self) -> tuple[int, ...]:
        """The m of the table, in its order."""
        return tuple(m for m, _ in self.entries)

    def get(self, m: int) -> KernelConfig | None:
        """The entry of exactly that m."""
        return dict(self.entries).get(m)

    def sorted(self) -> ConfigTable:
        """The same entries in ascending order of m."""
        return ConfigTable(tuple(sorted(self.entries, key=lambda entry: entry[0])))

    def nearest_key(self, m: int) -> int:
        """The key that a server picks for m: the nearest, of two the first in file order.

        Source: `try_get_optimal_moe_config` of sglang 0.5.23 and vllm 0.33.0.

        Raises:
            ConfigFileError: when the table is empty: a server then uses its default.
        """
        if not self.entries:
            raise ConfigFileError("the table is empty, so that no entry can be picked from it")
        return min(self.keys(), key=lambda key: abs(key - m))

    def nearest(self, m: int) -> KernelConfig:
        """The entry that a server picks for m.

        Raises:
            ConfigFileError: when the table is empty.
        """
        return dict(self.entries)[self.nearest_key(m)]

    def spans(self, last: int) -> tuple[Span, ...]:
        """For each key that some m from 1 to `last` picks, those m; in ascending order."""
        place = {m: index for index, m in enumerate(self.keys())}
        keys = sorted(place)
        ends = []
        for key, above in pairwise(keys):
            middle, is_odd = divmod(key + above, 2)
            ends.append(middle if is_odd or place[key] < place[above] else middle - 1)
        spans = []
        first = 1
        for key, end in zip(keys, [*ends, last], strict=False):
            end = min(end, last)
            if end >= first:
                spans.append(Span(key, first, end))
                first = end + 1
        return tuple(spans)

    def covers(self, first: int, last: int) -> bool:
        """Whether the keys reach from `first` to `last`, so that no m outside borrows its entry."""
        return bool(self.entries) and min(self.keys()) <= first and max(self.keys()) >= last

    def merge(self, other: ConfigTable) -> ConfigTable:
        """Both tables by key, in ascending order; where both have an m the other's entry wins."""
        return ConfigTable.of(dict(self.entries) | dict(other.entries))

    def diff(self, other: ConfigTable) -> TableDiff:
        """What the other table changes, by m in ascending order."""
        before, after = dict(self.entries), dict(other.entries)
        both = sorted(before.keys() & after.keys())
        return TableDiff(
            added=tuple((m, after[m]) for m in sorted(after.keys() - before.keys())),
            removed=tuple((m, before[m]) for m in sorted(before.keys() - after.keys())),
            changed=tuple((m, before[m], after[m]) for m in both if before[m] != after[m]),
            unchanged=tuple(m for m in both if before[m] == after[m]),
        )


def pair_mismatches(up: ConfigTable, down: ConfigTable, last: int) -> tuple[tuple[int, int, int], ...]:
    """Where a pair of tables disagrees on BLOCK_SIZE_M: `(first m, up's, down's)` for each stretch of m.

    SGLang 0.5.5 to 0.5.12 fail an assertion there, later ones override the down config (source:
    `try_get_optimal_moe_config` of those wheels).
    """
    if not up.entries or not down.entries:
        return ()
    starts = sorted({span.first for table in (up, down) for span in table.spans(last)})
    sizes = ((m, up.nearest(m).block_size_m, down.nearest(m).block_size_m) for m in starts)
    return tuple((m, of_up, of_down) for m, of_up, of_down in sizes if of_up != of_down)


def _whole(value: object, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigFileError(f"{where}: {key} is {_shown(value)}, not a whole number")
    if not 1 <= value <= _MAX_VALUE:
        raise ConfigFileError(f"{where}: {key} is {value}, out of range")
    return value


def _extra(value: object, key: str, where: str) -> int | bool | str:
    if not _NAME.fullmatch(key):
        raise ConfigFileError(f"{where}: {printable(key, 40)!r} is no name of a kernel argument")
    if not isinstance(value, (int, str)) or (isinstance(value, str) and len(value) > 64):
        raise ConfigFileError(f"{where}: {key} is {_shown(value)}, not a number, text, true or false")
    return value


def _table_key(key: str, where: str) -> int:
    try:
        if len(key) <= _MAX_KEY_CHARS:
            return int(key)
    except ValueError:
        pass
    raise ConfigFileError(
        f"{where}: the key {printable(key, 40)!r} is no number of tokens",
        "a config file maps whole numbers of tokens to configs; remove the other keys",
    )


def _shown(value: object) -> str:
    return printable(json.dumps(value, default=repr), 40)

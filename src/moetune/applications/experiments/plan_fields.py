"""What a plan may say: its tables, their keys with the kinds and bounds of their values.

The keys are the fields of the dataclasses in `moetune.domain.experiment_plan`; kinds and defaults come
from there, bounds stand here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, get_type_hints

from moetune.domain.experiment import HIGHER_IS_BETTER
from moetune.domain.experiment_plan import Budget, DecisionPlan, Intervention, LoadPlan, Plan, ServerPlan

SERVERS = ("sglang", "vllm", "other")
GENERATORS = ("sglang.bench_serving", "vllm bench serve", "guidellm", "command")

SERVER_PLACEHOLDERS = ("port", "log", "cache")
LOAD_PLACEHOLDERS = (
    *("url", "host", "port", "model", "requests", "concurrency"),
    *("input_tokens", "output_tokens", "seed", "result"),
)
PLACEHOLDER = re.compile(r"\{([a-z_]{1,40})\}")
"""A name in braces; JSON in an argument has quotes, digits or nothing there and is left alone."""

TABLES: Mapping[str, type] = {
    "server": ServerPlan,
    "load": LoadPlan,
    "budget": Budget,
    "decision": DecisionPlan,
    "intervention": Intervention,
}
"""Table of the file to what it becomes; `intervention` is an array of tables."""

MAX_ITEMS = 1024
MAX_TEXT = 8192
MAX_WHOLE = 1 << 53
MAX_INTERVENTIONS = 32

_DAY_S = 86_400.0
_NOT_IN_FILE = {"intervention": frozenset({"line"}), "": frozenset({"interventions"})}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which numbers or words a key takes.

    Attributes:
        least: smallest number.
        greatest: largest number.
        least_excluded: the smallest number itself is not taken.
        choices: words; empty: any text.
        pattern: that a text has to match.
        shape: the pattern in words.
        empty: whether a text or a list may be empty.
    """

    least: float = 0
    greatest: float = 1e9
    least_excluded: bool = False
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    shape: str = ""
    empty: bool = True


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a table.

    Attributes:
        kind: `str`, `int`, `float`, `bool`, `list of str`, `list of int`, `table of str`.
        required: it has no default.
        placeholders: names that may stand in braces in its texts; None: braces mean nothing.
    """

    table: str
    name: str
    kind: str
    required: bool
    default: Any
    bounds: Bounds
    placeholders: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """As messages name it: `server.command`."""
        return f"{self.table}.{self.name}" if self.table else self.name


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.A)
_HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.@:%\[\]-]{0,254}", re.A)
_PATH = re.compile(r"/[^\s]{0,512}")
_RELEASE = re.compile(
    r"\d{1,6}(?:\.\d{1,6}){1,4}(?:[._+-]?(?:post|rc|dev|a|b|g)[\w.+-]{0,64}|\+[\w.]{0,64})?", re.A
)
_PERCENT = Bounds(0, 1, least_excluded=True)

_BOUNDS: Mapping[str, Bounds] = {
    "name": Bounds(empty=False),
    "seed": Bounds(0, 2**31 - 1),
    "server.name": Bounds(choices=SERVERS),
    "server.command": Bounds(empty=False),
    "server.version": Bounds(pattern=_RELEASE, shape="a version as in 0.5.23"),
    "server.triton_version": Bounds(pattern=_RELEASE, shape="a version as in 3.6.0"),
    "server.host": Bounds(pattern=_HOST, shape="a host as ssh takes it, and none that begins with -"),
    "server.port": Bounds(1, 65_535),
    "server.ready_path": Bounds(pattern=_PATH, shape="a path as in /health", empty=False),
    "server.ready_s": Bounds(0, _DAY_S, least_excluded=True),
    "server.stop_s": Bounds(0, _DAY_S, least_excluded=True),
    "server.gpus": Bounds(0, 1023),
    "server.tp": Bounds(0, 4096),
    "load.generator": Bounds(choices=GENERATORS),
    "load.requests": Bounds(1, 10_000_000),
    "load.concurrency": Bounds(1, 1_000_000),
    "load.input_tokens": Bounds(1, 16_000_000),
    "load.output_tokens": Bounds(1, 16_000_000),
    "load.seed": Bounds(0, 2**31 - 1),
    "load.passes": Bounds(1, 100),
    "load.limit_s": Bounds(0, _DAY_S, least_excluded=True),
    "intervention.name": Bounds(empty=False),
    "budget.starts": Bounds(0, 10_000),
    "budget.minutes": Bounds(0, 60 * 24 * 31),
    "decision.metric": Bounds(choices=tuple(HIGHER_IS_BETTER)),
    "decision.margin": _PERCENT,
    "decision.smallest_effect": _PERCENT,
    "decision.noise": _PERCENT,
    "decision.alpha": Bounds(0, 0.5, least_excluded=True),
}
_PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {
    "server.command": SERVER_PLACEHOLDERS,
    "server.stop": SERVER_PLACEHOLDERS,
    "server.logs": SERVER_PLACEHOLDERS,
    "intervention.arguments": SERVER_PLACEHOLDERS,
    "load.command": LOAD_PLACEHOLDERS,
    "load.arguments": LOAD_PLACEHOLDERS,
}
_KINDS: Mapping[Any, str] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    tuple[str, ...]: "list of str",
    tuple[int, ...]: "list of int",
    Mapping[str, str]: "table of str",
}


@cache
def fields_of(table: str) -> Mapping[str, Field]:
    """The keys of a table; of the top of the file for the empty name."""
    kind = TABLES[table] if table else Plan
    hints = get_type_hints(kind)
    found = {}
    for item in fields(kind):
        if item.name in _NOT_IN_FILE.get(table, ()) or (not table and item.name in TABLES):
            continue
        key = f"{table}.{item.name}" if table else item.name
        factory = item.default_factory
        default = factory() if factory is not MISSING else item.default
        found[item.name] = Field(
            table=table,
            name=item.name,
            kind=_KINDS[hints[item.name]],
            required=default is MISSING,
            default=None if default is MISSING else default,
            bounds=_BOUNDS.get(key, Bounds()),
            placeholders=_PLACEHOLDERS.get(key),
        )
    return found

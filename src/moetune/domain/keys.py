"""The m for which a table holds an entry: all that a server can meet must find a fitting one.

A server takes the entry of the nearest key, so between two neighbouring keys the entry changes in
the middle. Where the server's own default changes after m = s, the keys s and s + 1 make the table
change there too, and no m is served by an entry that was compared with the default of the other
regime.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The batch sizes that both servers' own tuners use (source: benchmark/kernels/fused_moe_triton of
# sglang, benchmarks/kernels/benchmark_moe.py of vllm 0.33.0).
STANDARD_KEYS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
LARGEST_M = 1 << 20
MAX_OWN_KEYS = 256
_MAX_TEXT = 8192

_ITEM = re.compile(
    r"(?P<m>[1-9][0-9]{0,6})(?::(?P<weight>[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}))?", re.A
)
_HINT = "give m or m:weight, with commas between, as in --m 1:0.7,64:0.2,8192:0.1"

Traffic = tuple[tuple[int, float], ...]
"""`(m, weight)`: the m of a user's own traffic, and how many of all calls have it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a table, ascending.

    Attributes:
        ms: the keys.
        traffic: the m over which a mean is taken, with weights that add up to 1.
    """

    ms: tuple[int, ...]
    traffic: Traffic


def parse_traffic(text: str) -> Traffic:
    """Read the user's own keys: `1,64,8192`, or with weights `1:0.7,64:0.2,8192:0.1`.

    Weights are relative to one another: `1:7,64:2` will do. An m without one weighs 1.

    Raises:
        InputError: naming the part that is wrong.
    """
    if len(text) > _MAX_TEXT:
        raise InputError(f"--m is longer than {_MAX_TEXT} characters", _HINT)
    found: dict[int, float] = {}
    for part in text.split(","):
        item = _ITEM.fullmatch(part.strip())
        if item is None:
            raise InputError(f"{printable(part.strip(), 40)!r} in --m is no number of tokens", _HINT)
        m = int(item["m"])
        if m > LARGEST_M:
            raise InputError(f"m={m} in --m is larger than {LARGEST_M}", _HINT)
        if m in found:
            raise InputError(f"m={m} stands twice in --m", _HINT)
        weight = float(item["weight"] or 1)
        if weight <= 0:
            raise InputError(f"m={m} has the weight 0 in --m: leave out what never comes", _HINT)
        found[m] = weight
    if len(found) > MAX_OWN_KEYS:
        raise InputError(f"--m names {len(found)} keys, more than {MAX_OWN_KEYS}", _HINT)
    return tuple(sorted(found.items()))


def m_keys(
    switches: Iterable[int], largest_m: int = 8192, own: Sequence[tuple[int, float]] = (), first_m: int = 1
) -> Keys:
    """The keys that cover what a server can meet.

    Args:
        switches: the last m of each regime of the server's default.
        largest_m: the largest m that the server can meet: its prefill chunk.
        own: the user's own traffic. Its m take the place of the standard keys; the ends and both
            sides of each switch stay, for a file replaces the default at every m.
        first_m: the smallest m at which the server runs the Triton kernel, at most the largest one.

    Returns:
        The keys, and the traffic: the user's own, else every key alike.
    """
    last = max([largest_m, *(m for m, _ in own)])
    wanted = {m for m, _ in own} or {*STANDARD_KEYS, *_doublings(STANDARD_KEYS[-1], last)}
    sides = {side for switch in switches for side in (switch, switch + 1)}
    ms = tuple(sorted(m for m in {first_m, last} | wanted | sides if first_m <= m <= last))
    traffic = tuple(sorted(pair for pair in own if pair[0] >= first_m)) or tuple((m, 1.0) for m in ms)
    total = math.fsum(weight for _, weight in traffic)
    return Keys(ms, tuple((m, weight / total) for m, weight in traffic))


def _doublings(start: int, last: int) -> list[int]:
    found = []
    while (start := 2 * start) < last:
        found.append(start)
    return found

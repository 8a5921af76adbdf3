"""No m is served worse than by the default: also not between the keys of a table.

An entry serves every m that is nearer to its key than to any other. It was compared with the
default at its key only; here the ends of its span and both sides of each switch of the default are
looked at too, and keys are added where the entry loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.choose import FIRST_FEW, Choices, Pair, Point, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moetune.domain.config import ConfigTable

    DefaultAt = Callable[[int], Pair]
    """The server's own default pair at an m."""

    TimesAt = Callable[[int, Sequence[Pair]], Sequence[float | None]]
    """Up and down together for some pairs at an m, in microseconds; None for what cannot run."""

    PointAt = Callable[[int], Point]
    """All candidates at an m."""

MAX_ADDED = 48


@dataclass(frozen=True, slots=True)
class Shortfall:
    """An m at which the server would pick an entry that is slower than its default.

    Attributes:
        m: the m.
        key: the key that the server picks for it.
        pair: the entries of that key.
        time_us: what they take; None: they cannot run.
        default_us: what the default takes; None: it cannot run.
    """

    m: int
    key: int
    pair: Pair
    time_us: float | None
    default_us: float | None


@dataclass(frozen=True, slots=True)
class Covered:
    """Choices that were looked at between their keys.

    Attributes:
        choices: for the keys asked for and those added.
        added: keys that were added, ascending.
        shortfalls: what could not be mended; empty: no m that was looked at is served worse.
        probed: every m that was looked at, ascending.
    """

    choices: Choices
    added: tuple[int, ...]
    shortfalls: tuple[Shortfall, ...]
    probed: tuple[int, ...]


def probe_ms(
    table: ConfigTable, switches: Iterable[int], largest_m: int, first_m: int = 1
) -> tuple[int, ...]:
    """The m to look at: keys, both ends of each key's span, both sides of each switch."""
    spans = table.spans(largest_m)
    ends = {end for span in spans for end in (span.first, span.last)}
    sides = {side for switch in switches for side in (switch, switch + 1)}
    return tuple(sorted(m for m in {*table.keys(), *ends, *sides} if first_m <= m <= largest_m))


def check_coverage(
    up: ConfigTable,
    down: ConfigTable | None,
    default_at: DefaultAt,
    times_at: TimesAt,
    ms: Iterable[int],
    *,
    noise: float,
) -> tuple[Shortfall, ...]:
    """Where the entries that a server would pick are slower than its default beyond the noise.

    Args:
        up: the table of the up kernel.
        down: that of the down kernel; None where the server reads one file.
        default_at: the server's default.
        times_at: times of pairs, measured or predicted.
        ms: the m to look at.
        noise: relative difference that means nothing.
    """
    found = []
    for m in ms:
        pair = Pair(up.nearest(m), up.nearest(m) if down is None else down.nearest(m))
        default = default_at(m)
        if pair == default:
            continue
        time_us, default_us = times_at(m, (pair, default))
        slower = time_us is not None and default_us is not None and time_us > default_us * (1 + noise)
        if time_us is None or slower:
            found.append(Shortfall(m, up.nearest_key(m), pair, time_us, default_us))
    return tuple(found)


def choose_covering(
    ms: Iterable[int],
    point_at: PointAt,
    default_at: DefaultAt,
    times_at: TimesAt,
    *,
    switches: Sequence[int],
    largest_m: int,
    one_file: bool,
    noise: float,
    tie: float | None = None,
    first_few: int = FIRST_FEW,
    veto: bool = True,
    max_added: int = MAX_ADDED,
    first_m: int = 1,
) -> Covered:
    """Choose for each key, and add keys until no m is served worse than by the default.

    Args:
        ms: the keys.
        point_at: the candidates at an m, asked once for each key.
        default_at: the server's default.
        times_at: times of pairs at an m.
        switches: the last m of each regime of the default.
        largest_m: the largest m that the server can meet.
        one_file: as in `choose`, like `noise`, `tie` and `first_few`.
        noise: see `choose`.
        tie: see `choose`.
        first_few: see `choose`.
        veto: see `choose`.
        max_added: keys to add at most.
        first_m: the smallest m at which these entries are used.
    """
    points = {m: point_at(m) for m in ms}
    asked = frozenset(points)
    probed: set[int] = set()
    while True:
        choices = choose(
            list(points.values()), one_file=one_file, noise=noise, tie=tie, first_few=first_few, veto=veto
        )
        probes = probe_ms(choices.up, switches, largest_m, first_m)
        probed.update(probes)
        shortfalls = check_coverage(choices.up, choices.down, default_at, times_at, probes, noise=noise)
        room = max_added - (len(points) - len(asked))
        worst = _worst_of_each_gap(shortfalls, points)[:room]
        if not worst:
            added = tuple(sorted(points.keys() - asked))
            return Covered(choices, added, shortfalls, tuple(sorted(probed)))
        points |= {m: point_at(m) for m in worst}


def _worst_of_each_gap(shortfalls: Iterable[Shortfall], keys: Iterable[int]) -> list[int]:
    """Of all shortfalls between two keys the worst, worst first: a key there moves both spans."""
    ordered = sorted(keys)
    worst: dict[int, tuple[float, int]] = {}
    for shortfall in shortfalls:
        if shortfall.m in ordered:
            continue
        gap = sum(key < shortfall.m for key in ordered)
        loss = (
            float("inf")
            if shortfall.time_us is None or shortfall.default_us is None
            else shortfall.time_us / shortfall.default_us
        )
        worst[gap] = max(worst.get(gap, (0.0, 0)), (loss, shortfall.m))
    return [m for _, m in sorted(worst.values(), key=lambda item: (-item[0], item[1]))]

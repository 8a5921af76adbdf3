"""What a busy host does to a recording: times that were taken twice, beside compiling processes and alone."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.findings_data import LANDSCAPES, percent, quantile, table

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORD = LANDSCAPES.parent / "record_2026-12-02.jsonl.gz"
Place = tuple[str, str, int, tuple[int, ...]]


@lru_cache(maxsize=1)
def timed_again() -> dict[Place, dict[int, list[float]]]:
    """Of the configs that were timed once more: the times of each pass, oldest first."""
    found: dict[Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in gzip.decompress(RECORD.read_bytes()).decode().splitlines():
        row = json.loads(line)
        if row.get("us") is not None:
            place = row["job"], row["kernel"], row["m"], tuple(row["config"])
            found[place][row["pass"]].append(row["us"])
    return {place: dict(passes) for place, passes in found.items() if len(passes[1]) > 1}


def held_up() -> list[str]:
    """Doubtful times and the same once more: what parts two passes, and what had been recorded too long."""
    before, after, over = [], [], []
    for passes in timed_again().values():
        if len(passes.get(2, [])) > 1:
            before.append(abs(math.log(passes[2][0] / passes[1][0])))
            after.append(abs(math.log(passes[2][-1] / passes[1][-1])))
        known = min(passes[1][-1], *(passes.get(2, [])[-1:] or [math.inf]))
        over.append(max(passes[1][0], *(passes.get(2, [])[:1] or [0.0])) / known)
    rows = [
        [name, str(len(parted)), *(percent(math.expm1(value)) for value in _three(parted))]
        for name, parted in (("beside 15 compiling processes", before), ("alone, no gap timed", after))
    ]
    rows.append(["longest time of the former over the latter", str(len(over)), *_times(_three(over))])
    return table(["of the doubtful times", "configs", "median", "9 of 10", "99 of 100"], rows)


def _three(values: Sequence[float]) -> list[float]:
    return [median(values), quantile(values, 0.9), quantile(values, 0.99)]


def _times(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in values]

"""How the grid looks from its best config, and where walking downhill ends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

from benchmarks.findings_data import Cell, mean_loss, percent, quantile, table, whole
from benchmarks.findings_grid import DTYPES, by_range
from benchmarks.findings_keys import KEYS
from moetune.domain.config import KernelConfig
from moetune.domain.space import SGLANG_AXES

_AXES: dict[str, tuple[int, ...]] = {key: getattr(SGLANG_AXES, key) for key in KEYS}


def steps(config: KernelConfig) -> Iterator[tuple[str, KernelConfig]]:
    """Configs of the grid that differ in one key by one step, and the key."""
    for key, values in _AXES.items():
        place = values.index(getattr(config, key))
        for other in (place - 1, place + 1):
            if 0 <= other < len(values):
                changed: dict[str, Any] = {key: values[other]}
                yield key, replace(config, **changed)


def one_step() -> list[str]:
    """What the best config loses when one of its keys moves by one step of the grid."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    stopped: dict[tuple[str, str], int] = defaultdict(int)
    for cell in whole():
        for key, other in steps(cell.best):
            loss = cell.loss(other)
            if loss is None:
                stopped[cell.dtype, key] += 1
            else:
                found[cell.dtype, key].append(loss)
    rows = []
    for dtype in DTYPES:
        for key in KEYS:
            losses, cannot = found[dtype, key], stopped[dtype, key]
            rows.append(
                [
                    dtype,
                    key if key.startswith("num") else key.upper(),
                    str(len(losses) + cannot),
                    percent(cannot / (len(losses) + cannot), 0),
                    percent(sum(loss <= 0.01 for loss in losses) / len(losses), 0),
                    *(percent(quantile(losses, share)) for share in (0.5, 0.9)),
                ]
            )
    head = ["type", "key", "steps", "cannot run", "of those that run: within 1%", "median loss", "90%"]
    return table(head, rows)


@lru_cache(maxsize=1)
def _neighbours() -> tuple[tuple[KernelConfig, ...], tuple[tuple[int, ...], ...]]:
    """The grid, and for each config where those one step away stand."""
    configs = tuple(SGLANG_AXES.grid())
    places = {config: place for place, config in enumerate(configs)}
    return configs, tuple(tuple(places[other] for _, other in steps(config)) for config in configs)


def ends(cell: Cell) -> dict[KernelConfig, tuple[KernelConfig, int]]:
    """For each config where steepest descent from it ends, and how many configs are measured on the way."""
    configs, neighbours = _neighbours()
    times = [cell.times_us.get(config, math.inf) for config in configs]
    around = [[other for other in near if times[other] < math.inf] for near in neighbours]
    following = [
        min(near, key=times.__getitem__, default=place) if times[place] < math.inf else place
        for place, near in enumerate(around)
    ]
    found = {}
    for start, config in enumerate(configs):
        if times[start] == math.inf:
            continue
        place, seen = start, {start, *around[start]}
        while times[following[place]] < times[place]:
            place = following[place]
            seen.update(around[place])
        found[config] = configs[place], len(seen)
    return found


def walking_downhill() -> list[str]:
    """Where steepest descent by single steps ends, from every config of the grid in turn."""
    rows = []
    for dtype, kernel, span, cells in by_range(whole()):
        losses, counts, valleys = [], [], []
        for cell in cells:
            reached = ends(cell)
            losses += [cell.times_us[end] / cell.best_us - 1 for end, _ in reached.values()]
            counts += [count for _, count in reached.values()]
            limit_us = 1.02 * cell.best_us
            valleys.append(len({end for end, _ in reached.values() if cell.times_us[end] > limit_us}))
        rows.append(
            [
                dtype,
                kernel,
                span,
                percent(sum(loss <= 0.02 for loss in losses) / len(losses), 0),
                percent(mean_loss(losses)),
                percent(quantile(losses, 0.9), 0),
                percent(max(losses), 0),
                f"{median(counts):g}",
                f"{median(valleys):g}",
            ]
        )
    head = ["type", "kernel", "m", "ends within 2%", "mean loss", "90%", "worst", "measured, median"]
    return table([*head, "other ends over 2%"], rows)

"""What each key of a config is worth, and how small the grid can be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.findings_choice import Losses, mean_worst
from benchmarks.findings_data import Cell, grid, mean_loss, percent, table, twice, whole
from benchmarks.findings_grid import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages")
_SIZES = (960, 480, 240, 160, 96, 48, 32, 16)


def frozen_keys() -> list[str]:
    """What is lost when one key of the grid keeps one value."""
    rows = []
    for key in KEYS:
        for value in sorted({getattr(config, key) for config in grid()}):
            row = [key if key.startswith("num") else key.upper(), str(value)]
            for dtype in DTYPES:
                losses = [_frozen(cell, key, value) for cell in whole() if cell.dtype == dtype]
                row.append("cannot run" if math.inf in losses else _shown(losses))
            rows.append([*row, _shown(_frozen_twice(key, value))])
    return table(["key", "frozen at", *DTYPES, "bf16, one recording chooses, the other scores"], rows)


def _shown(losses: Sequence[float]) -> str:
    return f"{percent(mean_loss(losses))}, {percent(max(losses), 0)}"


def _frozen(cell: Cell, key: str, value: int) -> float:
    times = (time_us for config, time_us in cell.times_us.items() if getattr(config, key) == value)
    return min(times, default=math.inf) / cell.best_us - 1


def _frozen_twice(key: str, value: int) -> list[float]:
    """The best with the key frozen against the best of all: one recording chooses both, the other scores."""
    found = []
    for pair in twice():
        if pair[0].dtype != "bf16":
            continue
        for choosing, scoring in (pair, pair[::-1]):
            kept = choosing.only(config for config in choosing.times_us if getattr(config, key) == value)
            found.append(scoring.times_us[kept.best] / scoring.times_us[choosing.best] - 1)
    return found


@dataclass(frozen=True, slots=True)
class Smaller:
    """A part of the grid: all combinations of some values.

    Attributes:
        axes: values of each key.
    """

    axes: dict[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """How many configs."""
        return math.prod(len(values) for values in self.axes.values())

    def columns(self, losses: Losses) -> list[int]:
        """Where its configs stand."""
        return [
            column
            for column, config in enumerate(losses.configs)
            if all(getattr(config, key) in values for key, values in self.axes.items())
        ]


def shrunk(losses: Losses) -> list[Smaller]:
    """Ever smaller grids: each drops the value without which least is lost in the mean."""
    values = {key: np.array([getattr(config, key) for config in losses.configs]) for key in KEYS}
    axes = {key: tuple(sorted(set(values[key].tolist()))) for key in KEYS}
    kept = np.ones(len(losses.configs), dtype=bool)
    found = [Smaller(dict(axes))]
    while True:
        options = [
            (float(losses.lost[:, kept & (values[key] != value)].min(axis=1).mean()), KEYS.index(key), value)
            for key in KEYS
            for value in (axes[key] if len(axes[key]) > 1 else ())
        ]
        if not options:
            return found
        _, place, value = min(options)
        key = KEYS[place]
        axes[key] = tuple(other for other in axes[key] if other != value)
        kept &= values[key] != value
        found.append(Smaller(dict(axes)))


def _of_size(grids: Sequence[Smaller], size: int) -> Smaller:
    return next(one for one in grids if one.size <= size)


def smaller_grids() -> list[str]:
    """How small the grid can be: values are dropped one after the other, the cheapest first."""
    rows = []
    for dtype in DTYPES:
        cells = [cell for cell in whole() if cell.dtype == dtype]
        losses = Losses.of(cells)
        grids = shrunk(losses)
        apart = []
        for shape in sorted({cell.shape for cell in cells}):
            others = [cell for cell in cells if cell.shape != shape]
            if others:
                here = Losses.of([cell for cell in cells if cell.shape == shape])
                apart.append((here, shrunk(Losses.of(others))))
        shown = set()
        for size in _SIZES:
            one = _of_size(grids, size)
            if one.size in shown:
                continue
            shown.add(one.size)
            held_out = [here.left(_of_size(other, one.size).columns(here)) for here, other in apart]
            rows.append(
                [
                    dtype,
                    str(one.size),
                    mean_worst(losses.left(one.columns(losses))),
                    mean_worst(np.concatenate(held_out)) if held_out else "one shape only",
                    *("/".join(map(str, one.axes[key])) for key in KEYS),
                ]
            )
    head = ["type", "configs", "mean, worst", "on a shape without a say", "M", "N", "K"]
    return table([*head, "GROUP_SIZE_M", "num_warps", "num_stages"], rows)

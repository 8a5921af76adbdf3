"""What a config loses elsewhere, how few suffice, what each key is worth, what sharing a config costs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.findings_data import (
    Cell,
    grid,
    mean_loss,
    own,
    percent,
    quantile,
    sampled,
    table,
    theirs,
    twice,
    whole,
)
from benchmarks.findings_grid import DTYPES, default_of
from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS

_STEPS = ((1, "up to 2"), (2, "4"), (3, "8"), (4, "16"), (6, "32 to 64"), (14, "more"))
"""Binary logarithms of the ratio of two m, rounded: the largest of each group."""
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

_LOST = math.log(2)
"""What counts as lost with a config that was not measured, in logarithms."""
_LISTED = 8
_FAR = ("same E and N", "same E", "E up to twice", "further")
_FEW = (1, 2, 3, 4, 6, 8)
_FEWEST = 60
"""Configs that a sample has to hold to have a say."""
_COVERS = (1, 2, 3, 4, 6, 8, 12, 16)


def _shown(losses: Sequence[float]) -> str:
    return f"{percent(mean_loss(losses))}, {percent(max(losses), 0)}"


def _tables(cells: Iterable[Cell]) -> dict[tuple[str, str], dict[int, Cell]]:
    """Cells by recording and kernel, then by m."""
    found: dict[tuple[str, str], dict[int, Cell]] = defaultdict(dict)
    for cell in cells:
        found[cell.recording, cell.kernel][cell.m] = cell
    return found


def other_m() -> list[str]:
    """What the best config of one m loses at another m of the same problem and kernel."""
    losses: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for by_m in _tables(whole()).values():
        for chosen, here in by_m.items():
            for served, there in by_m.items():
                loss = there.loss(here.best)
                if served == chosen or loss is None:
                    continue
                apart = round(abs(math.log2(served / chosen)))
                step = next(name for last, name in _STEPS if apart <= last)
                losses[here.dtype, step, served > chosen].append(loss)
    rows = [
        [
            dtype,
            step,
            str(len(losses[dtype, step, True])),
            *(_shown(losses[dtype, step, larger]) for larger in (True, False)),
        ]
        for dtype in DTYPES
        for _, step in _STEPS
        if losses[dtype, step, True] and losses[dtype, step, False]
    ]
    return table(["type", "m apart, times", "pairs each way", "used at larger m", "used at smaller m"], rows)


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """One cell of each problem, kernel and m: the first."""
    found: dict[object, Cell] = {}
    for cell in cells:
        found.setdefault(cell.key, cell)
    return list(found.values())


def other_shape() -> list[str]:
    """What the best config of one problem loses on another at the same m, type and kernel."""
    groups: dict[tuple[str, str, int], list[Cell]] = defaultdict(list)
    for cell in distinct((*own(), *theirs(), *sampled())):
        groups[cell.dtype, cell.kernel, cell.m].append(cell)
    losses: dict[tuple[str, str], list[float]] = defaultdict(list)
    asked: dict[tuple[str, str], int] = defaultdict(int)
    beside: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (dtype, _, _), cells in groups.items():
        for here in cells:
            for there in cells:
                if here is there:
                    continue
                key = dtype, _how_far(here.shape, there.shape)
                asked[key] += 1
                loss, default_loss = there.loss(here.best), there.loss(default_of("SGLang", there))
                if loss is not None and default_loss is not None:
                    losses[key].append(loss)
                    beside[key].append(default_loss)
    rows = []
    for dtype in DTYPES:
        for far in _FAR:
            found, default = losses[dtype, far], beside[dtype, far]
            if found:
                worse = sum(one > other for one, other in zip(found, default, strict=True)) / len(found)
                rows.append(
                    [
                        dtype,
                        far,
                        f"{len(found)} of {asked[dtype, far]}",
                        percent(mean_loss(found)),
                        percent(median(found)),
                        percent(quantile(found, 0.9), 0),
                        percent(max(found), 0),
                        percent(mean_loss(default)),
                        percent(worse, 0),
                    ]
                )
    head = ["type", "other shape", "pairs", "mean", "median", "90%", "worst", "SGLang's default, mean"]
    return table([*head, "slower than the default"], rows)


def _how_far(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    if one[:2] == other[:2]:
        return "same E and N"
    if one[0] == other[0]:
        return "same E"
    return "E up to twice" if max(one[0], other[0]) <= 2 * min(one[0], other[0]) else "further"


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of configs in cells, in logarithms.

    Attributes:
        configs: the columns.
        lost: `[cells, configs]`; what was not measured counts as lost.
    """

    configs: tuple[KernelConfig, ...]
    lost: NDArray[np.float64]

    @classmethod
    def of(cls, cells: Sequence[Cell], configs: Iterable[KernelConfig] | None = None) -> Losses:
        """The grid's configs, or those given, in some cells."""
        columns = tuple(sorted(grid() if configs is None else configs, key=KernelConfig.sort_key))
        lost = np.full((len(cells), len(columns)), _LOST)
        for row, cell in enumerate(cells):
            least = math.log(cell.best_us)
            for column, config in enumerate(columns):
                time_us = cell.times_us.get(config)
                if time_us is not None:
                    lost[row, column] = math.log(time_us) - least
        return cls(columns, lost)

    def greedy(self, count: int) -> list[int]:
        """Columns, each lowering most what is lost in sum with the best of all so far."""
        now = np.full(len(self.lost), np.inf)
        chosen: list[int] = []
        for _ in range(count):
            sums = np.minimum(now[:, None], np.minimum(self.lost, _LOST)).sum(axis=0)
            sums[chosen] = np.inf
            chosen.append(int(sums.argmin()))
            now = np.minimum(now, np.minimum(self.lost[:, chosen[-1]], _LOST))
        return chosen

    def left(self, chosen: Sequence[int]) -> NDArray[np.float64]:
        """What is lost in each cell with the best of some columns."""
        return np.asarray(self.lost[:, list(chosen)].min(axis=1))


def mean_worst(logs: NDArray[np.float64]) -> str:
    """Mean and worst of losses in logarithms, as tables show them."""
    return f"{percent(math.expm1(float(logs.mean())))}, {percent(math.expm1(float(logs.max())), 0)}"


def few_configs() -> list[str]:
    """How many configs a table of one problem and kernel needs, each m picking its best of them."""
    rows = []
    for (recording, kernel), by_m in _tables(whole()).items():
        cells = list(by_m.values())
        losses = Losses.of(cells)
        order = losses.greedy(_FEW[-1])
        shown = [mean_worst(losses.left(order[:count])) for count in _FEW]
        rows.append([_short(cells[0]), kernel, _source(recording), str(len(cells)), *shown])
    for kernel in KERNELS:
        pairs = [pair for pair in twice() if pair[0].kernel == kernel and pair[0].dtype == "bf16"]
        for place, name in ((0, "SGLang's chooses, own scores"), (1, "own chooses, SGLang's scores")):
            configs = set.intersection(*({*one.times_us} & {*two.times_us} for one, two in pairs))
            choosing = Losses.of([pair[place] for pair in pairs], configs)
            scoring = Losses.of([pair[1 - place] for pair in pairs], configs)
            order = choosing.greedy(_FEW[-1])
            shown = [mean_worst(_assigned(choosing, scoring, order[:count])) for count in _FEW]
            rows.append([_short(pairs[0][0]), kernel, name, str(len(pairs)), *shown])
    return table(["problem", "kernel", "recording", "m", *map(str, _FEW)], rows)


def _assigned(choosing: Losses, scoring: Losses, columns: Sequence[int]) -> NDArray[np.float64]:
    """Losses where each cell takes the config that was its best in the other recording."""
    picked = np.asarray(columns)[choosing.lost[:, list(columns)].argmin(axis=1)]
    return np.asarray(scoring.lost[np.arange(len(picked)), picked])


def _short(cell: Cell) -> str:
    experts, width, hidden, topk = cell.shape
    return f"E={experts}, N={width}, K={hidden}, topk {topk}, {cell.dtype}"


def _source(recording: str) -> str:
    return "own" if "own-kernel" in recording else "SGLang's"


@lru_cache(maxsize=16)
def universal(dtype: str, without: tuple[int, ...] | None = None) -> list[KernelConfig]:
    """Configs to try first: greedily over all recorded problems of a type, one shape left out if asked."""
    cells = [
        cell
        for cell in distinct((*own(), *theirs(), *sampled()))
        if cell.dtype == dtype and cell.shape[:3] != without and len(cell.times_us) >= _FEWEST
    ]
    losses = Losses.of(cells)
    return [losses.configs[column] for column in losses.greedy(_COVERS[-1])]


def first_configs() -> list[str]:
    """The configs to try first, in order: each lowers most what is lost over all recorded problems."""
    lists = [universal(dtype) for dtype in DTYPES]
    rows = [[str(place + 1), *(str(one[place]) for one in lists)] for place in range(_LISTED)]
    return table(["", *DTYPES], rows)


def unseen_shapes() -> list[str]:
    """What the best of the first few configs loses on a shape that had no say in the list."""
    rows = []
    for dtype in DTYPES:
        cells = [cell for cell in distinct((*own(), *theirs())) if cell.dtype == dtype]
        logs: dict[int, list[float]] = defaultdict(list)
        for cell in cells:
            order = universal(dtype, cell.shape[:3])
            losses = Losses.of([cell.only(grid())], order)
            places = {config: place for place, config in enumerate(losses.configs)}
            for count in _COVERS:
                columns = [places[config] for config in order[:count]]
                logs[count].append(float(losses.left(columns)[0]))
        shown = [mean_worst(np.array(logs[count])) for count in _COVERS]
        rows.append([dtype, str(len(cells)), *shown])
    return table(["type", "cells", *(f"first {count}" for count in _COVERS)], rows)


def _joint_cells() -> list[tuple[Cell, Cell]]:
    """Both kernels of the same recording at the same m."""
    found: dict[tuple[str, int], dict[str, Cell]] = defaultdict(dict)
    for cell in whole():
        found[cell.recording, cell.m][cell.kernel] = cell
    return [(kernels["up"], kernels["down"]) for kernels in found.values() if len(kernels) == len(KERNELS)]


def one_for_both() -> list[str]:
    """What up and down lose by sharing a config, or BLOCK_SIZE_M."""
    groups: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for up, down in _joint_cells():
        free = up.best_us + down.best_us
        shared = min(up.times_us[c] + down.times_us[c] for c in up.times_us.keys() & down.times_us.keys())
        by_height = [
            _least(up.times_us, height) + _least(down.times_us, height) for height in (16, 32, 64, 128, 256)
        ]
        up_for_both = up.best_us + down.times_us.get(up.best, math.inf)
        size = "up to 32" if up.m <= 32 else "33 to 512" if up.m <= 512 else "over 512"
        groups[up.dtype, size].append((up_for_both / free - 1, shared / free - 1, min(by_height) / free - 1))
    rows = [
        [dtype, size, str(len(found)), *(_shown([one[place] for one in found]) for place in range(3))]
        for (dtype, size), found in groups.items()
    ]
    return table(
        [
            "type",
            "m",
            "pairs",
            "up's best for both",
            "one config for both",
            "one BLOCK_SIZE_M",
        ],
        sorted(rows, key=lambda row: (DTYPES.index(row[0]), row[1] != "up to 32", row[1])),
    )


def _least(times: Mapping[KernelConfig, float], height: int) -> float:
    return min((us for config, us in times.items() if config.block_size_m == height), default=math.inf)

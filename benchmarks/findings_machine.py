"""What the machine and the measuring change: cold weights, the roofline, configs outside of the grid."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import numpy as np

from benchmarks.findings_data import (
    GRID_RECORDINGS,
    LANDSCAPES,
    Cell,
    grid,
    mean_loss,
    own,
    percent,
    sampled,
    table,
    theirs,
)
from benchmarks.findings_grid import DTYPES, by_range
from moetune.domain.config import KernelConfig
from moetune.domain.features import features, launch_arrays
from moetune.domain.gpu import filled
from moetune.domain.problem import KERNELS
from moetune.servers.registry import open_server

_COLUMNS = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages")
_FEWEST = 60
"""Configs that a sample has to hold on either side."""
_NOISE = 0.01
"""What the recordings differ by in themselves."""


@dataclass(frozen=True, slots=True)
class Warm:
    """A cell with warm times beside the cold ones: the same routing in all launches of the graph.

    Attributes:
        cell: the cold times of the configs that have both.
        warm_us: their warm times.
    """

    cell: Cell
    warm_us: dict[KernelConfig, float]


@lru_cache(maxsize=1)
def warm_cells() -> tuple[Warm, ...]:
    """Where both were recorded."""
    found: dict[tuple[str, str, int], dict[KernelConfig, float]] = defaultdict(dict)
    for name in GRID_RECORDINGS:
        with gzip.open(LANDSCAPES / f"{name}.csv.gz", "rt", newline="") as stream:
            for row in csv.DictReader(stream):
                if row["hot_l2_us"]:
                    m, n, k, group, warps, stages = (int(row[column]) for column in _COLUMNS)
                    config = KernelConfig(m, n, k, group, warps, stages)
                    found[name, row["kernel"], int(row["m"])][config] = float(row["hot_l2_us"])
    cells: dict[tuple[str, str, int], Cell] = {
        (cell.recording, cell.kernel, cell.m): cell for cell in theirs()
    }
    return tuple(
        Warm(cells[key].only(warm), {config: warm[config] for config in cells[key].only(warm).times_us})
        for key, warm in sorted(found.items())
        if len(warm) >= 100
    )


def cold() -> list[str]:
    """What a warm L2 changes: time, order, and what its choice loses cold."""
    rows = []
    for one in warm_cells():
        cell, configs = one.cell, sorted(one.warm_us, key=KernelConfig.sort_key)
        ratios = [one.warm_us[config] / cell.times_us[config] for config in configs]
        least = min(one.warm_us.values())
        chosen = min(configs, key=lambda config: (one.warm_us[config], config.sort_key()))
        near = [config for config in configs if one.warm_us[config] <= 1.01 * least]
        losses = [cell.loss(config) or 0.0 for config in near]
        rows.append(
            [
                cell.recording.removesuffix("_h200"),
                cell.kernel,
                str(cell.m),
                f"{median(ratios):.2f}",
                f"{one.warm_us[cell.best] / cell.best_us:.2f}",
                f"{_ranks([one.warm_us[c] for c in configs], [cell.times_us[c] for c in configs]):.3f}",
                percent(cell.loss(chosen) or 0.0),
                f"{len(near)}: {percent(mean_loss(losses))}, {percent(max(losses))}",
            ]
        )
    return table(
        [
            "recording",
            "kernel",
            "m",
            "warm over cold, median",
            "of the best",
            "rank correlation",
            "warm's best loses cold",
            "those within 1% warm",
        ],
        rows,
    )


def _ranks(first: list[float], second: list[float]) -> float:
    places = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (first, second)]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def floor_us(cell: Cell) -> float:
    """The roofline floor of the performance model: what the memory or the tensor cores need at least."""
    problem = cell.problem
    server = open_server("sglang", problem.server_version, problem.triton_version)
    assert problem.gpu.compute_capability is not None
    launches = launch_arrays([server.launch(problem, cell.kernel, cell.best)], problem.gpu.compute_capability)
    return float(features(problem, cell.kernel, cell.m, launches, filled(problem.gpu))[1].floor_us)


def near_floor() -> list[str]:
    """How near the best config comes to the roofline, and the median of all that run."""
    rows = []
    for dtype, kernel, span, cells in by_range((*theirs(), *own())):
        best = [floor_us(cell) / cell.best_us for cell in cells]
        middle = [floor_us(cell) / median(cell.only(grid()).times_us.values()) for cell in cells]
        rows.append(
            [
                dtype,
                kernel,
                span,
                str(len(cells)),
                f"{percent(median(best), 0)} ({percent(min(best), 0)} to {percent(max(best), 0)})",
                percent(median(middle), 0),
            ]
        )
    return table(["type", "kernel", "m", "cells", "best config", "median config"], rows)


def outside() -> list[str]:
    """What configs outside of SGLang's grid add, in the recordings that hold a sample of both."""
    groups: dict[tuple[str, str], list[tuple[float, Cell]]] = defaultdict(list)
    for cell in sampled():
        inside, beyond = cell.only(grid()), cell.only(cell.times_us.keys() - grid())
        if min(len(inside.times_us), len(beyond.times_us)) >= _FEWEST:
            gain = 1 - min(beyond.best_us / inside.best_us, 1.0)
            groups[cell.dtype, cell.kernel].append((gain, beyond))
    rows = []
    for dtype in DTYPES:
        for kernel in KERNELS:
            found = groups[dtype, kernel]
            gains = [gain for gain, _ in found]
            most, cell = max(found, key=lambda one: one[0])
            rows.append(
                [
                    dtype,
                    kernel,
                    str(len(found)),
                    f"{median(len(beyond.times_us) for _, beyond in found):g}",
                    percent(sum(gains) / len(gains)),
                    str(sum(gain > _NOISE for gain in gains)),
                    f"{percent(most)}: {cell.best}, m = {cell.m}",
                ]
            )
    head = ["type", "kernel", "cells", "configs outside", "faster by, mean", "by over 1%, cells", "at most"]
    return table(head, rows)

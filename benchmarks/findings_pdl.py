"""What programmatic dependent launch changes, from samples with and without it side by side."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import numpy as np

from benchmarks.findings_data import RANGE_NAMES, RESULTS, mean_loss, percent, range_of, table

_HALF = 4
_SPAN_OF = {False: "late", True: "early"}


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of one config with and without it, interleaved.

    Attributes:
        landscape: whose problem it is.
        config: as text.
        early: whether the next kernel may start at once.
        with_us: samples with it.
        without_us: samples without.
    """

    landscape: str
    kernel: str
    m: int
    config: str
    early: bool
    with_us: tuple[float, ...]
    without_us: tuple[float, ...]


@lru_cache(maxsize=1)
def samples() -> tuple[Sampled, ...]:
    """All of them."""
    with gzip.open(RESULTS / "pdl_26-landscapes_h200.json.gz", "rb") as stream:
        rows = json.load(stream)
    return tuple(
        Sampled(
            row["landscape"],
            row["kernel"],
            row["m"],
            row["config"],
            row["early"],
            tuple(row["with_us"]),
            tuple(row["without_us"]),
        )
        for row in rows
    )


def pdl() -> list[str]:
    """Time without over time with it, ranks, and what a choice made without it loses with it."""
    cells: dict[tuple[str, str, int], list[Sampled]] = defaultdict(list)
    for row in samples():
        cells[row.landscape, row.kernel, row.m].append(row)
    groups: dict[tuple[str, str, str, str], list[list[Sampled]]] = defaultdict(list)
    for (landscape, kernel, m), rows in cells.items():
        dtype = "block fp8" if "fp8" in landscape else "bf16"
        groups[dtype, kernel, range_of(m), _SPAN_OF[rows[0].early]].append(rows)
    order = {span: place for place, span in enumerate(RANGE_NAMES)}
    lines = []
    for key in sorted(groups, key=lambda key: (key[0], key[1] != "up", order[key[2]], key[3])):
        found = [_cell(rows) for rows in groups[key]]
        lines.append(
            [
                *key,
                str(len(found)),
                f"{median(one[0] for one in found):.3f}",
                f"{median(one[1] for one in found):.3f} ({median(one[2] for one in found):.3f})",
                f"{percent(mean_loss(one[3] for one in found), 2)} "
                f"({percent(mean_loss(one[4] for one in found), 2)})",
                percent(max(one[3] for one in found)),
            ]
        )
    return table(
        [
            "type",
            "kernel",
            "m",
            "next kernel starts",
            "cells",
            "time without over with",
            "rank correlation (same twice)",
            "choice without it loses (by noise)",
            "at worst",
        ],
        lines,
    )


def _cell(rows: list[Sampled]) -> tuple[float, float, float, float, float]:
    """Ratio, both rank correlations, both losses: one half of the samples chooses, the other judges."""
    choose_on = [median(row.with_us[:_HALF]) for row in rows]
    judge_on = [median(row.with_us[_HALF:]) for row in rows]
    choose_off = [median(row.without_us[:_HALF]) for row in rows]
    ratio = median(off / on for on, off in zip(judge_on, choose_off, strict=True))
    best = min(judge_on)
    losses = [
        judge_on[min(range(len(rows)), key=chosen.__getitem__)] / best - 1
        for chosen in (choose_off, choose_on)
    ]
    return ratio, _ranks(choose_off, judge_on), _ranks(choose_on, judge_on), losses[0], losses[1]


def _ranks(first: list[float], second: list[float]) -> float:
    places = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (first, second)]
    return float(np.corrcoef(places[0], places[1])[0, 1])

"""What Triton's release changes: in the machine code of one kernel, in its time, and in what is chosen."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from benchmarks.findings_data import RESULTS, mean_loss, percent, quantile, table
from benchmarks.findings_grid import DTYPES

COMPILED = RESULTS / "triton_versions_compiled.json.gz"
TIMED = RESULTS / "triton_versions_h200.json.gz"
OWN = "3.6.0"
AGAIN = f"{OWN} again"
_TYPE_OF = {"seed": DTYPES[0], "qwen3.5-35b-fp8": DTYPES[1]}


@lru_cache(maxsize=2)
def _rows(name: str) -> tuple[dict[str, Any], ...]:
    with gzip.open(RESULTS / name, "rb") as stream:
        return tuple(json.load(stream)["rows"])


def compiled() -> list[str]:
    """What each release makes of the same kernel and the same configs, without a GPU."""
    rows = _rows(COMPILED.name)
    lines = []
    for dtype in DTYPES:
        # The same config may be there for two m that share a binary: it counts once.
        distinct = {
            (row["problem"], row["kernel"], tuple(row["config"]), row["compiled"][OWN].get("code")): row
            for row in rows
            if _TYPE_OF[row["problem"]] == dtype
        }
        for release in sorted(rows[0]["compiled"]):
            pairs = [(row["compiled"][release], row["compiled"][OWN]) for row in distinct.values()]
            both = [(one, own) for one, own in pairs if one["status"] == own["status"] == "ok"]
            shared = [one["shared"] - own["shared"] for one, own in both if one["shared"] != own["shared"]]
            registers = [one["registers"] - own["registers"] for one, own in both]
            lines.append(
                [
                    dtype,
                    release,
                    str(len(pairs)),
                    str(sum(one["status"] != "ok" for one, _ in pairs)),
                    percent(sum(one["code"] == own["code"] for one, own in both) / len(both), 0),
                    f"{len(shared)}" + (f" ({min(shared):+,} to {max(shared):+,} bytes)" if shared else ""),
                    f"{sum(map(bool, registers))} ({min(registers):+d} to {max(registers):+d})",
                    str(sum(one["stack"] > 0 for one, _ in both)),
                ]
            )
    head = [
        "type",
        "Triton",
        "binaries",
        "fail",
        f"code as in {OWN}",
        "shared memory differs",
        "registers differ",
    ]
    return table([*head, "spill"], lines)


def _halves(row: dict[str, Any], release: str) -> tuple[float, float]:
    samples = row["us"][release]
    return median(samples[: len(samples) // 2]), median(samples[len(samples) // 2 :])


def _releases(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = {release for row in rows for release in row["us"]}
    return [*sorted(found - {OWN, AGAIN}), AGAIN]


def timed() -> list[str]:
    """Time under each release over the time under 3.6.0, config by config, side by side."""
    rows = _rows(TIMED.name)
    lines = []
    for dtype in DTYPES:
        for m in sorted({row["m"] for row in rows if _TYPE_OF[row["problem"]] == dtype}):
            for release in _releases(rows):
                ratios = [
                    median(row["us"][release]) / median(row["us"][OWN])
                    for row in rows
                    if _TYPE_OF[row["problem"]] == dtype
                    and row["m"] == m
                    and {release, OWN} <= row["us"].keys()
                ]
                shown = [f"{quantile(ratios, share):.3f}" for share in (0.05, 0.5, 0.95)]
                lines.append(
                    [
                        dtype,
                        str(m),
                        release,
                        str(len(ratios)),
                        *shown,
                        f"{min(ratios):.3f}, {max(ratios):.3f}",
                    ]
                )
    return table(["type", "m", "Triton", "configs", "5%", "median", "95%", "least, most"], lines)


def chosen() -> list[str]:
    """What the config chosen under 3.6.0 loses under another release: half the samples choose, half judge."""
    rows = _rows(TIMED.name)
    cells: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["problem"], row["kernel"], row["m"]].append(row)
    lines = []
    for dtype in DTYPES:
        for release in _releases(rows):
            losses, own_losses, ranks, best, changed = [], [], [], [], 0
            for (problem, _, _), of_cell in cells.items():
                here = [row for row in of_cell if {release, OWN} <= row["us"].keys()]
                if _TYPE_OF[problem] != dtype:
                    continue
                judged = [_halves(row, release)[1] for row in here]
                choosing_there = [_halves(row, release)[0] for row in here]
                choosing_own = [_halves(row, OWN)[0] for row in here]
                there, own = int(np.argmin(choosing_there)), int(np.argmin(choosing_own))
                losses.append(judged[own] / min(judged) - 1)
                own_losses.append(judged[there] / min(judged) - 1)
                changed += there != own
                ranks.append(_ranks(choosing_own, judged))
                best.append(min(judged) / min(_halves(row, OWN)[1] for row in here))
            lines.append(
                [
                    dtype,
                    release,
                    str(len(losses)),
                    f"{percent(mean_loss(losses), 2)}, {percent(max(losses))}",
                    f"{percent(mean_loss(own_losses), 2)}, {percent(max(own_losses))}",
                    str(changed),
                    f"{median(ranks):.3f} ({min(ranks):.3f})",
                    f"{median(best):.3f} ({min(best):.3f} to {max(best):.3f})",
                ]
            )
    head = ["type", "Triton", "cells", f"choice of {OWN} loses: mean, worst", "its own choice, by noise"]
    return table(
        [*head, "other choice, cells", f"rank correlation with {OWN}", f"best over best of {OWN}"], lines
    )


def _ranks(first: list[float], second: list[float]) -> float:
    places = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (first, second)]
    return float(np.corrcoef(places[0], places[1])[0, 1])

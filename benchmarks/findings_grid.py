"""How rare good configs are, what a draw finds, what the defaults lose, and what noise hides."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median, pstdev

from benchmarks.findings_data import (
    RANGE_NAMES,
    Cell,
    mean_loss,
    own,
    percent,
    plain,
    quantile,
    range_of,
    sampled,
    table,
    theirs,
    twice,
    whole,
)
from benchmarks.findings_pdl import Sampled, samples
from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS
from moetune.servers.registry import open_server

WITHIN = (0.01, 0.02, 0.05, 0.10)
DTYPES = ("bf16", "block fp8")
RELEASES = {"SGLang": ("sglang", "0.5.23"), "vLLM": ("vllm", "0.33.0")}
_DRAWS = (1, 4, 16, 64, 256)
_SURE = 0.95


def by_range(cells: Iterable[Cell]) -> list[tuple[str, str, str, list[Cell]]]:
    """Cells by type, kernel and range of m, in that order; empty groups are left out."""
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.dtype, cell.kernel, range_of(cell.m)].append(cell)
    return [
        (dtype, kernel, span, groups[dtype, kernel, span])
        for dtype in DTYPES
        for kernel in KERNELS
        for span in RANGE_NAMES
        if groups[dtype, kernel, span]
    ]


def within(cell: Cell, share: float) -> set[KernelConfig]:
    """Configs that take at most so much longer than the best."""
    limit_us = cell.best_us * (1 + share)
    return {config for config, time_us in cell.times_us.items() if time_us <= limit_us}


def rarity() -> list[str]:
    """Configs of the grid within some percent of the best."""
    rows = []
    for dtype, kernel, span, cells in by_range(whole()):
        counts = [[len(within(cell, share)) for cell in cells] for share in WITHIN]
        runnable = median(len(cell.times_us) for cell in cells)
        shown = [
            f"{median(found):g} ({min(found)} to {max(found)})" if len(found) > 1 else str(found[0])
            for found in counts
        ]
        share = percent(median(counts[2]) / runnable)
        rows.append([dtype, kernel, span, str(len(cells)), *shown, share])
    head = ["type", "kernel", "m", "cells", *(f"within {percent(share, 0)}" for share in WITHIN), "5%, share"]
    return table(head, rows)


def recorded_twice() -> list[str]:
    """One problem in two recordings: what is good in both, and what the choice of one loses in the other."""
    rows = []
    for first, second in sorted(twice(), key=lambda pair: (pair[0].dtype, pair[0].kernel, pair[0].m)):
        shown = []
        for share in WITHIN[:3]:
            here, there = within(first, share), within(second, share)
            shown.append(f"{len(here)}, {len(there)}, {len(here & there)}")
        losses = second.loss(first.best), first.loss(second.best)
        rows.append(
            [first.dtype, first.kernel, str(first.m), *shown, *(percent(loss or 0.0) for loss in losses)]
        )
    head = ["type", "kernel", "m", *(f"within {percent(share, 0)}" for share in WITHIN[:3])]
    return table([*head, "first's best in the second", "second's in the first"], rows)


def expected_loss(cell: Cell, draws: int) -> float:
    """Expected loss, in logarithms, of the best of so many configs drawn without repetition."""
    least = math.log(cell.best_us)
    ordered = sorted(math.log(time_us) - least for time_us in cell.times_us.values())
    count, total, left = len(ordered), 0.0, 1.0
    for place, loss in enumerate(ordered):
        rest = count - place
        # The best drawn is this one: it is among the draws, and none before it was.
        hit = min(draws / rest, 1.0)
        total += left * hit * loss
        left *= 1 - hit
        if left <= 0:
            break
    return total


def draws_needed(cell: Cell, share: float) -> int:
    """Draws without repetition until one within that share of the best is among them in 95% of all cases."""
    good, count = len(within(cell, share)), len(cell.times_us)
    missed, draws = 1.0, 0
    while missed > 1 - _SURE:
        missed *= max(count - good - draws, 0) / (count - draws)
        draws += 1
    return draws


def drawing() -> list[str]:
    """What random draws from the grid find."""
    rows = []
    for dtype, kernel, span, cells in by_range(whole()):
        found = [
            percent(math.expm1(sum(expected_loss(cell, draws) for cell in cells) / len(cells)))
            for draws in _DRAWS
        ]
        needed = [sorted(draws_needed(cell, share) for cell in cells) for share in (0.10, 0.05, 0.02)]
        shown = [f"{median(one):g} ({one[-1]})" for one in needed]
        rows.append([dtype, kernel, span, *found, *shown])
    head = ["type", "kernel", "m", *(f"best of {draws}" for draws in _DRAWS)]
    return table([*head, *(f"draws for {share}" for share in ("10%", "5%", "2%"))], rows)


def default_of(server: str, cell: Cell) -> KernelConfig:
    """What a server launches for a problem without a file, further keys left out."""
    name, version = RELEASES[server]
    opened = open_server(name, version, "3.6.0")
    config = opened.default_config(cell.problem, cell.kernel, cell.m)
    return plain(opened.launch(cell.problem, cell.kernel, config).config)


def _lost(server: str, cells: Sequence[Cell]) -> list[float]:
    found = (cell.loss(default_of(server, cell)) for cell in cells)
    return [loss for loss in found if loss is not None]


def defaults() -> list[str]:
    """What both servers' defaults lose to the best of the grid, or of the sample."""
    rows = []
    samples_of = {(dtype, kernel, span): cells for dtype, kernel, span, cells in by_range(sampled())}
    for dtype, kernel, span, cells in by_range((*theirs(), *own())):
        row = [dtype, kernel, span]
        for server in RELEASES:
            losses = _lost(server, cells)
            row.append(f"{percent(mean_loss(losses), 0)}, {percent(max(losses), 0)}")
        beside = samples_of.get((dtype, kernel, span), [])
        for server in RELEASES:
            losses = _lost(server, beside)
            shown = f"{percent(mean_loss(losses), 0)}, {percent(max(losses), 0)}" if losses else ""
            row.append(f"{shown} ({len(losses)} of {len(beside)})")
        rows.append([*row[:3], str(len(cells)), *row[3:]])
    return table(["type", "kernel", "m", "cells", "SGLang", "vLLM", "SGLang, samples", "vLLM, samples"], rows)


def default_shares() -> list[str]:
    """How often a default is near the best, over everything that was recorded."""
    rows = []
    for dtype in DTYPES:
        for server in RELEASES:
            for kernel in KERNELS:
                cells = (*theirs(), *own(), *sampled())
                losses = _lost(server, [c for c in cells if c.dtype == dtype and c.kernel == kernel])
                shares = [sum(loss <= limit for loss in losses) / len(losses) for limit in (0.02, 0.05, 0.2)]
                over = sum(loss > 0.5 for loss in losses) / len(losses)
                rows.append(
                    [dtype, server, kernel, str(len(losses)), *(percent(one, 0) for one in (*shares, over))]
                )
    return table(
        ["type", "server", "kernel", "cells", "within 2%", "within 5%", "within 20%", "over 50%"], rows
    )


def tiles(cell: Cell, block_size_m: int) -> int:
    """Row tiles of the launch grid (sglang 0.5.23 wheel, moe_align_block_size.py: longest padding)."""
    slots, groups = cell.m * cell.problem.topk, cell.problem.E + 1
    padded = slots * block_size_m if slots < groups else slots + groups * (block_size_m - 1)
    return -(-padded // block_size_m)


def equal_schedules(cell: Cell) -> list[float]:
    """Logarithms of the ratios of configs that differ in nothing: both groups are as tall as all tiles."""
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for config, time_us in sorted(cell.times_us.items()):
        if config.group_size_m >= tiles(cell, config.block_size_m):
            key = (
                config.block_size_m,
                config.block_size_n,
                config.block_size_k,
                config.num_warps,
                config.num_stages,
            )
            found[key].append(math.log(time_us))
    return [
        one - other for times in found.values() for place, one in enumerate(times) for other in times[:place]
    ]


def noise() -> list[str]:
    """What two measurements of the same thing differ by."""
    rows = []
    for name, cells in (("SGLang's kernel", theirs()), ("own kernel", own())):
        for dtype in DTYPES:
            near = [_near_best(cell) for cell in cells if cell.dtype == dtype]
            found = {cell.m: equal_schedules(cell) for cell in near}
            ms = sorted(m for m, ratios in found.items() if ratios)
            ratios = [ratio for cell in near for ratio in equal_schedules(cell)]
            if ratios:
                span = str(ms[0]) if len(ms) == 1 else f"{ms[0]} to {ms[-1]}"
                rows.append(_noise_row(f"{name}, {dtype}: equal schedules in a recording", span, ratios))
    for what, ratio_of in _INTERLEAVED.items():
        for span in RANGE_NAMES:
            ratios = [ratio_of(row) for row in samples() if range_of(row.m) == span]
            rows.append(_noise_row(f"own kernel, interleaved: {what}", span, ratios))
    return table(["what", "m", "pairs", "standard deviation", "95% within"], rows)


def _alone(row: Sampled) -> float:
    return math.log(median(row.with_us[:4]) / median(row.with_us[4:]))


def _beside(row: Sampled) -> float:
    """What is left of the difference where another binary, measured in turn with it, changes too."""
    return _alone(row) - math.log(median(row.without_us[:4]) / median(row.without_us[4:]))


_INTERLEAVED = {
    "one config, 4 samples against the next 4": _alone,
    "the same, against another binary": _beside,
}


def _near_best(cell: Cell) -> Cell:
    """What took several samples in every recording."""
    return cell.only(within(cell, 0.06))


def _noise_row(name: str, span: str, ratios: Sequence[float]) -> list[str]:
    return [
        name,
        span,
        str(len(ratios)),
        percent(pstdev(ratios), 2),
        percent(quantile(map(abs, ratios), 0.95), 1),
    ]

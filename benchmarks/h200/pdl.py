"""One kernel with and without programmatic dependent launch, on the problem of each recorded landscape."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.h200.common import binary, compile_all, gpu_backend
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import KERNELS
from moetune.domain.space import sglang_grid

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from moetune.domain.compilation import CompileTask
    from moetune.domain.config import KernelConfig
    from moetune.domain.landscape import Landscape
    from moetune.domain.problem import Kernel
    from moetune.measure.layer import GpuBackend
    from moetune.measure.timing import Graph

_LARGEST_M = 4096
_MS = 3
_LOST_WITHOUT = 0.7
"""What counts as lost, in logarithms, with a config that a landscape lacks."""
ROUNDS = 8
"""Samples with and without of each config; one half of them chooses, the other half judges."""


def some_ms(landscape: Landscape) -> list[int]:
    """Three m of a landscape: few, some, many tokens."""
    ms = sorted({m for _, m in landscape.times_us if m <= _LARGEST_M})
    return [ms[place * (len(ms) - 1) // (_MS - 1)] for place in range(_MS)] if len(ms) >= _MS else ms


def covering(landscapes: Sequence[Landscape], count: int) -> list[KernelConfig]:
    """Configs of the grid, greedily: each lowers most what is lost over all landscapes and m."""
    grid = sorted(sglang_grid(), key=lambda config: config.sort_key())
    places = {config: place for place, config in enumerate(grid)}
    rows = []
    for landscape in landscapes:
        for (_, m), times in landscape.times_us.items():
            ran = {places[c]: us for c, us in times.items() if us is not None and c in places}
            if ran and m <= _LARGEST_M:
                row = np.full(len(grid), _LOST_WITHOUT)
                row[list(ran)] = np.log(list(ran.values())) - math.log(min(ran.values()))
                rows.append(np.minimum(row, _LOST_WITHOUT))
    lost = np.stack(rows)
    now = np.full(len(rows), _LOST_WITHOUT)
    chosen: list[int] = []
    while len(chosen) < count:
        sums = np.minimum(now[:, None], lost).sum(axis=0)
        sums[chosen] = np.inf
        chosen.append(int(sums.argmin()))
        now = np.minimum(now, lost[:, chosen[-1]])
    return [grid[place] for place in chosen]


def without(task: CompileTask) -> CompileTask:
    """The same launch without programmatic dependent launch."""
    return replace(task, launch=replace(task.launch, pdl=False), pdl_early=False)


def pdl(arguments: argparse.Namespace) -> int:
    """Measure, or with --compile-only fill the cache; resumes from what the output file holds."""
    started = time.monotonic()
    landscapes = [read_landscape(path) for path in sorted(arguments.landscapes.glob("*.csv.gz"))]
    random.Random(7).shuffle(landscapes)  # a run that is cut short has some of each kind
    pools: dict[str, list[KernelConfig]] = {}
    for landscape in landscapes:
        dtype = landscape.problem.quantization.dtype.value
        alike = [other for other in landscapes if other.problem.quantization.dtype.value == dtype]
        pools.setdefault(dtype, covering(alike, arguments.count))
    tasks: dict[tuple[str, Kernel, int], list[tuple[KernelConfig, CompileTask]]] = {}
    for landscape in landscapes:
        problem = landscape.problem
        for kernel in KERNELS:
            for m in some_ms(landscape):
                tasks[landscape.name, kernel, m] = [
                    (config, binary(problem, kernel, m, config))
                    for config in pools[problem.quantization.dtype.value]
                ]
    wanted = {task for row in tasks.values() for _, one in row for task in (one, without(one))}
    good = compile_all(wanted, arguments.cache)
    print(f"{len(good)} of {len(wanted)} binaries after {time.monotonic() - started:.1f} s", flush=True)
    if arguments.compile_only:
        return 0
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    done = {row["landscape"] for row in rows}
    backend = gpu_backend(arguments.cache)
    for landscape in landscapes:
        if landscape.name in done:
            continue
        if time.monotonic() - started > arguments.budget:
            print("not done yet: run it again")
            report(arguments.out)
            return 3
        new = _measure(backend, landscape, tasks, good)
        rows += new
        arguments.out.write_text(json.dumps(rows) + "\n")
        seconds = time.monotonic() - started
        print(f"{landscape.name}: {len(new)} rows, {seconds:.1f} s", flush=True)
    print(f"compiled while measuring: {backend.compilations}")
    report(arguments.out)
    return 0


def _measure(
    backend: GpuBackend,
    landscape: Landscape,
    tasks: dict[tuple[str, Kernel, int], list[tuple[KernelConfig, CompileTask]]],
    good: set[CompileTask],
) -> list[dict[str, Any]]:
    from moetune.measure import timing
    from moetune.measure.protocol import Workload

    ms = some_ms(landscape)
    backend.open(Workload(landscape.problem, tuple(ms)))
    rows = []
    for kernel in KERNELS:
        for m in ms:
            for config, task in tasks[landscape.name, kernel, m]:
                pair = (task, without(task))
                if not all(one in good for one in pair):
                    continue
                graphs: list[Graph] = []
                count = 0
                for one in pair:
                    launch, circle = backend.launcher(one, m)
                    count = len(circle.experts)
                    launch(0)
                    graphs.append(timing.capture(launch, count))
                between_us = backend.between_us(count)
                on, off = (
                    [round(time_us - between_us, 3) for time_us in samples]
                    for samples in timing.interleave(graphs, count, ROUNDS, m)
                )
                rows.append(
                    {
                        "landscape": landscape.name,
                        "kernel": kernel,
                        "m": m,
                        "config": str(config),
                        "early": task.pdl_early,
                        "with_us": on,
                        "without_us": off,
                    }
                )
    return rows


def report(path: Path) -> None:
    """How much PDL moves: times, ranks, and what a choice made without it loses with it."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text()):
        groups.setdefault((row["landscape"], row["kernel"], row["m"]), []).append(row)
    half = ROUNDS // 2
    found: dict[str, list[dict[str, float]]] = {}
    for (_, _, m), rows in groups.items():
        choose_on = [statistics.median(row["with_us"][:half]) for row in rows]
        judge_on = [statistics.median(row["with_us"][half:]) for row in rows]
        choose_off = [statistics.median(row["without_us"][:half]) for row in rows]
        best = min(judge_on)
        ranks = [np.argsort(np.argsort(values)) for values in (choose_on, judge_on, choose_off)]
        entry = {
            "speedup": statistics.median(off / on for on, off in zip(judge_on, choose_off, strict=True)),
            "rank": float(np.corrcoef(ranks[2], ranks[1])[0, 1]),
            "rank_noise": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
            "regret": judge_on[min(range(len(rows)), key=choose_off.__getitem__)] / best,
            "regret_noise": judge_on[min(range(len(rows)), key=choose_on.__getitem__)] / best,
        }
        size = "m up to 32" if m <= 32 else "m up to 512" if m <= 512 else "m over 512"
        for name in ("all", f"early start {bool(rows[0]['early'])}", size):
            found.setdefault(name, []).append(entry)
    for name, entries in sorted(found.items()):
        means = {
            key: statistics.median(entry[key] for entry in entries)
            for key in ("speedup", "rank", "rank_noise")
        }
        regrets = {
            key: math.exp(statistics.fmean(math.log(entry[key]) for entry in entries)) - 1
            for key in ("regret", "regret_noise")
        }
        worst = max(entry["regret"] for entry in entries) - 1
        print(
            f"{name}: {len(entries)} of kernel and m; time without over with {means['speedup']:.3f}; rank"
            f" correlation {means['rank']:.3f} (the same twice {means['rank_noise']:.3f}); a choice without"
            f" loses {regrets['regret']:.2%} (with, by noise {regrets['regret_noise']:.2%}),"
            f" at worst {worst:.1%}"
        )

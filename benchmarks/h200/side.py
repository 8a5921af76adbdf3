"""Winners of several runs and the server's default timed again: one process, interleaved, fresh routings."""

from __future__ import annotations

import json
import math
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.h200.common import PROBLEMS, binary, compile_all, gpu_backend, server_of
from moetune.domain.choose import Pair
from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from moetune.domain.compilation import CompileTask
    from moetune.measure.layer import GpuBackend
    from moetune.measure.protocol import LayerPair
    from moetune.measure.timing import Graph

SEEDS = (101, 102, 103)
"""Of routings that no search has seen."""


def _pairs(path: Path) -> dict[int, Pair]:
    """The choices of a run by m: of `tune --json`, or of the piece `grid`."""
    return {
        entry["m"]: Pair(*(KernelConfig.from_json(entry[kernel], str(path)) for kernel in KERNELS))
        for entry in json.loads(path.read_text())["entries"]
    }


def side(arguments: argparse.Namespace) -> int:
    """Each contestant over the first one, whose times are the measure; above 1 it is faster."""
    from moetune.measure.protocol import LayerPair, LayerTask, Workload

    problem = PROBLEMS[arguments.problem]
    server = server_of(problem)
    runs = {name: _pairs(path) for name, path in arguments.runs}
    ms = sorted(set(arguments.m).intersection(*(run.keys() for run in runs.values())))
    defaults = {m: Pair(*(server.default_config(problem, kernel, m) for kernel in KERNELS)) for m in ms}
    runs["default"] = defaults
    names = list(runs)
    tasks: dict[tuple[str, int], LayerPair] = {
        (name, m): LayerPair(
            binary(problem, "up", m, run[m].up, run[m].down), binary(problem, "down", m, run[m].down)
        )
        for name, run in runs.items()
        for m in ms
    }
    compile_all((task for pair in tasks.values() for task in (pair.up, pair.down)), arguments.cache)
    backend = gpu_backend(arguments.cache)
    backend.open(Workload(problem, tuple(ms), SEEDS[0]))
    rows = []
    for m in ms:
        contestants = [tasks[name, m] for name in names]
        layers = [
            backend.layer(LayerTask(m, tuple(contestants), "uniform", arguments.rounds, seed)).samples_us
            for seed in SEEDS
        ]
        kernels = [_kernels(backend, m, contestants, arguments.rounds, seed) for seed in SEEDS]
        row: dict[str, Any] = {
            "m": m,
            "same": [name for name in names[1:] if runs[name][m] == runs[names[0]][m]],
        }
        for kind, found in (("layer", layers), ("kernels", kernels)):
            row[kind] = {
                name: {
                    "us": statistics.fmean(statistics.median(samples[place]) for samples in found),
                    "over_first": _ratio(found, place),
                }
                for place, name in enumerate(names)
            }
        rows.append(row)
        print(
            f"m={m:5d} "
            + "  ".join(
                f"{name} {row['layer'][name]['us']:.1f} us {row['layer'][name]['over_first']:.4f}"
                f" (kernels {row['kernels'][name]['us']:.1f} us {row['kernels'][name]['over_first']:.4f})"
                for name in names
            ),
            flush=True,
        )
    for kind in ("layer", "kernels"):
        for name in names[1:]:
            ratios = [row[kind][name]["over_first"] for row in rows]
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{kind}: {name} over {names[0]}: geometric mean {mean:.4f}, worst {min(ratios):.4f}")
    print(f"compiled while measuring: {backend.compilations}")
    arguments.out.write_text(
        json.dumps({"problem": arguments.problem, "first": names[0], "rows": rows}) + "\n"
    )
    return 0


def _ratio(found: Sequence[Sequence[Sequence[float]]], place: int) -> float:
    """The first one's time over a contestant's: the median within rounds, the mean over routings."""
    logs = [
        math.log(statistics.median(a / b for a, b in zip(samples[0], samples[place], strict=True)))
        for samples in found
    ]
    return math.exp(statistics.fmean(logs))


def _kernels(
    backend: GpuBackend, m: int, contestants: Sequence[LayerPair], rounds: int, seed: int
) -> list[list[float]]:
    """For each contestant the sum of both kernels alone, one a round."""
    from moetune.measure import timing

    backend.use_seed(seed)
    sums = [[0.0] * rounds for _ in contestants]
    for kernel in KERNELS:
        graphs: list[Graph] = []
        count = 0
        for pair in contestants:
            task: CompileTask = getattr(pair, kernel)
            launch, circle = backend.launcher(task, m)
            count = len(circle.experts)
            launch(0)
            graphs.append(timing.capture(launch, count))
        between_us = backend.between_us(count)
        for place, samples in enumerate(timing.interleave(graphs, count, rounds, seed)):
            for number, time_us in enumerate(samples):
                sums[place][number] += time_us - between_us
    return sums

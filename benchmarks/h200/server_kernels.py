"""The servers' own kernels beside moetune's: the same configs, launches and routings, interleaved.

    python -m benchmarks.h200.server_kernels \
        --server sglang-0.5.15=DIR --server sglang-0.5.23=DIR --server vllm-0.33.0=DIR \
        --cache CACHE --out OUT.json [--budget 280] [--compile-only] [--report-only]

DIR holds the Python files of that release as its wheel does (`DIR/sglang/...`). For each problem, kernel
and m a set of configs: those that recorded grids of either kernel show to be good, the server's default,
and others drawn from what ran there. Each is launched on moetune's kernel and on each server's under that
server's launch flags, one sample of each in turn. Two passes over all configs in different orders: what is
chosen on the first is judged on the second. A run that is cut short goes on where it ended (exit 3).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.h200.common import PROBLEMS, compile_all, gpu_backend
from moetune.applications.server_kernels import kernel_in
from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.errors import ConfigFileError
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import KERNELS
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moetune.domain.config import KernelConfig
    from moetune.domain.landscape import Landscape
    from moetune.domain.problem import Kernel, Problem
    from moetune.domain.server_kernel import KernelFile
    from moetune.measure.layer import GpuBackend

_TOP = Path(__file__).resolve().parents[2]
GRIDS = {
    "seed": (
        _TOP / "benchmarks/results/qwen3.5-122b-a10b_tp4_bf16_h200_own-kernel_18m.csv.gz",
        _TOP / "training/landscapes/qwen3.5-122b-a10b_tp4_bf16_h200.csv.gz",
    ),
    "qwen3.5-35b-fp8": (
        _TOP / "benchmarks/results/qwen3.5-35b-a3b_tp1_fp8-block_h200_own-kernel_6m.csv.gz",
        _TOP / "training/landscapes/qwen3.5-35b-a3b_tp1_fp8-block_h200.csv.gz",
    ),
}
"""Recorded grids of each problem: moetune's kernel, and SGLang 0.5.23's."""
MS = (64, 1024)
ROUNDS = 4
"""Samples of each contestant in a pass."""
_HOPELESS = 3.0
"""Times the best, above which a config is not drawn: it would take the time of many."""
_FIRST = 16
_GOALS = {"loss": 0.02, "first": 0.005, "ratio": 0.05}
_CHECK_M = 64
_OURS = "moetune as "


@dataclass(frozen=True, slots=True)
class Release:
    """A release whose kernel is timed."""

    name: str
    version: str
    file: KernelFile

    @property
    def text(self) -> str:
        """Its name."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Contest:
    """One config in one place: for each contestant the binary."""

    config: KernelConfig
    tasks: dict[str, CompileTask]


Place = tuple[str, "Kernel", int]
"""Problem, kernel, m."""


def release(text: str) -> Release:
    """Read `sglang-0.5.23=DIR`."""
    label, _, folder = text.partition("=")
    name, _, version = label.partition("-")
    return Release(name, version, kernel_in(open_server(name, version), Path(folder)))


@lru_cache(maxsize=8)
def _grid(path: Path) -> Landscape:
    return read_landscape(path)


def _shares(landscape: Landscape, kernel: Kernel, m: int) -> dict[KernelConfig, float]:
    """The share of the best time that configs reach at the recorded m around this one, the better of both."""
    known = sorted(recorded for part, recorded in landscape.times_us if part == kernel)
    near = {max((x for x in known if x <= m), default=0), min((x for x in known if x >= m), default=0)} - {0}
    found: dict[KernelConfig, float] = {}
    for recorded in near:
        times = {config: us for config, us in landscape.times_us[kernel, recorded].items() if us is not None}
        best = min(times.values())
        for config, time_us in times.items():
            found[config] = max(found.get(config, 0.0), best / time_us)
    return found


def chosen(
    name: str, kernel: Kernel, ms: Sequence[int], best: int, others: int
) -> dict[int, list[KernelConfig]]:
    """For each m the configs: the best of each recorded grid in turn, and others, the same at every m."""
    shares = {m: [_shares(_grid(path), kernel, m) for path in GRIDS[name]] for m in ms}
    found: dict[int, dict[KernelConfig, None]] = {}
    for m in ms:
        ranked = [
            sorted(one, key=lambda config: (-one[config], config.sort_key())) for one in shares[m] if one
        ]
        problem = PROBLEMS[name]
        default = open_server("sglang", "0.5.23").default_config(problem, kernel, m)
        found[m] = {default: None}
        for row in zip(*ranked, strict=False):
            for config in row:
                if len(found[m]) < best:
                    found[m].setdefault(config)
    common = set.intersection(*(set(one) for row in shares.values() for one in row if one))
    pool = sorted(
        (
            config
            for config in common
            if all(one[config] >= 1 / _HOPELESS for row in shares.values() for one in row if one)
        ),
        key=lambda config: config.sort_key(),
    )
    drawn = random.Random(f"{name} {kernel}").sample(pool, min(others, len(pool)))
    return {m: list(dict.fromkeys((*found[m], *drawn))) for m in ms}


def contests(
    releases: Sequence[Release], names: Iterable[str], ms: Sequence[int], best: int, others: int
) -> dict[Place, list[Contest]]:
    """What is measured in each place."""
    found: dict[Place, list[Contest]] = {}
    for name in names:
        for kernel in KERNELS:
            for m, configs in chosen(name, kernel, ms, best, others).items():
                rows = [
                    Contest(config, _binaries(releases, PROBLEMS[name], kernel, m, config))
                    for config in configs
                ]
                found[name, kernel, m] = [row for row in rows if row.tasks]
    return found


def _binaries(
    releases: Sequence[Release], problem: Problem, kernel: Kernel, m: int, config: KernelConfig
) -> dict[str, CompileTask]:
    """By contestant the binary; none at all where some release would not launch the config as it is."""
    tasks: dict[str, CompileTask] = {}
    for one in releases:
        server = open_server(one.name, one.version)
        asked = replace(problem, server=one.name, server_version=one.version)
        try:
            launch = server.launch(asked, kernel, config)
        except ConfigFileError:
            return {}
        kinds = server.launch_classes(asked, kernel, (m,), launch.config.block_size_m)
        theirs = compile_task(launch, asked, kinds[0], one.file) if kinds else "another kernel runs"
        if isinstance(theirs, str) or launch.config != config:
            return {}
        # On moetune's kernel: the same launch. How the padded length divides is left to one binary.
        ours = replace(theirs, kernel_file=None, padded_length_divisible=theirs.slots_alone)
        tasks[one.text] = theirs
        tasks[_OURS + one.text] = ours
    return tasks


def run(arguments: argparse.Namespace) -> int:
    """Compile all, then measure place by place."""
    started = time.monotonic()
    releases = [release(text) for text in arguments.server]
    places = contests(releases, arguments.problem, arguments.m, arguments.best, arguments.others)
    wanted = {task for rows in places.values() for row in rows for task in row.tasks.values()}
    print(f"{sum(map(len, places.values()))} of place and config, {len(wanted)} binaries", flush=True)
    if arguments.count_only:
        return 0
    good = compile_all(wanted, arguments.cache, arguments.workers)
    print(f"{len(good)} of {len(wanted)} compiled after {time.monotonic() - started:.1f} s", flush=True)
    if arguments.compile_only:
        return 0
    document = _document(arguments.out)
    backend = gpu_backend(arguments.cache)
    opened = ""
    for place, rows in places.items():
        key = " ".join(map(str, place))
        if key in document["places"]:
            continue
        if time.monotonic() - started > arguments.budget:
            print("not done yet: run it again", flush=True)
            report(document)
            return 3
        begun = time.monotonic()
        if place[0] != opened:
            _open(backend, place[0], arguments.m)
            opened = place[0]
        ready = [row for row in rows if all(task in good for task in row.tasks.values())]
        if place[2] == _CHECK_M:
            document["numerics"].update(_numerics(backend, place, ready))
        document["places"][key] = _measure(backend, place, ready)
        document["compiled_while_measuring"] = backend.compilations
        _write(arguments.out, document)
        print(f"{key}: {len(ready)} configs in {time.monotonic() - begun:.1f} s", flush=True)
    report(document)
    return 0


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def _document(path: Path) -> dict[str, Any]:
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"places": {}, "numerics": {}, "compiled_while_measuring": 0}


def _write(path: Path, document: dict[str, Any]) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")
    beside.replace(path)


def _open(backend: GpuBackend, name: str, ms: Sequence[int]) -> None:
    from moetune.measure.protocol import Workload

    backend.open(Workload(PROBLEMS[name], tuple(ms)))


def _numerics(backend: GpuBackend, place: Place, rows: Sequence[Contest]) -> dict[str, Any]:
    """One config of each contestant against the fp32 reference."""
    from moetune.measure.protocol import CheckTask

    found = {}
    for contestant, task in rows[0].tasks.items():
        checked = backend.check(CheckTask(task, place[2]))
        found[f"{' '.join(map(str, place))} {contestant}"] = [checked.relative_error, checked.tolerance]
    return found


def _measure(backend: GpuBackend, place: Place, rows: Sequence[Contest]) -> dict[str, Any]:
    """For each config and contestant the samples of both passes."""
    import torch

    from moetune.measure import timing

    m = place[2]
    graphs: list[dict[CompileTask, timing.Graph]] = []
    count = 0
    for row in rows:
        captured: dict[CompileTask, timing.Graph] = {}
        for task in dict.fromkeys(row.tasks.values()):
            launch, circle = backend.launcher(task, m)
            count = len(circle.experts)
            launch(0)
            captured[task] = timing.capture(launch, count)
        graphs.append(captured)
    torch.cuda.synchronize()
    between_us = backend.between_us(count)
    timing.wake()
    samples: list[dict[CompileTask, list[list[float]]]] = [{task: [] for task in row} for row in graphs]
    for number in range(2):
        order = list(range(len(rows)))
        random.Random(f"{place} {number}").shuffle(order)
        for index in order:
            tasks = list(graphs[index])
            times = timing.interleave([graphs[index][task] for task in tasks], count, ROUNDS, number + index)
            for task, values in zip(tasks, times, strict=True):
                samples[index][task].append([round(value - between_us, 3) for value in values])
    del graphs
    torch.cuda.empty_cache()
    return {
        str(row.config): {name: found[task] for name, task in row.tasks.items()}
        for row, found in zip(rows, samples, strict=True)
    }


def report(document: dict[str, Any]) -> None:
    """What a choice on moetune's kernel is worth on each server's."""
    print(f"compiled while measuring: {document['compiled_while_measuring']}")
    worst = max((error / tolerance for error, tolerance in document["numerics"].values()), default=None)
    if worst is not None:
        print(f"numerics: {len(document['numerics'])} checks, at most {worst:.0%} of the tolerance")
    reached: dict[str, list[bool]] = {name: [] for name in _GOALS}
    for key, rows in document["places"].items():
        for theirs in (name for name in next(iter(rows.values())) if not name.startswith(_OURS)):
            found = compare(list(rows.values()), theirs)
            for name, goal in _GOALS.items():
                off = abs(found[name] - 1) if name == "ratio" else found[name]
                reached[name].append(off <= goal)
            print(
                f"{key}, {theirs}: {found['configs']:.0f} configs; the config chosen on ours loses"
                f" {found['loss']:.2%} (chosen on theirs {found['noise_loss']:.2%}), the best of our first"
                f" {_FIRST} {found['first']:.2%} ({found['noise_first']:.2%}); ours over theirs in the median"
                f" {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f}; of the good third"
                f" {found['good_ratio']:.3f}); rank correlation {found['rank']:.3f} (theirs twice"
                f" {found['noise_rank']:.3f}); best {found['best_us']:.1f} us"
            )
    for name, goal in _GOALS.items():
        print(f"{name} within {goal:.1%}: {sum(reached[name])} of {len(reached[name])}")


def compare(rows: Sequence[dict[str, list[list[float]]]], theirs: str) -> dict[str, float]:
    """One server's kernel with moetune's, launched alike.

    Args:
        rows: for each config by contestant the samples of both passes.
        theirs: the server's contestant.

    Returns:
        `loss`: what the config that is best on ours in the first pass loses on theirs in the second, over
        the best there; `first`: the same of the best of the sixteen best on ours; `noise_...`: chosen on
        theirs in the first pass; `ratio`: ours over theirs.
    """
    median, ours = statistics.median, _OURS + theirs
    our_first = np.array([median(row[ours][0]) for row in rows])
    their_first = np.array([median(row[theirs][0]) for row in rows])
    their_second = np.array([median(row[theirs][1]) for row in rows])
    ratios = np.array([_median_us(row[ours]) / _median_us(row[theirs]) for row in rows])
    best = float(their_second.min())
    ranks = [np.argsort(np.argsort(values)) for values in (our_first, their_first, their_second)]
    good = np.argsort(their_second)[: max(len(rows) // 3, 1)]

    def lost(by: np.ndarray[Any, Any], count: int) -> float:
        return float(their_second[np.argsort(by, kind="stable")[:count]].min()) / best - 1

    return {
        "configs": len(rows),
        "loss": lost(our_first, 1),
        "noise_loss": lost(their_first, 1),
        "first": lost(our_first, _FIRST),
        "noise_first": lost(their_first, _FIRST),
        "ratio": float(np.median(ratios)),
        "good_ratio": float(np.median(ratios[good])),
        "low": float(np.quantile(ratios, 0.1)),
        "high": float(np.quantile(ratios, 0.9)),
        "rank": float(np.corrcoef(ranks[0], ranks[2])[0, 1]),
        "noise_rank": float(np.corrcoef(ranks[1], ranks[2])[0, 1]),
        "best_us": best,
    }


def _median_us(passes: Sequence[Sequence[float]]) -> float:
    return statistics.median(time_us for samples in passes for time_us in samples)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", default=[], metavar="NAME-VERSION=DIR")
    parser.add_argument("--problem", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--m", type=int, nargs="+", default=list(MS))
    parser.add_argument("--best", type=int, default=44, help="configs of the recorded grids at each m")
    parser.add_argument("--others", type=int, default=28, help="others, the same at every m")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=280.0, help="seconds in all")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--count-only", action="store_true", help="say how much there is to compile")
    parser.add_argument("--report-only", action="store_true", help="of what OUT holds")
    arguments = parser.parse_args()
    if arguments.report_only:
        report(json.loads(_text(arguments.out)))
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Right numbers and plausible times: real shapes against the reference, and against recorded times."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.h200.common import PROBLEMS, laboratory, uuid
from moetune.applications.journal import Journal
from moetune.applications.questions import check_target
from moetune.applications.targets import Target
from moetune.domain.config import KernelConfig
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    import argparse

CHECKED = (
    KernelConfig(16, 32, 64, 1, 4, 3),
    KernelConfig(16, 64, 128, 16, 4, 4),
    KernelConfig(32, 128, 64, 32, 8, 2),
    KernelConfig(64, 64, 128, 1, 4, 3),
    KernelConfig(128, 128, 64, 16, 8, 3),
    KernelConfig(128, 256, 64, 1, 8, 4),
)


def numerics(_: argparse.Namespace) -> int:
    """Real shapes, both kernels, one, few and many tokens, against the fp32 reference."""
    bad = 0
    for name in ("seed", "qwen3.5-35b-fp8"):
        problem = PROBLEMS[name]
        with (
            tempfile.TemporaryDirectory() as folder,
            Journal.open(Path(folder), problem, uuid()) as journal,
            laboratory(problem, journal, (1, 7, 300)) as lab,
        ):
            for kernel in KERNELS:
                for config in CHECKED:
                    for m in (1, 7, 300):
                        checked = check_target(lab, Target(kernel, m, config))
                        right = checked is not None and checked.passed
                        bad += not right
                        error = "none" if checked is None else f"{checked.relative_error:.2e}"
                        print(f"{'ok ' if right else 'BAD'} {name} {kernel} m={m} {config}: {error}")
            print(f"failed: {lab.known.failed}; compiled while measuring: {lab.compilations}")
    return bool(bad)


def sanity(arguments: argparse.Namespace) -> int:
    """Times of random configs of a recorded landscape, ours over the recorded ones."""
    found = read_landscape(arguments.landscape)
    problem = found.problem
    rng = random.Random(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.open(Path(folder), problem, uuid()) as journal,
        laboratory(problem, journal, sorted({m for _, m in found.times_us})) as lab,
    ):
        for (kernel, m), times in found.times_us.items():
            ran = sorted(config for config, time_us in times.items() if time_us is not None)
            ran.sort(key=lambda config: times[config] or math.inf)
            lab.want(Target(kernel, m, config) for config in [*ran[:4], *rng.sample(ran[: len(ran) // 2], 6)])
        lab.run()
        for (kernel, m), times in found.times_us.items():
            ratios = [
                time_us / recorded
                for target, time_us in lab.known.times.items()
                if target.kernel == kernel and target.m == m and time_us
                if (recorded := times.get(target.config))
            ]
            print(
                f"{kernel} m={m}: ours over recorded {statistics.median(ratios):.3f}"
                f" ({min(ratios):.3f} to {max(ratios):.3f}), {len(ratios)} configs"
            )
        print(
            f"failed: {lab.known.failed}; compiled while measuring: {lab.compilations}; drifts: {lab.drifts}"
        )
    return 0

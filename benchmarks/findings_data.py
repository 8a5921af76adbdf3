"""The recordings behind docs/findings.md, as cells: one kernel of one problem at one m.

All lie in the repository: `training/landscapes` (SGLang 0.5.23's kernel, launched without programmatic
dependent launch) and `benchmarks/results` (moetune's own kernel, with it). All are of one NVIDIA H200 with
Triton 3.6.0 and torch 2.11.0, 2026-12-01 and 2026-12-02, weights not in the L2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from moetune.domain.config import KernelConfig
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import Kernel, Problem
from moetune.domain.space import sglang_grid

ROOT = Path(__file__).parents[1]
LANDSCAPES = ROOT / "training" / "landscapes"
RESULTS = ROOT / "benchmarks" / "results"

GRID_RECORDINGS = (
    "qwen3.5-122b-a10b_tp4_bf16_h200",
    "qwen3.5-35b-a3b_tp1_bf16_h200",
    "qwen3.5-35b-a3b_tp1_fp8-block_h200",
)
"""Recordings of SGLang's kernel that hold the whole grid."""

OWN_RECORDINGS = (
    "qwen3.5-122b-a10b_tp4_bf16_h200_own-kernel_18m",
    "qwen3-30b-a3b_tp1_bf16_h200_own-kernel_6m",
    "mixtral-8x7b_tp2_bf16_h200_own-kernel_6m",
    "qwen3.5-35b-a3b_tp1_fp8-block_h200_own-kernel_6m",
)
"""Recordings of moetune's own kernel; each holds the whole grid, and the default where it lies outside."""

SAMPLED_RECORDINGS = (
    "deepseek-v3_ep8-like_fp8-block_h200",
    "deepseek-v3_tp8_bf16_h200",
    "deepseek-v3_tp8_fp8-block_h200",
    "minimax-m2_tp4_fp8-block_h200",
    "mixtral-8x22b_tp8_bf16_h200",
    "mixtral-8x7b_tp2_bf16_h200",
    "olmoe-1b-7b_tp1_bf16_h200",
    "phi-3.5-moe_tp2_bf16_h200",
    "qwen3-235b-a22b_tp4_bf16_h200",
    "qwen3-235b-a22b_tp4_fp8-block_h200",
    "qwen3-235b-a22b_tp8_bf16_h200",
    "qwen3-30b-a3b_tp1_bf16_h200",
    "qwen3-30b-a3b_tp1_fp8-block_h200",
    "qwen3-coder-480b_tp4_bf16_h200",
    "qwen3-coder-480b_tp4_fp8-block_h200",
    "qwen3.5-122b-a10b_tp1_bf16_h200",
    "qwen3.5-35b-a3b_tp1_down_fp8-block_h200",
    "synthetic-e32_tp1_bf16_h200",
    "synthetic-e32_tp1_fp8-block_h200",
    "synthetic-e512_tp8_bf16_h200",
    "synthetic-e512_tp8_fp8-block_h200",
    "synthetic-e8_tp4_fp8-block_h200",
)
"""Recordings of SGLang's kernel on a sample of configs, half of them good elsewhere."""

RANGES = ((1, 4), (8, 32), (48, 128), (256, 512), (1024, 8192))
"""Ranges of m that tables have."""


@dataclass(frozen=True)
class Cell:
    """One kernel of one problem at one m.

    Attributes:
        recording: name of the file.
        problem: what was measured.
        kernel: `up` or `down`.
        m: tokens.
        times_us: of every config that ran.
    """

    recording: str
    problem: Problem
    kernel: Kernel
    m: int
    times_us: dict[KernelConfig, float]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """E, N, K, topk of the problem."""
        return self.problem.E, self.problem.N, self.problem.K, self.problem.topk

    @property
    def dtype(self) -> str:
        """`bf16`, or `block fp8`."""
        return {"bf16": "bf16", "fp8_w8a8": "block fp8"}[self.problem.quantization.dtype.value]

    @property
    def key(self) -> tuple[tuple[int, int, int, int], str, Kernel, int]:
        """What a second recording of the same has too."""
        return self.shape, self.dtype, self.kernel, self.m

    @cached_property
    def best_us(self) -> float:
        """Least time."""
        return min(self.times_us.values())

    @cached_property
    def best(self) -> KernelConfig:
        """The fastest config."""
        fastest = [config for config, time_us in self.times_us.items() if time_us == self.best_us]
        return min(fastest, key=KernelConfig.sort_key)

    def loss(self, config: KernelConfig) -> float | None:
        """By how much longer it takes than the best, 0.1 for 10%; None where it was not measured."""
        time_us = self.times_us.get(config)
        return None if time_us is None else time_us / self.best_us - 1

    def only(self, configs: Iterable[KernelConfig]) -> Cell:
        """The same with some of its configs."""
        kept = {config: self.times_us[config] for config in configs if config in self.times_us}
        return Cell(self.recording, self.problem, self.kernel, self.m, kept)


def plain(config: KernelConfig) -> KernelConfig:
    """The same without keys that only some kernels read."""
    return KernelConfig(
        config.block_size_m,
        config.block_size_n,
        config.block_size_k,
        config.group_size_m,
        config.num_warps,
        config.num_stages,
    )


@lru_cache(maxsize=1)
def grid() -> frozenset[KernelConfig]:
    """SGLang's grid."""
    return frozenset(sglang_grid())


def _cells(folder: Path, names: Sequence[str]) -> list[Cell]:
    found = []
    for name in names:
        landscape = read_landscape(folder / f"{name}.csv.gz")
        for key in sorted(landscape.times_us, key=lambda key: (key[1], key[0])):
            times = landscape.times_us[key]
            ran = {config: time_us for config, time_us in times.items() if time_us is not None}
            found.append(Cell(name, landscape.problem, *key, ran))
    return found


@lru_cache(maxsize=1)
def theirs() -> tuple[Cell, ...]:
    """The whole grid under SGLang's kernel."""
    return tuple(_cells(LANDSCAPES, GRID_RECORDINGS))


@lru_cache(maxsize=1)
def own() -> tuple[Cell, ...]:
    """The whole grid under moetune's own kernel, the default too."""
    return tuple(_cells(RESULTS, OWN_RECORDINGS))


@lru_cache(maxsize=1)
def sampled() -> tuple[Cell, ...]:
    """Samples of configs under SGLang's kernel, of many shapes."""
    return tuple(_cells(LANDSCAPES, SAMPLED_RECORDINGS))


@lru_cache(maxsize=1)
def whole() -> tuple[Cell, ...]:
    """Every cell that holds the whole grid, the grid alone."""
    return tuple(cell.only(grid()) for cell in (*theirs(), *own()))


@lru_cache(maxsize=1)
def twice() -> list[tuple[Cell, Cell]]:
    """Cells whose whole grid was recorded twice: SGLang's kernel, and moetune's own."""
    again = {cell.key: cell for cell in own()}
    pairs = [(cell, again[cell.key]) for cell in theirs() if cell.key in again]
    return [
        (first.only(shared), second.only(shared))
        for first, second in pairs
        for shared in [grid() & first.times_us.keys() & second.times_us.keys()]
    ]


def range_of(m: int) -> str:
    """The range of m, as tables name it."""
    for first, last in RANGES:
        if m <= last:
            return f"{first} to {last}"
    raise ValueError(m)


RANGE_NAMES = tuple(f"{first} to {last}" for first, last in RANGES)


def mean_loss(losses: Iterable[float]) -> float:
    """Geometric mean of the times, less one."""
    logs = [math.log1p(loss) for loss in losses]
    return math.expm1(sum(logs) / len(logs))


def quantile(values: Iterable[float], share: float) -> float:
    """The value that a share of the values does not exceed; the nearest one below that many."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def percent(value: float, digits: int = 1) -> str:
    """A share as a table shows it."""
    text = f"{100 * value:.{digits}f}%"
    return text.removeprefix("-") if float(text[:-1]) == 0 else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]

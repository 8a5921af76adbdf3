"""What the landscapes of eight formats say: what defaults lose in each, and what each takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.findings_data import LANDSCAPES, Cell, mean_loss, percent, table
from benchmarks.findings_grid import RELEASES, default_of
from moetune.domain.config import KernelConfig
from moetune.domain.landscape import read_landscape
from moetune.domain.problem import KERNELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.domain.problem import Kernel

FORMATS = {
    "bf16": "bf16",
    "fp8-tensor": "fp8, by tensor",
    "fp8-channel": "fp8, by channel",
    "fp8-block": "fp8, by block",
    "int8-channel": "int8 w8a8, by channel",
    "int8-w8a16": "int8 w8a16, by channel",
    "int4-g128": "int4, groups of 128",
    "int4-g128-zeros": "int4, groups of 128, zero points",
}
"""Ends of the landscapes' names to what a table calls them."""
SPANS = ((1, 32), (48, 512), (1024, 8192))
_OWN = "_h200_own-kernel"


@dataclass(frozen=True)
class TwoPasses:
    """A cell whose best is chosen on the first pass; losses are judged on the second.

    Attributes:
        format: as in `FORMATS`.
        first: times of the first pass.
        second_us: those of the second, of what was within 1.6 times the best.
    """

    format: str
    first: Cell
    second_us: dict[KernelConfig, float]

    def loss(self, config: KernelConfig) -> float | None:
        """By how much longer a config takes than the best; None where it was not timed.

        Where it was not timed in the second pass it lost 60% and more in the first, and that counts.
        """
        if config in self.second_us and self.first.best in self.second_us:
            return self.second_us[config] / self.second_us[self.first.best] - 1
        return self.first.loss(config)


@lru_cache(maxsize=1)
def cells() -> tuple[TwoPasses, ...]:
    """Of the landscapes with two passes, all kernels and m."""
    found = []
    for path in sorted(LANDSCAPES.glob(f"*{_OWN}.csv.gz")):
        landscape = read_landscape(path)
        kind = landscape.name.removesuffix(_OWN).rpartition("_")[2]
        for (kernel, m), times in landscape.times_us.items():
            ran = {config: time_us for config, time_us in times.items() if time_us is not None}
            second = dict(landscape.second_us.get((kernel, m), {}))
            found.append(TwoPasses(kind, Cell(landscape.name, landscape.problem, kernel, m, ran), second))
    return tuple(found)


def defaults_by_format() -> list[str]:
    """What both servers' defaults lose in each format, to the best of what was sampled."""
    rows = []
    for kind, name in FORMATS.items():
        for kernel in KERNELS:
            row = [name, kernel]
            for server in RELEASES:
                for first, last in SPANS:
                    row.append(_lost(server, _those(kind, kernel, first, last)))
            rows.append(row)
    spans = [f"{first} to {last}" for first, last in SPANS]
    return table(["type", "kernel", *(f"{name}, m {span}" for name in RELEASES for span in spans)], rows)


def _those(kind: str, kernel: Kernel, first: int, last: int) -> list[TwoPasses]:
    return [
        cell
        for cell in cells()
        if cell.format == kind and cell.first.kernel == kernel and first <= cell.first.m <= last
    ]


def _lost(server: str, among: Sequence[TwoPasses]) -> str:
    found = [cell.loss(default_of(server, cell.first)) for cell in among]
    losses = [loss for loss in found if loss is not None]
    if not losses:
        return "none timed"
    return f"{percent(mean_loss(losses), 0)}, {percent(max(losses), 0)} ({len(losses)})"


def format_times() -> list[str]:
    """The best time of each format over that of bf16 at the same shape and m: median, least to most."""
    best: dict[tuple[str, Kernel, int], dict[str, float]] = defaultdict(dict)
    for cell in cells():
        shape = cell.first.recording.removesuffix(_OWN).rpartition("_")[0]
        best[shape, cell.first.kernel, cell.first.m][cell.format] = cell.first.best_us
    rows = []
    for kind, name in FORMATS.items():
        if kind == "bf16":
            continue
        row = [name]
        for kernel in KERNELS:
            for first, last in SPANS:
                ratios = [
                    found[kind] / found["bf16"]
                    for (_, of_kernel, m), found in best.items()
                    if of_kernel == kernel and first <= m <= last and {kind, "bf16"} <= found.keys()
                ]
                row.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "")
        rows.append(row)
    spans = [f"{kernel}, m {first} to {last}" for kernel in KERNELS for first, last in SPANS]
    return table(["type", *spans], rows)

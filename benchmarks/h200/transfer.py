"""What a choice made on one landscape loses on another of the same problem: other kernel, other launch."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import numpy as np

from moetune.domain.landscape import read_landscape

if TYPE_CHECKING:
    import argparse

_FEWEST = 40
"""Configs that both landscapes hold, below which a rank says little."""


def transfer(arguments: argparse.Namespace) -> int:
    """Rank correlation of the times, and what the best of the first reaches in the second."""
    first, second = (read_landscape(path) for path in (arguments.first, arguments.second))
    ranks, regrets = [], []
    for key in sorted(first.times_us.keys() & second.times_us.keys()):
        here, there = first.times_us[key], second.times_us[key]
        pairs = [
            (us, other)
            for config, us in here.items()
            if us is not None and (other := there.get(config)) is not None
        ]
        if len(pairs) < _FEWEST:
            continue
        a, b = (np.array(values) for values in zip(*pairs, strict=True))
        order_a, order_b = (np.argsort(np.argsort(values)) for values in (a, b))
        ranks.append(float(np.corrcoef(order_a, order_b)[0, 1]))
        regrets.append(float(b[a.argmin()] / b.min()))
        print(
            f"{key[0]:4s} m={key[1]:5d}: {len(pairs)} configs, rank correlation {ranks[-1]:.3f},"
            f" the first one's best loses {regrets[-1] - 1:.2%}, median time second over first"
            f" {float(np.median(b / a)):.3f}"
        )
    if not ranks:
        print("no m with enough configs in both")
        return 1
    mean = math.exp(statistics.fmean(map(math.log, regrets))) - 1
    print(
        f"{len(ranks)} of kernel and m: rank correlation {statistics.median(ranks):.3f}"
        f" ({min(ranks):.3f} at worst), loss {mean:.2%}, at worst {max(regrets) - 1:.2%}"
    )
    return 0

"""Which recorded times to take again: what no kernel does, but a host or a board that was held up may.

On 2026-12-02, while 15 processes compiled, 2,664 of some 55,000 configs were doubtful in the senses below.
Timed again, with nothing else running and `measure.timing.Gapless`, their two passes differ by 1.0% in the
median, before by 11.5%; one had been recorded at 7.9 times what it takes (docs/findings.md, `held-up`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from moetune.domain.config import KernelConfig
from moetune.domain.features import FloatArray
from moetune.domain.predict import PerformanceModel
from training.dataset import Group
from training.recorder import config_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

PASSES_DIFFER = 0.06
"""Log of the second time over the first, off the median of all: that is what the routings change."""
ABOVE_ITS_LIKE = 1.2
"""Times the fastest of those that differ in GROUP_SIZE_M only."""
ABOVE_THE_MODEL, PROMISING = 1.2, 1.3
"""Times what the model says of a config; and times the best by the model up to which one is looked at."""


def passes_differ(group: Group) -> NDArray[np.bool_]:
    """Configs whose two times part more than the routings explain, `[n]`."""
    ratio = np.log(group.second_us / group.time_us)
    if np.isnan(ratio).all():
        return np.zeros(len(ratio), dtype=np.bool_)
    found: NDArray[np.bool_] = np.abs(ratio - np.nanmedian(ratio)) > PASSES_DIFFER
    return found


def above_their_like(group: Group) -> NDArray[np.bool_]:
    """Configs slower than others of the same tile, warps and stages, `[n]`."""
    least: dict[tuple[int, ...], float] = defaultdict(lambda: np.inf)
    kinds = [_without_group(config) for config in group.configs]
    for kind, time_us in zip(kinds, group.time_us.tolist(), strict=True):
        least[kind] = min(least[kind], time_us)
    found: NDArray[np.bool_] = group.time_us > ABOVE_ITS_LIKE * np.array([least[kind] for kind in kinds])
    return found


def slower_than_promised(group: Group, predicted_log: FloatArray) -> NDArray[np.bool_]:
    """Configs that the model has among the good ones, and that were not, `[n]`.

    Args:
        group: n recorded configs.
        predicted_log: `[n]` log of the predicted times over the floor.
    """
    promising = predicted_log - predicted_log.min() < np.log(PROMISING)
    above = np.log(group.time_us / group.floor_us) - predicted_log > np.log(ABOVE_THE_MODEL)
    found: NDArray[np.bool_] = promising & above
    return found


def doubtful(group: Group, predicted_log: FloatArray) -> list[KernelConfig]:
    """What to time again. A config that is slow without being timed twice may have been held up each time."""
    once = np.isnan(group.second_us)
    slow = above_their_like(group) | slower_than_promised(group, predicted_log)
    wanted = passes_differ(group) | (once & slow)
    return [config for config, is_wanted in zip(group.configs, wanted, strict=True) if is_wanted]


def named(groups: Iterable[Group], model: PerformanceModel) -> dict[str, dict[str, list[list[int]]]]:
    """The doubtful configs of groups with two passes, as `training.record measure --only` reads them."""
    found: dict[str, dict[str, list[list[int]]]] = defaultdict(dict)
    for group in groups:
        if np.isnan(group.second_us).all():
            continue
        inputs = ((group.features - model.mean) / model.scale).astype(np.float32)
        if configs := doubtful(group, model.time_head(inputs).mean(0)):
            name = group.landscape.removesuffix("_h200_own-kernel")
            found[name][f"{group.kernel} {group.m}"] = [config_values(config) for config in configs]
    return dict(found)


def _without_group(config: KernelConfig) -> tuple[int, ...]:
    values = config_values(config)
    return *values[:3], *values[4:]

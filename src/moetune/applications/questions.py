"""What a laboratory is asked besides the times of targets; what the journal knows is not asked again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.applications.targets import targets_of
from moetune.measure.protocol import (
    Checked,
    CheckTask,
    Failure,
    LayerPair,
    LayerTask,
    LayerTimed,
    Peaks,
    PeakTask,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.applications.measuring import Laboratory
    from moetune.applications.targets import Target
    from moetune.domain.choose import Pair


def time_layer(
    laboratory: Laboratory, m: int, pairs: Sequence[Pair], routing: str, rounds: int
) -> LayerTimed | None:
    """Time pairs through the whole layer, interleaved; None where they cannot be."""
    known = laboratory.known
    key = f"{m} {routing} " + " | ".join(f"{pair.up} {pair.down}" for pair in pairs)
    if key not in known.layers and not laboratory.sealed:
        binaries = []
        for pair in pairs:
            up, down = (laboratory.task_of(target) for target in targets_of(m, pair))
            if isinstance(up, str) or isinstance(down, str):
                return None
            binaries.append(LayerPair(up, down))
        if not laboratory.prepare(task for pair in binaries for task in (pair.up, pair.down)):
            return None
        (answer,) = laboratory.ask([LayerTask(m, tuple(binaries), routing, rounds, seed=laboratory.seed + 1)])
        if not isinstance(answer, LayerTimed):
            known.add_layer_failure(key, _message(answer))
            return None
        known.add_layer(key, answer)
    return known.layers.get(key)


def check_target(laboratory: Laboratory, target: Target) -> Checked | None:
    """Compare a config with the fp32 reference; None where it cannot be."""
    known = laboratory.known
    key = f"{target.kernel} {target.m} {target.config}" + (" sorted" if target.sorted_output else "")
    if key not in known.checks and not laboratory.sealed:
        task = laboratory.task_of(target)
        if isinstance(task, str) or not laboratory.prepare([task]):
            return None
        (answer,) = laboratory.ask([CheckTask(task, target.m, seed=laboratory.seed + 2)])
        if not isinstance(answer, Checked):
            why = f"while its numbers were checked it {_message(answer)}"
            laboratory.fail(target.kernel, target.config, why)
            return None
        known.add_check(key, answer)
    return known.checks.get(key)


def measure_peaks(laboratory: Laboratory) -> Peaks | None:
    """What the GPU can do; None where it cannot be measured."""
    known = laboratory.known
    if known.peaks is None and not laboratory.sealed:
        (answer,) = laboratory.ask([PeakTask()])
        if isinstance(answer, Peaks):
            known.add_peaks(answer)
    return known.peaks


def _message(answer: object) -> str:
    return answer.message if isinstance(answer, Failure) else str(answer)

"""Which GPUs' tuned files may serve another GPU: siblings, best first, never silently equal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moetune.domain.gpu import Gpu, load_registry, load_targets, whole_of


@dataclass(frozen=True, slots=True)
class Sibling:
    """A GPU whose tuned files may serve another one, after they were checked there.

    Attributes:
        gpu: the sibling.
        reason: what the two share, and where they differ.
        confidence: that its configs are near the best: `high`, `medium` or `low`.
    """

    gpu: Gpu
    reason: str
    confidence: str


def siblings(gpu: Gpu) -> tuple[Sibling, ...]:
    """GPUs of the registry whose tuned files are worth a look for this one, best first.

    Nearest is another edition of the same product, then the same compute capability, then an
    architecture with the same tensor-core instructions and no more shared memory; within each, by
    multiprocessors, bandwidth, rate, L2 and power. A family's name counts for nothing. A GPU of
    unknown architecture has no siblings, and a MIG slice only the GPU that it was cut from.
    """
    if gpu.mig_slice is not None:
        whole = whole_of(gpu)
        reason = "the whole GPU: more multiprocessors, L2 and bandwidth"
        return (Sibling(whole, reason, "low"),) if whole is not None else ()
    found = []
    for other in load_registry():
        kinship = None if other.torch_name == gpu.torch_name else _kinship(gpu, other)
        if kinship is not None:
            rank, shared = kinship
            distance, differences = _differences(gpu, other) if rank != _SAME_BOARD else (0.0, [])
            confidence = "low"
            if rank < _OTHER_TARGET and distance < 1:
                confidence = "medium"
            if rank < _SAME_TARGET and distance < 0.2:
                confidence = "high"
            found.append((rank, distance, Sibling(other, "; ".join([shared, *differences]), confidence)))
    return tuple(sibling for _, _, sibling in sorted(found, key=lambda entry: entry[:2]))


_SAME_BOARD, _SAME_PRODUCT, _SAME_TARGET, _OTHER_TARGET, _OTHER_TARGET_BF16 = range(5)


def _kinship(gpu: Gpu, other: Gpu) -> tuple[int, str] | None:
    """How two GPUs are related, nearest first; None where nothing can be borrowed."""
    if not gpu.target or not other.target:
        return None
    if replace(other, torch_name=gpu.torch_name) == gpu:
        return _SAME_BOARD, "the same board under another name"
    if gpu.target == other.target:
        if gpu.product == other.product:
            return _SAME_PRODUCT, f"the same product line, {gpu.product}"
        return _SAME_TARGET, f"the same architecture, {gpu.sm}"
    mine, theirs = load_targets().get(gpu.target), load_targets().get(other.target)
    if mine is None or theirs is None or theirs.smem_optin_bytes > mine.smem_optin_bytes:
        return None
    if not mine.bf16_dot or mine.bf16_dot != theirs.bf16_dot:
        return None
    shared = (
        f"another architecture, {other.sm}, with no more shared memory and the same tensor-core instructions"
    )
    if mine.fp8_dot == theirs.fp8_dot:
        return _OTHER_TARGET, shared
    return _OTHER_TARGET_BF16, f"{shared} for bf16 only"


_COMPARED = (
    ("sm_count", "multiprocessors", "", 1),
    ("mem_bw_gbps", "bandwidth", " GB/s", 1),
    ("bf16_dense_tflops", "bf16 rate", " TFLOPS", 1),
    ("l2_bytes", "L2", " MiB", 2**20),
    ("tdp_w", "power", " W", 1),
)


def _differences(gpu: Gpu, other: Gpu) -> tuple[float, list[str]]:
    """Distance of two GPUs, a sum of logarithms of ratios, and what differs by more than 2% in words."""
    distance, words, unknown = 0.0, [], []
    for field, label, unit, scale in _COMPARED:
        mine, theirs = getattr(gpu, field), getattr(other, field)
        if mine is None or theirs is None:
            # As far as a factor of 1.5: an unknown number must not look like an equal one.
            distance += math.log(1.5)
            unknown.append(label)
            continue
        step = abs(math.log(theirs / mine))
        distance += step
        if step > 0.02:
            words.append(f"{label} {theirs / scale:g} instead of {mine / scale:g}{unit}")
    if unknown:
        words.append(f"not known of both: {', '.join(unknown)}")
    return distance, words

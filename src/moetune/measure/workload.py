"""How weights are kept cold: which experts each launch of a graph touches, and in which copy.

In a server the weights of a layer are not in the L2 cache when its turn comes: all other layers were
there before. A graph that is replayed is a circle of launches, so the same weights come again. Here
experts are handed to the launches such that between two uses of the same weights at least three times
the L2 of other weights are touched; where a problem is too small for that, copies of its weights
rotate. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    import random

    from moetune.domain.problem import Kernel, Problem

COLD_FACTOR = 3
"""Bytes of other weights between two uses of the same weights, in sizes of the L2 (design.md, decision 2)."""

MAX_COPIES = 128
_COPIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_MAX_LAUNCHES = 2048
_MORE_LAUNCHES = 24
"""How much longer a circle may get until its end fits its beginning."""
_GRAPH_US = 400.0
"""What a graph has to take at least: an event is off by a microsecond."""
_FAST_BYTES_PER_US = 4e6
"""A memory of 4 TB/s; with a slower one a graph takes longer than it would have to."""
_FEWEST_LAUNCHES = 4
_LAYERS = 2  # that hold temporaries: the one that runs before it is captured, and all graphs together
_OWN_BYTES = 1 << 30
"""For the CUDA context, compiled kernels, graphs, and what a reference needs of one expert."""


class NotColdError(MoetuneError):
    """Weights that cannot be kept out of the L2."""


@dataclass(frozen=True, slots=True)
class Circle:
    """The launches of a graph.

    Attributes:
        experts: for each launch the experts that it touches, ascending: tiles are sorted by expert.
        copies: launch i uses copy `i % copies` of the weights.
        reuse_bytes: least bytes of weights between two uses of the same weights.
    """

    experts: tuple[tuple[int, ...], ...]
    copies: int
    reuse_bytes: int


def least_launches(m: int, touched_bytes: float) -> int:
    """Launches in a graph: many where one is short, so that starting a graph costs each little.

    Args:
        m: tokens.
        touched_bytes: weights that a launch reads, which take their time whatever the config is.
    """
    few = 16 if m <= 64 else 8 if m <= 512 else _FEWEST_LAUNCHES
    long_enough = math.ceil(_GRAPH_US * _FAST_BYTES_PER_US / max(touched_bytes, 1.0))
    return min(few, max(long_enough, _FEWEST_LAUNCHES))


def reuse_touches(circle: Sequence[Sequence[int]], copies: int) -> int:
    """Experts touched between two uses of the same weights, the least over all, in an endless circle."""
    last: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int], int] = {}
    place, least = 0, 1 << 62
    for number, experts in enumerate(circle):
        for expert in experts:
            key = (number % copies, expert)
            if key in last:
                least = min(least, place - last[key] - 1)
            first.setdefault(key, place)
            last[key] = place
            place += 1
    # Around the end: launch 0 follows the last one.
    for key, at in first.items():
        least = min(least, place - last[key] + at - 1)
    return least


def ample_copies(experts: int, expert_bytes: int, l2_bytes: int) -> int:
    """Copies of the weights with which there is a circle at any m.

    Where launches touch d of E experts, those used longest ago, the least reuse is E - 2d as long as two
    launches have no expert in common, and d from then on: a third of E at worst.
    """
    return min(math.ceil(3 * COLD_FACTOR * l2_bytes / (experts * expert_bytes)), MAX_COPIES)


def spread_experts(counts: Sequence[int], experts: int, copies: int) -> list[tuple[int, ...]]:
    """For each launch the experts to touch: those whose weights were not used for longest.

    Args:
        counts: how many different experts each launch touches.
        experts: E.
        copies: as in `Circle`.
    """
    queues = [list(range(experts)) for _ in range(copies)]
    circle = []
    for number, count in enumerate(counts):
        ages = queues[number % copies]
        taken = sorted(ages[:count])
        queues[number % copies] = ages[count:] + taken
        circle.append(tuple(taken))
    return circle


def plan_circle(
    counts: Sequence[int],
    experts: int,
    expert_bytes: int,
    l2_bytes: int,
    least: int,
    most_copies: int = MAX_COPIES,
) -> Circle:
    """The shortest circle with the fewest copies that keeps the weights cold.

    Args:
        counts: how many different experts a launch touches, for as many launches as can be asked for
            (repeated when there are not enough).
        experts: E.
        expert_bytes: weights of one expert in one kernel.
        l2_bytes: of the GPU.
        least: launches at least.
        most_copies: copies of the weights that there is room for.

    Raises:
        NotColdError: when there is no such circle.
    """
    needed = COLD_FACTOR * l2_bytes
    typical = max(sum(counts) / len(counts), 1.0)
    if max(counts) == 0:
        return Circle(((),) * least, 1, needed)  # an expert-parallel rank without work touches nothing
    for copies in (*(number for number in _COPIES if number < most_copies), most_copies):
        start = max(least, math.ceil(needed / (typical * expert_bytes)) + 1, copies)
        for launches in range(-(-start // copies) * copies, start + _MORE_LAUNCHES * copies, copies):
            if launches > _MAX_LAUNCHES:
                break
            taken = [counts[number % len(counts)] for number in range(launches)]
            circle = spread_experts(taken, experts, copies)
            reuse = reuse_touches(circle, copies) * expert_bytes
            if reuse >= needed:
                return Circle(tuple(circle), copies, reuse)
    raise NotColdError(
        f"the weights of {experts} experts of {expert_bytes:,} bytes cannot be kept out of an L2 of "
        f"{l2_bytes:,} bytes"
    )


def relabelled(distinct: Sequence[int], targets: Sequence[int], rng: random.Random) -> dict[int, int]:
    """Which expert takes the place of which: a random matching, so that no expert is the busy one."""
    shuffled = list(targets)
    rng.shuffle(shuffled)
    return dict(zip(distinct, shuffled, strict=True))


def expert_bytes(problem: Problem, kernel: Kernel) -> int:
    """Weights of one expert in one kernel, scales left out."""
    gemm = problem.gemm(kernel)
    return gemm.n * gemm.k * problem.quantization.dtype.weight_bits // 8


def needed_bytes(problem: Problem, largest_m: int, up_copies: int, down_copies: int) -> int:
    """GPU memory that measuring a problem takes at most, before any of it is allocated."""
    slots = largest_m * problem.topk
    up, down = problem.gemm("up"), problem.gemm("down")
    weights = problem.E * (
        up_copies * expert_bytes(problem, "up") + down_copies * expert_bytes(problem, "down")
    )
    scales = weights // 64 if problem.quantization.block_shape else 0
    activations = 4 * largest_m * problem.K + 4 * slots * problem.N
    outputs = 2 * slots * up.n + 2 * slots * down.n
    # The layer's own temporaries: activation in and out, quantization, sum; and an fp32 reference.
    temporaries = _LAYERS * (4 * slots * (up.n + down.n) + 16 * slots * problem.N)
    return weights + scales + activations + outputs + temporaries + _OWN_BYTES

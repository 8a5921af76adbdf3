"""What a recording says of the load of experts, and what it costs in blocks against uniform routing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetune.domain.features import expected_blocks
from moetune.domain.recording import IntArray, RecordedLayer, Recording
from moetune.domain.synthetic_routing import LARGEST_SKEW, draw_ids

FloatArray = NDArray[np.float64]

USUAL_MS = (16, 64, 256, 1024, 4096)
USUAL_BLOCKS = (16, 64, 128)
_WINDOWS = 32
"""Stretches of m tokens of a layer that are counted, spread evenly over it."""
_SKEWS = (*(0.15 * step for step in range(20)), 3.0, 4.0, 5.0, 6.0, 7.0, LARGEST_SKEW)
_DRAWN = 4096
_MOST_FITTED = 4096  # experts
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Blocks:
    """What calls of m tokens cost.

    Attributes:
        m: tokens.
        block_m: BLOCK_SIZE_M.
        blocks: blocks that hold rows, the mean over stretches of m tokens of the recording.
        uniform: the expectation under uniform routing.
    """

    m: int
    block_m: int
    blocks: float
    uniform: float

    @property
    def ratio(self) -> float:
        """Blocks over those of uniform routing: below 1 skewed tokens share experts, and weights."""
        return self.blocks / self.uniform


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """One layer.

    Attributes:
        number: of the layer.
        tokens: None where only counts are known.
        calls: calls, or forward passes.
        slots: tokens times experts of each, as far as they have one here.
        balance: mean over maximum of the experts' loads: 1 is even.
        rank_balance: the same of the ranks' loads, the mean over calls, as SGLang reports it; None without
            expert parallelism.
        variation: standard deviation over mean of the experts' loads.
        uniform_variation: what uniform routing of as many tokens would show of it; None without tokens.
        busiest: load of the busiest expert over the mean.
        never_hit: experts that no token went to.
        exponent: of Zipf's law, fitted; None where it cannot be.
        blocks: for each m and BLOCK_SIZE_M; empty where only counts are known.
    """

    number: int
    tokens: int | None
    calls: int
    slots: int
    balance: float
    rank_balance: float | None
    variation: float
    uniform_variation: float | None
    busiest: float
    never_hit: int
    exponent: float | None
    blocks: tuple[Blocks, ...]


def balance(loads: NDArray[np.number[Any]]) -> FloatArray:
    """Mean over maximum along the last axis: 1 is even, one over the number of loads is all on one.

    The small number that is added to both is SGLang's, which makes idle layers even (sglang 0.5.23 wheel,
    srt/eplb/expert_distribution.py:compute_utilization_rate).
    """
    rates: FloatArray = (loads.mean(axis=-1) + _EPSILON) / (loads.max(axis=-1) + _EPSILON)
    return rates


def rank_balance(loads_of_calls: IntArray, ranks: int) -> float:
    """The balance of the ranks' loads, the mean over calls in which there was anything to do."""
    calls, experts = loads_of_calls.shape
    by_rank = loads_of_calls.reshape(calls, ranks, experts // ranks).sum(axis=-1)
    busy = by_rank[by_rank.sum(axis=-1) > 0]
    return float(balance(busy).mean()) if len(busy) else 1.0


def variation(loads: IntArray) -> float:
    """Standard deviation over mean."""
    mean = loads.mean()
    return float(loads.std() / mean) if mean else 0.0


def uniform_variation(tokens: int, share: float) -> float:
    """The variation that uniform routing shows by chance: loads are binomial.

    Args:
        tokens: tokens.
        share: probability that a token goes to one given expert, topk over all experts.
    """
    return math.sqrt(max(1.0 - share, 0.0) / (tokens * share)) if tokens else 0.0


@lru_cache(maxsize=16)
def _moments(experts: int, topk: int) -> tuple[FloatArray, FloatArray]:
    """For each skew the variance of the experts' shares, and the mean of share * (1 - share)."""
    spreads, chances = [], []
    for skew in _SKEWS:
        # The same numbers for every skew: what is compared differs by nothing else.
        ids = draw_ids(_DRAWN, experts, topk, skew, np.random.default_rng(0), shuffled=False)
        shares = np.bincount(ids.reshape(-1), minlength=experts) / _DRAWN
        chance = float((shares * (1 - shares)).mean())
        spreads.append(float(shares.var()) - chance / _DRAWN)
        chances.append(chance)
    return np.maximum.accumulate(np.array(spreads)), np.array(chances)


def fit_exponent(loads: IntArray, tokens: int, topk: int) -> float:
    """The exponent of Zipf's law whose draws vary as much as these loads do.

    Draws are without replacement, as `zipf:S` means them, and what varies by chance in so many tokens is
    accounted for: uniform routing gives about 0 however few tokens there are.

    Args:
        loads: `[experts]`, tokens that went to each.
        tokens: tokens.
        topk: experts of a token.
    """
    spreads, chances = _moments(len(loads), topk)
    excess = spreads + chances / tokens
    found = float((loads / tokens).var())
    rising = np.maximum.accumulate(excess)
    return float(np.interp(found, rising, _SKEWS))


def count_blocks(layer: RecordedLayer, experts: int, m: int, block_ms: Sequence[int]) -> list[float]:
    """Blocks that stretches of m tokens of a layer fill, the mean, for each BLOCK_SIZE_M."""
    assert layer.ids is not None
    rows = len(layer.ids)
    windows = min(_WINDOWS, rows // m)
    starts = np.linspace(0, rows - m, windows).astype(np.int64)
    ids = layer.ids[starts[:, None] + np.arange(m)].reshape(windows, -1).astype(np.int64)
    places = np.where(ids >= 0, np.arange(windows)[:, None] * experts + ids, windows * experts)
    counts = np.bincount(places.reshape(-1), minlength=windows * experts + 1)[: windows * experts]
    return [float((-(-counts // block_m)).sum() / windows) for block_m in block_ms]


def layer_statistics(
    layer: RecordedLayer,
    experts: int,
    topk: int | None,
    *,
    global_experts: int | None = None,
    ms: Sequence[int] = USUAL_MS,
    block_ms: Sequence[int] = USUAL_BLOCKS,
    ranks: int = 1,
) -> LayerStatistics:
    """All that is said of one layer.

    Args:
        layer: the layer.
        experts: experts that its numbers mean.
        topk: experts of a token; None where it is not known.
        global_experts: over all ranks, where the layer is what one rank sees; None: these are all.
        ms: tokens of a call to count blocks for; those that the layer lacks are left out.
        block_ms: BLOCK_SIZE_M to count blocks for.
        ranks: of expert parallelism, for their balance.
    """
    calls = len(layer.calls) if layer.counts is None else len(layer.counts)
    loads = layer.loads(experts)
    slots = int(loads.sum())
    everywhere = global_experts or experts
    tokens = layer.tokens
    if tokens is None and topk:
        tokens = slots // topk
    whole = everywhere == experts
    share = topk / everywhere if topk else None
    blocks: tuple[Blocks, ...] = ()
    if layer.ids is not None and share is not None:
        blocks = tuple(
            Blocks(m, block_m, found, experts * expected_blocks(m, share, block_m))
            for m in ms
            if m <= len(layer.ids)
            for block_m, found in zip(block_ms, count_blocks(layer, experts, m, block_ms), strict=True)
        )
    mean = slots / experts
    fits = whole and tokens and topk and topk < experts <= _MOST_FITTED
    return LayerStatistics(
        number=layer.number,
        tokens=layer.tokens,
        calls=calls,
        slots=slots,
        balance=float(balance(loads)),
        rank_balance=rank_balance(layer.loads_of_calls(experts), ranks) if whole and ranks > 1 else None,
        variation=variation(loads),
        uniform_variation=uniform_variation(tokens, share) if tokens and share else None,
        busiest=float(loads.max() / mean) if mean else 0.0,
        never_hit=int((loads == 0).sum()),
        exponent=fit_exponent(loads, tokens or 0, topk or 0) if fits else None,
        blocks=blocks,
    )


def fewest_tokens(recording: Recording) -> int | None:
    """Tokens of the layer that has the fewest; None where only counts are known."""
    tokens = [layer.tokens for layer in recording.layers]
    known = [count for count in tokens if count is not None]
    return min(known) if known and len(known) == len(tokens) else None

"""Routings that follow a law: uniform, or skewed by Zipf's law, and recordings made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moetune.domain.errors import InputError
from moetune.domain.recording import (
    MAX_EXPERTS,
    MAX_IDS,
    MAX_LAYERS,
    MAX_TOPK,
    IdArray,
    RecordedLayer,
    Recording,
)
from moetune.domain.text import printable

LARGEST_SKEW = 8.0
_SCORES = 1 << 21  # at a time


def skew_of(routing: str) -> float:
    """The exponent of a routing: 0 for `uniform`, S for `zipf:S`.

    Raises:
        InputError: for another word.
    """
    name, _, exponent = routing.partition(":")
    try:
        if name == "uniform" and not exponent:
            return 0.0
        if name == "zipf" and 0 <= float(exponent) <= LARGEST_SKEW:
            return float(exponent)
    except ValueError:
        pass
    raise InputError(
        f"{printable(routing, 40)!r} is no routing", "give `uniform` or `zipf:S`, as in zipf:1.2"
    )


def law_name(skew: float) -> str:
    """The one name of a law: the same skew gives the same problem."""
    return f"zipf:{skew:g}" if skew else "uniform"


def draw_ids(
    tokens: int, experts: int, topk: int, skew: float, rng: np.random.Generator, *, shuffled: bool = True
) -> IdArray:
    """Draw the experts of tokens, each token's different from one another.

    Args:
        tokens: how many.
        experts: global experts.
        topk: experts of a token.
        skew: Zipf's exponent; 0 is uniform.
        rng: decides.
        shuffled: which experts are popular is drawn too; otherwise expert 0 is the most popular one.

    Returns:
        `[tokens, topk]`, by descending score as a router gives them.
    """
    rank = (rng.permutation(experts) if shuffled else np.arange(experts)) + 1
    popularity = -skew * np.log(rank)
    parts = []
    step = max(_SCORES // experts, 1)
    for start in range(0, tokens, step):
        rows = min(step, tokens - start)
        # Gumbel noise: the largest few are a draw without replacement by the weights.
        scores = popularity + rng.gumbel(size=(rows, experts))
        best = np.argpartition(scores, experts - topk, axis=1)[:, experts - topk :]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        parts.append(np.take_along_axis(best, order, axis=1).astype(np.int32))
    return np.concatenate(parts)


def synthetic_recording(
    layers: Sequence[int], tokens: int, calls: int, experts: int, topk: int, skew: float, seed: int
) -> Recording:
    """A recording that follows a law; the experts that are popular differ by layer.

    Args:
        layers: numbers of the layers with experts.
        tokens: of each call.
        calls: of each layer.
        experts: global experts.
        topk: experts of a token.
        skew: Zipf's exponent.
        seed: of all that is drawn.

    Raises:
        InputError: for sizes that make no recording, or one that is too large.
    """
    ranges = {
        "experts": (experts, 1, MAX_EXPERTS),
        "topk": (topk, 1, min(MAX_TOPK, experts)),
        "tokens": (tokens, 1, 1 << 22),
        "calls": (calls, 1, 1 << 16),
        "layers": (len(layers), 1, MAX_LAYERS),
        "the highest layer": (max(layers, default=0), 0, MAX_LAYERS - 1),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise InputError(f"{name} is {value}, not a whole number from {least} to {most}")
    size = len(layers) * calls * tokens * topk
    if size > MAX_IDS:
        raise InputError(
            f"that makes {size:,} numbers of experts, {MAX_IDS:,} at most are kept", "ask for fewer tokens"
        )
    found = []
    for number in layers:
        rng = np.random.default_rng([seed, number])
        ids = draw_ids(calls * tokens, experts, topk, skew, rng)
        found.append(RecordedLayer(number, ids, (tokens,) * calls))
    return Recording("synthetic", experts, True, tuple(found))

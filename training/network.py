"""Fits the ensembles of the performance model with torch: all networks of a head at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moetune.domain.features import FEATURES
from moetune.domain.predict import Ensemble, Ground, PerformanceModel, dtype_tag, shape_of
from training.dataset import Group
from training.published import Contest

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is fitted.

    Attributes:
        hidden: width of both hidden layers.
        members: networks of the ensemble, from different first weights.
        steps: batches.
        published_weight: of the loss over published winners; 0 fits the time head.
        temperature: by how much (log time) a winner stands out.
        shape_noise: jitter common to a group of configs, so that no single shape is learned by heart.
    """

    hidden: int = 64
    members: int = 8
    steps: int = 2000
    published_weight: float = 0.0
    temperature: float = 0.05
    learning_rate: float = 4e-3
    weight_decay: float = 3e-3
    shape_noise: float = 0.025


TIME = Recipe(steps=4000)
WINNER = Recipe(members=4, steps=1200, published_weight=3.0, weight_decay=1e-2)
NEAREST_TO_FLOOR = 0.05
"""Log of a time over the floor, below which nothing was measured: bandwidth and rates are the datasheets'."""
FLOOR_WEIGHT = 100.0
_GROUPS, _CONFIGS, _CONTESTS = 24, 96, 64
_NEAR_BEST = 64
_RANK_WEIGHT, _RANK_TEMPERATURE = 0.3, 0.06


def scaling(groups: Sequence[Group], contests: Sequence[Contest]) -> tuple[FloatArray, FloatArray]:
    """Mean and scale of the features, `[F]` each."""
    rows = [group.features[::4] for group in groups] + [
        c.features.reshape(-1, len(FEATURES))[::7] for c in contests
    ]
    matrix = np.concatenate(rows)
    return matrix.mean(0), matrix.std(0) + 1e-3


def log_times(group: Group) -> FloatArray:
    """Log of the times over the floor, `[n]`: the mean of both passes where there are two."""
    first = np.log(group.time_us / group.floor_us)
    second = np.log(group.second_us / group.floor_us)
    mean: FloatArray = np.where(np.isnan(second), first, (first + second) / 2)
    return mean


class Sampler:
    """Batches: configs of landscapes, each shape as often as any other, half of them near the best."""

    def __init__(
        self, groups: Sequence[Group], contests: Sequence[Contest], mean: FloatArray, scale: FloatArray
    ) -> None:
        def tensor(matrix: FloatArray) -> Any:
            return torch.tensor((matrix - mean) / scale, dtype=torch.float32)

        targets = [log_times(group) for group in groups]
        self.inputs = tensor(np.concatenate([group.features for group in groups]))
        self.targets = torch.tensor(np.concatenate(targets), dtype=torch.float32)
        self._counts = np.array([len(target) for target in targets])
        self._starts = np.cumsum(self._counts) - self._counts
        self._near = [
            np.argsort(target)[:_NEAR_BEST] + start
            for target, start in zip(targets, self._starts, strict=True)
        ]
        kinds = [(group.shape, group.dtype) for group in groups]
        often = Counter(kinds)
        share = np.array([1.0 / often[kind] for kind in kinds])
        self._share = share / share.sum()
        widest = max((c.features.shape[1] for c in contests), default=0)
        kept = [c for c in contests if c.features.shape[1] == widest]
        if kept:
            self.contest_inputs = tensor(np.stack([c.features for c in kept]))
            self.contest_floors = torch.tensor(np.stack([c.floor_us for c in kept]), dtype=torch.float32)
            families = [c.entry.family for c in kept]
            rarity = np.array([1.0 / np.sqrt(families.count(family)) for family in families])
            self._contest_share = rarity / rarity.sum()

    def landscape_batch(self, rng: np.random.Generator) -> tuple[Any, Any]:
        """`[groups, configs, F]` inputs and `[groups, configs]` log times over the floor."""
        half = _CONFIGS // 2
        rows = np.empty((_GROUPS, _CONFIGS), dtype=np.int64)
        for row, place in zip(rows, rng.choice(len(self._counts), _GROUPS, p=self._share), strict=True):
            near = self._near[place]
            row[:half] = near[rng.integers(0, len(near), half)]
            row[half:] = self._starts[place] + rng.integers(0, self._counts[place], half)
        return self.inputs[rows], self.targets[rows]

    def contest_batch(self, rng: np.random.Generator) -> tuple[Any, Any]:
        """`[contests, 2, n, F]` inputs of both kernels, the winner first, and `[contests, 2]` floors."""
        picked = rng.choice(len(self._contest_share), _CONTESTS, p=self._contest_share)
        return self.contest_inputs[picked], self.contest_floors[picked]


class Networks:
    """As many networks of two hidden layers as an ensemble has members, side by side."""

    def __init__(self, members: int, hidden: int) -> None:
        self.members = members
        sizes = (len(FEATURES), hidden, hidden, 1)
        self.parameters = [
            nn.Parameter((2 * torch.rand(members, rows, wide) - 1) / math.sqrt(narrow))
            for narrow, wide in pairwise(sizes)
            for rows in (narrow, 1)
        ]

    def __call__(self, inputs: Any) -> Any:
        """`[members, ..., F]` inputs to `[members, ...]` answers."""
        w1, b1, w2, b2, w3, b3 = self.parameters
        hidden = inputs.reshape(self.members, -1, inputs.shape[-1])
        hidden = torch.relu(torch.baddbmm(b1, hidden, w1))
        hidden = torch.relu(torch.baddbmm(b2, hidden, w2))
        return torch.baddbmm(b3, hidden, w3).reshape(inputs.shape[:-1])

    def jittered(self, inputs: Any, noise: float, dimensions: int) -> Any:
        """Inputs for each member, with a jitter that all configs of a group share."""
        shape = (self.members, inputs.shape[0], *([1] * dimensions), inputs.shape[-1])
        return inputs[None] + noise * torch.randn(shape)


def _landscape_loss(answers: Any, targets: Any, *, ranked: bool) -> Any:
    """Of each member, summed: `[members, groups, configs]` answers, `[groups, configs]` targets."""
    huber = nn.functional.smooth_l1_loss
    wanted = targets.expand_as(answers)
    # What is near the best decides; the far ones only have to stay far.
    behind = targets - targets.min(1, keepdim=True).values
    weight = torch.exp(-2 * behind.clamp(max=2)) + 0.05
    within = huber(
        answers - answers.mean(2, keepdim=True),
        wanted - wanted.mean(2, keepdim=True),
        reduction="none",
        beta=0.1,
    )
    loss = (weight * (huber(answers, wanted, reduction="none", beta=0.1) + 2 * within)).mean((1, 2)).sum()
    if not ranked:
        return loss
    ranking = nn.functional.kl_div(
        torch.log_softmax(-answers / _RANK_TEMPERATURE, 2),
        torch.softmax(-wanted / _RANK_TEMPERATURE, 2),
        reduction="none",
    )
    return loss + _RANK_WEIGHT * ranking.sum(2).mean(1).sum()


def _contest_loss(over_floor: Any, floors: Any, recipe: Recipe) -> Any:
    """Of each member, summed: `[members, contests, 2, n]` answers, `[contests, 2]` floors."""
    there = floors[None, :, :, None]
    times = there * torch.exp(over_floor.clamp(-3, 5))
    total = torch.log(times.sum(2) + 1e-6)
    count = total.shape[0]
    first = torch.zeros(count * _CONTESTS, dtype=torch.long)
    loss = count * nn.functional.cross_entropy(
        -total.reshape(count * _CONTESTS, -1) / recipe.temperature, first, label_smoothing=0.02
    )
    # A rank alone would let times sink below the roofline, where no GPU is.
    under = torch.relu(NEAREST_TO_FLOOR - over_floor) * (there > 0)
    return recipe.published_weight * loss + FLOOR_WEIGHT * under.square().mean((1, 2, 3)).sum()


def fit(sampler: Sampler, recipe: Recipe, seed: int) -> Ensemble:
    """Fit the networks of a head."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    networks = Networks(recipe.members, recipe.hidden)
    optimiser = torch.optim.AdamW(
        networks.parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    for _ in range(recipe.steps):
        inputs, targets = sampler.landscape_batch(rng)
        answers = networks(networks.jittered(inputs, recipe.shape_noise, 1))
        loss = _landscape_loss(answers, targets, ranked=not recipe.published_weight)
        if recipe.published_weight:
            contest, floors = sampler.contest_batch(rng)
            over_floor = networks(networks.jittered(contest, 2 * recipe.shape_noise, 2))
            loss = loss + _contest_loss(over_floor, floors, recipe)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return _ensemble(networks, seen_range(sampler, contests=bool(recipe.published_weight)))


def seen_range(sampler: Sampler, *, contests: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Smallest and largest input of each feature, `[F]` each."""
    seen = [sampler.inputs]
    if contests:
        seen.append(sampler.contest_inputs.reshape(-1, len(FEATURES)))
    low = torch.stack([matrix.min(0).values for matrix in seen]).min(0).values
    high = torch.stack([matrix.max(0).values for matrix in seen]).max(0).values
    return low.numpy(), high.numpy()


def _ensemble(networks: Networks, seen: tuple[NDArray[np.float32], NDArray[np.float32]]) -> Ensemble:
    """Networks as the arrays that the package evaluates, in the half precision in which they ship."""
    w1, b1, w2, b2, w3, b3 = (
        parameter.detach().numpy().astype(np.float16).astype(np.float32) for parameter in networks.parameters
    )
    return Ensemble(
        np.concatenate(list(w1), axis=1), b1.reshape(-1), w2, b2, w3[:, :, 0], b3.reshape(-1, 1), *seen
    )


def ground_of(groups: Sequence[Group]) -> Ground:
    """What the landscapes cover, each problem once."""
    problems = list({(group.shape, group.dtype): group.problem for group in groups}.values())
    return Ground(
        np.stack([shape_of(problem) for problem in problems]),
        tuple(dtype_tag(problem) for problem in problems),
        tuple(problem.gpu.torch_name for problem in problems),
        tuple(".".join(map(str, problem.gpu.compute_capability or ())) for problem in problems),
    )


def fit_model(
    groups: Sequence[Group],
    contests: Sequence[Contest],
    *,
    time: Recipe = TIME,
    winner: Recipe = WINNER,
    seed: int = 0,
) -> PerformanceModel:
    """Fit both heads."""
    mean, scale = scaling(groups, contests)
    sampler = Sampler(groups, contests, mean, scale)
    time_head = fit(sampler, time, seed)
    winner_head = fit(sampler, winner, seed + 100)
    return PerformanceModel(mean, scale, time_head, winner_head, ground_of(groups))

"""Fits the ensembles of the performance model with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        members: networks of the ensemble, from different seeds.
        steps: batches.
        published_weight: of the loss over published winners; 0 fits the time head.
        temperature: by how much (log time) a winner stands out.
        shape_noise: jitter common to a group of configs, so that no single shape is learned by heart.
    """

    hidden: int = 64
    members: int = 4
    steps: int = 2000
    published_weight: float = 0.0
    temperature: float = 0.05
    learning_rate: float = 4e-3
    weight_decay: float = 3e-3
    shape_noise: float = 0.025


TIME = Recipe()
WINNER = Recipe(members=4, steps=1200, published_weight=3.0, weight_decay=1e-2)
NEAREST_TO_FLOOR = 0.05
"""Log of a time over the floor, below which nothing was measured: bandwidth and rates are the datasheets'."""
FLOOR_WEIGHT = 100.0
_GROUPS, _CONFIGS, _CONTESTS = 24, 96, 64


def scaling(groups: Sequence[Group], contests: Sequence[Contest]) -> tuple[FloatArray, FloatArray]:
    """Mean and scale of the features, `[F]` each."""
    rows = [group.features[::4] for group in groups] + [
        c.features.reshape(-1, len(FEATURES))[::7] for c in contests
    ]
    matrix = np.concatenate(rows)
    return matrix.mean(0), matrix.std(0) + 1e-3


class Sampler:
    """Batches: configs of landscapes, each shape as often as any other, half of them near the best."""

    def __init__(
        self, groups: Sequence[Group], contests: Sequence[Contest], mean: FloatArray, scale: FloatArray
    ) -> None:
        def tensor(matrix: FloatArray) -> Any:
            return torch.tensor((matrix - mean) / scale, dtype=torch.float32)

        self.inputs = [tensor(group.features) for group in groups]
        self.targets = [
            torch.tensor(np.log(group.time_us / group.floor_us), dtype=torch.float32) for group in groups
        ]
        self.order = [np.argsort(group.time_us) for group in groups]
        kinds = [(group.shape, group.dtype) for group in groups]
        share = np.array([1.0 / kinds.count(kind) for kind in kinds])
        self.group_share = share / share.sum()
        widest = max((c.features.shape[1] for c in contests), default=0)
        kept = [c for c in contests if c.features.shape[1] == widest]
        if kept:
            self.contest_inputs = tensor(np.stack([c.features for c in kept]))
            self.contest_floors = torch.tensor(np.stack([c.floor_us for c in kept]), dtype=torch.float32)
            families = [c.entry.family for c in kept]
            rarity = np.array([1.0 / np.sqrt(families.count(family)) for family in families])
            self.contest_share = rarity / rarity.sum()

    def landscape_batch(self, rng: np.random.Generator) -> tuple[Any, Any]:
        """`[groups, configs, F]` inputs and `[groups, configs]` log times over the floor."""
        inputs, targets = [], []
        for place in rng.choice(len(self.inputs), _GROUPS, p=self.group_share):
            count = len(self.order[place])
            near = self.order[place][: min(count, 64)]
            half = _CONFIGS // 2
            picked = np.concatenate([rng.choice(near, half), rng.choice(count, half)])
            inputs.append(self.inputs[place][picked])
            targets.append(self.targets[place][picked])
        return torch.stack(inputs), torch.stack(targets)


def _network(features: int, hidden: int) -> Any:
    return nn.Sequential(
        nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def fit(sampler: Sampler, recipe: Recipe, seed: int) -> Any:
    """Fit one network."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    size = len(FEATURES)
    network = _network(size, recipe.hidden)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    huber = nn.functional.smooth_l1_loss
    for _ in range(recipe.steps):
        inputs, targets = sampler.landscape_batch(rng)
        inputs = inputs + recipe.shape_noise * torch.randn(_GROUPS, 1, size)
        answers = network(inputs).squeeze(-1)
        # What is near the best decides; the far ones only have to stay far.
        behind = targets - targets.min(1, keepdim=True).values
        weight = torch.exp(-2 * behind.clamp(max=2)) + 0.05
        within = huber(
            answers - answers.mean(1, keepdim=True),
            targets - targets.mean(1, keepdim=True),
            reduction="none",
            beta=0.1,
        )
        loss = (weight * (huber(answers, targets, reduction="none", beta=0.1) + 2 * within)).mean()
        if not recipe.published_weight:
            tau = 0.06
            ranking = nn.functional.kl_div(
                torch.log_softmax(-answers / tau, 1), torch.softmax(-targets / tau, 1), reduction="batchmean"
            )
            loss = loss + 0.3 * ranking
        else:
            picked = rng.choice(len(sampler.contest_share), _CONTESTS, p=sampler.contest_share)
            contest = sampler.contest_inputs[picked] + 2 * recipe.shape_noise * torch.randn(
                _CONTESTS, 1, 1, size
            )
            over_floor = network(contest).squeeze(-1)
            times = sampler.contest_floors[picked][:, :, None] * torch.exp(over_floor.clamp(-3, 5))
            total = torch.log(times.sum(1) + 1e-6)
            first = torch.zeros(_CONTESTS, dtype=torch.long)
            loss = loss + recipe.published_weight * nn.functional.cross_entropy(
                -total / recipe.temperature, first, label_smoothing=0.02
            )
            # A rank alone would let times sink below the roofline, where no GPU is.
            under = torch.relu(NEAREST_TO_FLOOR - over_floor) * (
                sampler.contest_floors[picked][:, :, None] > 0
            )
            loss = loss + FLOOR_WEIGHT * under.square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return network.eval()


def seen_range(sampler: Sampler, *, contests: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Smallest and largest input of each feature, `[F]` each."""
    seen = list(sampler.inputs)
    if contests:
        seen.append(sampler.contest_inputs.reshape(-1, len(FEATURES)))
    low = torch.stack([matrix.min(0).values for matrix in seen]).min(0).values
    high = torch.stack([matrix.max(0).values for matrix in seen]).max(0).values
    return low.numpy(), high.numpy()


def ensemble(networks: Sequence[Any], seen: tuple[NDArray[np.float32], NDArray[np.float32]]) -> Ensemble:
    """Networks as the arrays that the package evaluates."""
    layers = [[p.detach().numpy() for p in network.parameters()] for network in networks]
    return Ensemble(
        np.concatenate([w1.T for w1, *_ in layers], axis=1),
        np.concatenate([b1 for _, b1, *_ in layers]),
        np.stack([layer[2].T for layer in layers]),
        np.stack([layer[3][None] for layer in layers]),
        np.stack([layer[4][0] for layer in layers]),
        np.stack([layer[5] for layer in layers]),
        *seen,
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
    times = [fit(sampler, time, seed + member) for member in range(time.members)]
    winners = [fit(sampler, winner, seed + 100 + member) for member in range(winner.members)]
    time_head = ensemble(times, seen_range(sampler, contests=False))
    winner_head = ensemble(winners, seen_range(sampler, contests=True))
    return PerformanceModel(mean, scale, time_head, winner_head, ground_of(groups))

"""What the performance model is trained on and judged by, and that what ships is what was trained."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from training.dataset import OWN_KERNEL, Group, launches_of, load_landscapes

from moetune.domain.features import FEATURES
from moetune.domain.predict import dtype_tag
from moetune.domain.quantization import Dtype, Quantization
from tests.generators import problem, random_configs
from training import network

if TYPE_CHECKING:
    from moetune.domain.landscape import Landscape

EVERY = np.ones(6, dtype=np.bool_)


def group(times: list[float], second: list[float] | None = None, seed: int = 0) -> Group:
    rng = np.random.default_rng(seed)
    count = len(times)
    return Group(
        "made up",
        (seed, 1, 1),
        "bf16",
        problem(),
        "up",
        64,
        tuple(random_configs(count, seed)),
        rng.normal(size=(count, len(FEATURES))),
        5.0,
        np.array(times),
        np.array(second or [np.nan] * count),
    )


def test_the_best_is_chosen_on_one_pass_and_judged_on_the_other() -> None:
    # The first looked best by luck: on the second pass it is 10% slower than the second one.
    found = group([10.0, 10.1, 20.0, 30.0, 40.0, 50.0], [11.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    assert found.shares(EVERY, [0, 1, 2]) == pytest.approx([1.0, 1.1, 11 / 20])


def test_what_one_pass_alone_has_is_judged_on_that() -> None:
    found = group([10.0, 12.0, 20.0, 30.0, 40.0, 50.0], [10.0, 12.5, *[np.nan] * 4])
    assert found.shares(EVERY, [1, 2]) == pytest.approx([10 / 12.5, 0.5])
    assert group([10.0, 12.0, 20.0, 30.0, 40.0, 50.0]).shares(EVERY, [1]) == pytest.approx([10 / 12])


def test_only_what_is_inside_counts() -> None:
    inside = np.array([False, True, True, True, True, True])
    found = group([1.0, 12.0, 24.0, 30.0, 40.0, 50.0])
    assert found.shares(inside, [0, 1]) == pytest.approx([1.0, 0.5])


def test_targets_are_the_mean_of_both_passes() -> None:
    found = group([5.0, 10.0, 20.0, 30.0, 40.0, 50.0], [5.0, 40.0, *[np.nan] * 4])
    assert np.exp(network.log_times(found)[:3]) == pytest.approx([1.0, 4.0, 4.0])


def test_a_batch_holds_configs_of_one_group_a_row_and_half_of_them_near_its_best() -> None:
    slow, fast = (list(np.linspace(low, 2 * low, 300)) for low in (500.0, 10.0))
    sampler = network.Sampler(
        [group(slow, seed=1), group(fast, seed=2)], [], np.zeros(len(FEATURES)), np.ones(len(FEATURES))
    )
    _, targets = sampler.landscape_batch(np.random.default_rng(0))
    times = 5.0 * torch.exp(targets)
    assert ((times > 400).all(1) | (times < 30).all(1)).all()
    assert (times > 400).all(1).any()
    assert (times < 30).all(1).any()
    over_best = times / times.min(1, keepdim=True).values
    half = over_best.shape[1] // 2
    # 64 of 300 are near: up to a fifth slower than the best.
    assert float(over_best[:, :half].max()) < 1.25 < float(over_best[:, half:].max())


def test_what_ships_answers_as_what_was_trained() -> None:
    torch.manual_seed(3)
    networks = network.Networks(members=3, hidden=8)
    inputs = torch.randn(20, len(FEATURES))
    bounds = np.full(len(FEATURES), 10.0, dtype=np.float32)
    shipped = network._ensemble(networks, (-bounds, bounds))
    with torch.no_grad():
        trained = networks(inputs.expand(3, *inputs.shape)).numpy().clip(-1, 7)
    np.testing.assert_allclose(shipped(inputs.numpy()), trained, atol=5e-3)
    assert float(np.abs(trained[0] - trained[1]).max()) > 0.1


def test_a_fit_learns_which_configs_are_fast() -> None:
    groups = []
    for seed in range(4):
        found = group([1.0] * 200, seed=seed)
        found.features[:, 2:] = 0.0
        times = 10 * np.exp(0.2 * found.features[:, 0] ** 2 + 0.1 * found.features[:, 1])
        groups.append(replace(found, time_us=times.astype(np.float64)))
    mean, scale = network.scaling(groups, [])
    sampler = network.Sampler(groups[:3], [], mean, scale)
    head = network.fit(sampler, network.Recipe(hidden=16, members=2, steps=150), seed=0)
    unseen = groups[3]
    answers = head(((unseen.features - mean) / scale).astype(np.float32)).mean(0)
    assert np.corrcoef(answers, network.log_times(unseen))[0, 1] > 0.9


@pytest.fixture(scope="module")
def landscapes() -> list[Landscape]:
    return load_landscapes()


def test_only_moetunes_own_kernel_was_launched_with_pdl(landscapes: list[Landscape]) -> None:
    kinds = set()
    for landscape in landscapes:
        (launch,) = launches_of(landscape, "up", random_configs(1, seed=4))
        own = OWN_KERNEL in landscape.name
        kinds.add(own)
        assert launch.pdl is (own and not launch.grouped), landscape.name
        assert ("moetune" in str(landscape.facts.get("kernel_source", landscape.facts.get("kernel")))) is own
    assert kinds == {True, False}


def test_types_are_told_apart_by_what_the_kernel_does() -> None:
    def tag(quantization: Quantization) -> str:
        return dtype_tag(replace(problem(), quantization=quantization))

    fp8 = Quantization(Dtype.FP8_W8A8)
    assert tag(fp8) == tag(replace(fp8, per_channel=True)) != tag(replace(fp8, block_shape=(128, 128)))
    int8 = Quantization(Dtype.INT8_W8A16)
    assert tag(int8) != tag(replace(int8, group_size=128))
    int4 = Quantization(Dtype.INT4_W4A16, group_size=128)
    assert tag(int4) == tag(replace(int4, zero_point=True)) == "int4_w4a16+groups"

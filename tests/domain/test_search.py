"""Search strategies: what they ask for, what they never ask for, and what they learn."""

from __future__ import annotations

import numpy as np
import pytest

from moetune.domain.config import KernelConfig
from moetune.domain.residuals import Residuals, Spread
from moetune.domain.search import (
    STRATEGIES,
    Field,
    GuidedSearch,
    Strategy,
    compile_limit,
    exhaustive_search,
    random_search,
)
from tests.generators import grid

MS = (1, 4, 16, 64, 256, 1024, 4096)
SMALL = tuple(config for config in grid() if config.num_stages == 3 and config.group_size_m == 1)


def truth(config: KernelConfig, m: int) -> float:
    """A made-up time, with a best tile that grows with m."""
    wanted = min(128, max(16, 2 ** int(np.log2(max(m, 1)) / 1.5)))
    misfit = abs(np.log2(config.block_size_m / wanted)) + 0.5 * abs(np.log2(config.block_size_n / 64))
    return float((20 + m / 8) * (1 + 0.15 * misfit + 0.05 * abs(np.log2(config.block_size_k / 128))))


def made_field(ms: tuple[int, ...] = MS, *, error: float = 0.0, seed: int = 0) -> Field:
    """A field whose prediction is off by a smooth, systematic error."""
    rng = np.random.default_rng(seed)
    times = np.array([[truth(config, m) for config in SMALL] for m in ms])
    tilt = np.array([np.log2(config.block_size_n) + 0.5 * np.log2(config.num_warps) for config in SMALL])
    wrong = times * np.exp(error * (tilt - tilt.mean()) + 0.02 * error * rng.standard_normal(times.shape))
    return Field(SMALL, ms, wrong, wrong)


def run(
    strategy: Strategy, *, fails: frozenset[KernelConfig] = frozenset()
) -> list[tuple[int, KernelConfig]]:
    asked = []
    while (ask := strategy.ask()) is not None:
        asked.append((ask.m, ask.config))
        strategy.tell(ask.m, ask.config, None if ask.config in fails else truth(ask.config, ask.m))
        assert len(asked) < 100_000
    return asked


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_no_strategy_asks_twice_or_spends_more_than_its_budget(name: str, budget: int) -> None:
    asked = run(STRATEGIES[name](made_field(), budget, 3))
    assert len(set(asked)) == len(asked)
    for m in MS:
        assert sum(at == m for at, _ in asked) == budget


def test_exhaustive_search_measures_everything_and_finds_the_best() -> None:
    search = exhaustive_search(made_field(), 0, 0)
    assert len(run(search)) == len(SMALL) * len(MS)
    for m in MS:
        chosen = search.choose(m)
        assert chosen is not None
        assert truth(chosen, m) == min(truth(config, m) for config in SMALL)


def test_random_search_depends_on_its_seed_alone() -> None:
    one, same, other = (run(random_search(made_field(), 8, seed)) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(("budget", "limit"), [(1, 3), (4, 12), (16, 48), (64, 128)])
def test_the_limit_on_compiling(budget: int, limit: int) -> None:
    assert compile_limit(budget) == limit


@pytest.mark.parametrize("ms", [MS, tuple(range(1, 19))])
@pytest.mark.parametrize("budget", [4, 16, 64])
def test_guided_search_compiles_few_configs_however_many_m(ms: tuple[int, ...], budget: int) -> None:
    asked = run(GuidedSearch(made_field(ms, error=0.1), budget))
    assert len({config for _, config in asked}) <= compile_limit(budget)


def test_without_measurements_the_score_decides() -> None:
    field = made_field(error=0.3)
    search = GuidedSearch(field, 0)
    assert search.ask() is None
    for row, m in enumerate(MS):
        assert search.choose(m) == SMALL[int(field.score[row].argmin())]


def test_measurements_correct_a_prediction_that_is_systematically_wrong() -> None:
    field = made_field(error=0.15)
    guided = GuidedSearch(field, 16)
    run(guided)
    for row, m in enumerate(MS):
        first = truth(SMALL[int(field.score[row].argmin())], m)
        best = min(truth(config, m) for config in SMALL)
        chosen = guided.choose(m)
        assert chosen is not None
        assert best / truth(chosen, m) > 0.97
        assert first / best > 1.05


def test_what_is_chosen_was_measured_and_is_the_best_of_it() -> None:
    search = GuidedSearch(made_field(error=0.3), 8)
    asked = run(search)
    for m in MS:
        assert search.choose(m) == min(
            (config for at, config in asked if at == m), key=lambda config: truth(config, m)
        )


def test_what_cannot_run_is_asked_for_once_and_never_chosen() -> None:
    field = made_field()
    fails = frozenset(SMALL[int(place)] for place in np.argsort(field.score[0])[:5])
    search = GuidedSearch(field, 12)
    asked = run(search, fails=fails)
    for config in fails:
        rounds = [at for at, other in asked if other == config]
        assert len(rounds) <= len(MS)
    assert all(search.choose(m) not in fails for m in MS)
    assert len([config for _, config in asked if config in fails]) < len(fails) * len(MS) / 2


def test_when_nothing_runs_nothing_is_chosen() -> None:
    field = Field(SMALL[:3], (1, 2), np.ones((2, 3)), np.ones((2, 3)))
    search = GuidedSearch(field, 5)
    run(search, fails=frozenset(SMALL))
    assert search.choose(1) is None


def test_residuals_carry_over_to_like_configs_and_near_m_and_fade() -> None:
    base = KernelConfig(64, 64, 64, 1, 4, 3)
    configs = [base, KernelConfig(64, 128, 64, 1, 4, 3), KernelConfig(16, 256, 256, 64, 8, 5)]
    residuals = Residuals(configs, (16, 32, 4096), Spread(offset=1e-3))
    residuals.learn([0], [0], [0.1])
    everything = np.arange(3)
    here, sure_here = residuals.expect(everything, 0)
    near, _ = residuals.expect(everything, 1)
    far, sure_far = residuals.expect(everything, 2)
    assert here[0] == pytest.approx(0.1, rel=0.05)
    assert here[0] > here[1] > here[2] >= 0
    assert here[0] > near[0] > far[0] > 0
    assert sure_here[0] < sure_here[1] < sure_far[2]


def test_nothing_learned_means_no_correction() -> None:
    mean, deviation = Residuals(SMALL[:4], (1,), Spread()).expect(np.arange(4), 0)
    assert not mean.any()
    assert (deviation > 0).all()

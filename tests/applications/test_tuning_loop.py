"""The loop on recorded landscapes and made-up GPUs: as good as exhaustive, never worse than the default."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetune.applications.predicting import keys_for
from moetune.applications.replay import declared_space
from moetune.applications.tuning_efforts import EFFORTS, Effort
from moetune.applications.tuning_loop import Measured, Tuner
from moetune.domain.choose import Reason
from moetune.domain.keys import Keys
from moetune.domain.landscape import Landscape, read_landscape
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.domain.space import worth_trying
from tests.applications.fake_machine import PROBLEM, SERVER, VLLM, FakeMachine
from tests.measure.fake_gpu import made_up_us

if TYPE_CHECKING:
    from moetune.domain.config import KernelConfig
    from moetune.domain.launch import Launch

LANDSCAPES = Path(__file__).resolve().parents[2] / "training" / "landscapes"
QUICK = replace(EFFORTS["quick"], budget_seconds=None)
SHORT = Effort("short", rounds=(3, 2), limit=16, finalists=2, layer_rounds=5)
MS = (1, 64, 2048)


def keys(*ms: int) -> Keys:
    return Keys(ms, tuple((m, 1 / len(ms)) for m in ms))


def space(problem: Problem) -> dict[Kernel, list[Launch]]:
    if problem.server == "sglang":
        return {kernel: declared_space(problem, kernel) for kernel in KERNELS}
    from moetune.domain.space import sglang_grid

    launches = {
        kernel: [VLLM.launch(problem, kernel, config) for config in sglang_grid()] for kernel in KERNELS
    }
    return {
        kernel: [launch for launch in found if worth_trying(launch, problem.gpu, (3, 6, 0))]
        for kernel, found in launches.items()
    }


def tune(
    machine: FakeMachine,
    ms: tuple[int, ...] = MS,
    effort: Effort = SHORT,
    problem: Problem = PROBLEM,
    only: Kernel | None = None,
) -> Measured:
    server = VLLM if problem.server == "vllm" else SERVER
    with machine.journal(problem) as journal, machine.laboratory(journal, ms, problem) as laboratory:
        tuner = Tuner(server, problem, laboratory, keys(*ms), effort, only)
        return tuner.tune(space(problem), PerformanceModel.load())


def fractions(landscape: Landscape, measured: Measured) -> list[float]:
    """The best pair of the landscape over the chosen one, in the landscape's own times."""
    found = []
    for entry in measured.choices.entries:
        up, down = (landscape.times_us[kernel, entry.m] for kernel in KERNELS)
        best: dict[int, list[float]] = {}
        for place, side in enumerate((up, down)):
            for config, time_us in side.items():
                if time_us is not None:
                    pair = best.setdefault(config.block_size_m, [math.inf, math.inf])
                    pair[place] = min(pair[place], time_us)
        chosen = (up[entry.pair.up] or math.inf) + (down[entry.pair.down] or math.inf)
        found.append(min(map(sum, best.values())) / chosen)
    return found


@pytest.mark.parametrize(
    "name", ["qwen3.5-122b-a10b_tp4_bf16_h200.csv.gz", "qwen3.5-35b-a3b_tp1_bf16_h200.csv.gz"]
)
def test_quick_is_as_good_as_the_best_pair_of_the_landscape(name: str, tmp_path: Path) -> None:
    landscape = read_landscape(LANDSCAPES / name)
    ms = tuple(sorted({m for _, m in landscape.times_us}))
    machine = FakeMachine(tmp_path, settings={"landscape": str(LANDSCAPES / name)})
    problem = landscape.problem
    measured = tune(machine, ms, QUICK, problem)
    found = fractions(landscape, measured)
    assert math.exp(sum(map(math.log, found)) / len(found)) > 0.99
    assert min(found) > 0.96
    assert max(measured.configs.values()) <= 60
    assert measured.gain is not None
    assert measured.gain > 1.1


def test_entries_agree_on_block_size_m_and_beat_the_default(tmp_path: Path) -> None:
    measured = tune(FakeMachine(tmp_path))
    for entry in measured.choices.entries:
        assert entry.pair.up.block_size_m == entry.pair.down.block_size_m
        assert entry.default_us is not None
        if entry.m not in MS:
            continue  # a key that was added: its default may be the best there is
        assert entry.time_us < entry.default_us
        layer = measured.layers[entry.m]
        assert layer.uniform_ratio is not None
        assert layer.uniform_ratio < 1 - layer.noise
    assert {item.config for item in measured.numerics if item.kernel == "up"} == {
        entry.pair.up for entry in measured.choices.entries
    }


def test_one_file_holds_one_config_for_both_kernels_and_their_sum_decides(tmp_path: Path) -> None:
    problem = replace(PROBLEM, server="vllm", server_version="0.33.0")
    measured = tune(FakeMachine(tmp_path), problem=problem, effort=replace(SHORT, rounds=(6, 4), limit=32))
    for entry in measured.choices.entries:
        assert entry.pair.up == entry.pair.down
    assert measured.choices.down is None
    total = made_up_us("up", 64, measured.choices.up.nearest(64)) + made_up_us(
        "down", 64, measured.choices.up.nearest(64)
    )
    every = [
        made_up_us("up", 64, launch.config) + made_up_us("down", 64, launch.config)
        for launch in space(problem)["up"]
    ]
    assert sum(other < total for other in every) < 0.1 * len(every)


def chosen_up(measured: Measured, m: int) -> KernelConfig:
    return next(entry.pair.up for entry in measured.choices.entries if entry.m == m)


def test_a_winner_with_wrong_numbers_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "right").mkdir()
    winner = chosen_up(tune(FakeMachine(tmp_path / "right")), 2048)
    (tmp_path / "wrong").mkdir()
    machine = FakeMachine(tmp_path / "wrong", settings={"faults": {f"up {winner}": "wrong numbers"}})
    measured = tune(machine)
    entry = next(entry for entry in measured.choices.entries if entry.m == 2048)
    assert entry.pair.up != winner
    assert all(item.relative_error <= item.tolerance for item in measured.numerics if item.config != winner)


def test_a_winner_that_loses_under_a_skewed_routing_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "even").mkdir()
    winner = chosen_up(tune(FakeMachine(tmp_path / "even")), 2048)
    (tmp_path / "skewed").mkdir()
    machine = FakeMachine(tmp_path / "skewed", settings={"skewed": {f"up {winner}": 5.0}})
    measured = tune(machine)
    assert chosen_up(measured, 2048) != winner


def test_where_nothing_beats_the_default_it_is_kept(tmp_path: Path) -> None:
    measured = tune(FakeMachine(tmp_path, settings={"flat": True}))
    assert not measured.choices.improves
    assert {entry.reason for entry in measured.choices.entries} == {Reason.DEFAULT_KEPT}


def test_a_default_that_cannot_run_is_replaced(tmp_path: Path) -> None:
    default = SERVER.default_config(PROBLEM, "up", 2048)
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {default}": "over shared memory"}})
    measured = tune(machine)
    entry = next(entry for entry in measured.choices.entries if entry.m == 2048)
    assert entry.reason is Reason.DEFAULT_CANNOT_RUN
    assert entry.default_us is None
    assert entry.pair.up != default


def test_only_one_kernel_is_searched_and_the_pair_still_agrees(tmp_path: Path) -> None:
    measured = tune(FakeMachine(tmp_path), only="up")
    assert measured.configs["up"] > measured.configs["down"]
    for entry in measured.choices.entries:
        assert entry.pair.up.block_size_m == entry.pair.down.block_size_m


def test_an_interrupted_search_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = FakeMachine(tmp_path / "whole")
    first = tune(whole)
    with whole.journal() as journal:
        lines = journal.path.read_bytes().splitlines(keepends=True)
    cut = FakeMachine(tmp_path / "cut")
    with cut.journal() as journal:
        path = journal.path
    path.write_bytes(b"".join(lines[: len(lines) // 2]))
    second = tune(cut)
    # Noise apart, of course; the questions of the first half are not asked again.
    assert len(cut.log("time")) < len(whole.log("time"))
    assert second.known > 0
    assert [entry.m for entry in second.choices.entries] == [entry.m for entry in first.choices.entries]
    # The whole journal answers everything.
    again = tune(whole)
    assert again.choices == first.choices
    assert again.measured == 0


def test_the_keys_of_a_server_are_covered_between_them(tmp_path: Path) -> None:
    found = keys_for(SERVER, PROBLEM, 4096, ((1, 1.0), (4096, 1.0)))
    measured = tune(FakeMachine(tmp_path), found.ms)
    assert not measured.shortfalls
    asked = {int(line["m"]) for line in FakeMachine(tmp_path).log("time")}
    assert asked - set(found.ms), "nothing was measured between the keys"

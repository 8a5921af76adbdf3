"""The laboratory: what is asked, in which order, on which GPU, and what is made of a drifting clock."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.measuring import ANCHOR_EVERY, Laboratory, NotMeasurableError, Progress, Target
from moetune.domain.choose import Pair
from moetune.domain.config import KernelConfig
from tests.applications.fake_machine import PROBLEM, SERVER, FakeMachine
from tests.measure.fake_gpu import made_up_us

MS = (1, 64, 1024)
CONFIGS = [
    KernelConfig(m, n, k, 1, 4, 3) for m in (16, 32, 64, 128) for n in (32, 64, 128) for k in (64, 128)
]


def targets(*configs: KernelConfig, ms: tuple[int, ...] = MS) -> list[Target]:
    return [Target("up", m, config) for config in configs for m in ms]


def test_times_are_those_of_the_gpu_and_known_ones_are_not_asked_again(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.want(targets(*CONFIGS[:3]))
        laboratory.run()
        laboratory.want(targets(*CONFIGS[:4]))
        laboratory.run()
    for target in targets(*CONFIGS[:4]):
        time_us = laboratory.times[target]
        assert time_us == pytest.approx(made_up_us("up", target.m, target.config), rel=0.02)
    assert len(machine.log("time")) == len(MS) * 4
    assert len(machine.log("open")) == 1
    # Nothing new: no GPU is touched.
    with machine.journal() as journal, machine.laboratory(journal, MS) as again:
        again.want(targets(*CONFIGS[:4]))
        again.run()
    assert again.times == laboratory.times
    assert len(machine.log("open")) == 1


def test_the_order_is_random_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    orders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        machine = FakeMachine(tmp_path / name)
        with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
            wanted = targets(*CONFIGS)
            # All are compiled before the first is measured: what is left is the order of the draw.
            tasks = [task for target in wanted if not isinstance(task := laboratory.task_of(target), str)]
            assert laboratory._compile(tasks)
            laboratory.want(wanted)
            laboratory.run()
        orders.append([(line["m"], line["config"]) for line in machine.log("time")])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) != orders[0]
    changes = sum(a[0] != b[0] for a, b in pairwise(orders[0]))
    assert changes > len(orders[0]) / 3, "not one m after the other"


def anchored(machine: FakeMachine, laboratory: Laboratory, count: int) -> Target:
    anchor = Target("up", 64, KernelConfig(16, 64, 64, 2, 4, 3))
    laboratory.use_anchor(anchor)
    laboratory.want(targets(*CONFIGS)[:count])
    laboratory.run()
    del machine
    return anchor


def test_an_anchor_is_measured_first_and_every_fifty(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        anchor = anchored(machine, laboratory, 72)
    asked = [(line["m"], line["config"]) for line in machine.log("time")]
    places = [place for place, item in enumerate(asked) if item == (64, str(anchor.config))]
    with machine.journal() as journal:
        anchors = [line for line in journal.lines if line["kind"] == "anchor"]
    assert len(anchors) >= 2
    assert any(abs(b - a - ANCHOR_EVERY) <= 2 for a, b in pairwise(places))
    assert not laboratory.drifts


def test_what_was_measured_while_the_clock_drifted_is_measured_again(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)

    def slow_down(progress: Progress) -> None:
        if progress.answered == 20:
            machine.set(clock=1.1)

    with machine.journal() as journal:
        laboratory = Laboratory(
            SERVER,
            PROBLEM,
            journal,
            MS,
            machine.uuids,
            command=machine.command,
            pool=machine.pool,
            progress=slow_down,
        )
        with laboratory:
            anchored(machine, laboratory, 72)
    assert laboratory.drifts
    assert laboratory.drifts[0] == pytest.approx(0.1, abs=0.02)
    # The first ones too are what the slower clock gives: times can be compared.
    ratios = [
        (laboratory.times[target] or 0.0) / made_up_us("up", target.m, target.config)
        for target in targets(*CONFIGS)[:72]
    ]
    assert min(ratios) > 1.07


def test_an_anchor_that_was_held_up_once_is_no_drift(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)

    def hold_up(_: Progress) -> None:
        if laboratory._benches[0].since >= ANCHOR_EVERY and not laboratory._benches[0].repeated:
            machine.set(clock=1.3)  # the next one is the anchor

    with machine.journal() as journal:
        laboratory = Laboratory(
            SERVER,
            PROBLEM,
            journal,
            MS,
            machine.uuids,
            command=machine.command,
            pool=machine.pool,
            progress=hold_up,
        )
        real = laboratory._on_anchor

        def on_anchor(bench: Any, timed: Any) -> None:
            machine.set(clock=1.0)
            real(bench, timed)

        laboratory._on_anchor = on_anchor  # type: ignore[method-assign]
        with laboratory:
            anchored(machine, laboratory, 72)
    with machine.journal() as journal:
        drifts = [line["drift"] for line in journal.lines if line["kind"] == "anchor"]
    assert any(drift > 0.2 for drift in drifts), "nothing was held up: the test tests nothing"
    assert not laboratory.drifts
    assert laboratory.measured == 72 + 1, "the anchor, and nothing twice"


def test_two_gpus_share_the_work_and_all_candidates_of_one_m_run_on_one(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, gpus=2, settings={"seconds": 0.01})
    ms = (1, 16, 64, 256, 1024, 4096)
    with machine.journal() as journal, machine.laboratory(journal, ms) as laboratory:
        laboratory.want(targets(*CONFIGS[:6], ms=ms))
        laboratory.run()
    homes: dict[int, set[str]] = {}
    for line in machine.log("time"):
        homes.setdefault(int(line["m"]), set()).add(str(line["gpu"]))
    assert all(len(gpus) == 1 for gpus in homes.values())
    assert set.union(*homes.values()) == {"GPU-0", "GPU-1"}


def test_hopeless_candidates_are_told_apart_by_the_best_so_far(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    best, worst = KernelConfig(16, 128, 64, 1, 4, 3), KernelConfig(256, 32, 64, 64, 8, 5)
    with machine.journal() as journal, machine.laboratory(journal, (1,)) as laboratory:
        laboratory.want([Target("up", 1, best)])
        laboratory.run()
        laboratory.want([Target("up", 1, worst)])
        laboratory.run()
    with machine.journal() as journal:
        found = [line["hopeless"] for line in journal.lines if line["kind"] == "time"]
    assert found == [False, True]


def test_a_sealed_laboratory_asks_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.sealed = True
        laboratory.want(targets(*CONFIGS))
        laboratory.run()
        pair = Pair(CONFIGS[0], CONFIGS[0])
        assert laboratory.layer(1, (pair,), "uniform", 3) is None
        assert laboratory.check("up", 1, CONFIGS[0]) is None
    assert not laboratory.times
    assert not machine.log("open")


def test_layers_and_checks_come_from_the_journal_the_second_time(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    pairs = (Pair(CONFIGS[0], CONFIGS[0]), Pair(CONFIGS[1], CONFIGS[1]))
    found = []
    for _ in range(2):
        with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
            layer = laboratory.layer(64, pairs, "uniform", 5)
            found.append((layer, laboratory.check("down", 64, CONFIGS[0])))
    assert found[0] == found[1]
    assert found[0][0] is not None
    assert [len(row) for row in found[0][0].samples_us] == [5, 5]
    assert len(machine.log("layer")) == len(machine.log("check")) == 1


def test_a_config_that_the_kernel_cannot_take_is_answered_without_a_gpu(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    tma = KernelConfig(16, 64, 64, 1, 4, 3, use_tma=True)
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.want([Target("up", 1, tma)])
        laboratory.run()
    assert laboratory.times == {Target("up", 1, tma): None}
    assert not machine.log("open")


def test_a_problem_that_cannot_be_kept_cold_is_no_fault_of_a_config(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {CONFIGS[0]}": "not cold"}})
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.want(targets(CONFIGS[0]))
        with pytest.raises(NotMeasurableError, match="cannot be kept out"):
            laboratory.run()
    with machine.journal() as journal:
        assert not [line for line in journal.lines if line["kind"] == "failed"]

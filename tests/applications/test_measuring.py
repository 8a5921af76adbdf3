"""The laboratory: what is asked, in which order, on which GPU, and what is made of a drifting clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moetune.applications.targets import NotMeasurableError, Target
from moetune.domain.config import KernelConfig
from moetune.domain.quantization import Dtype, Quantization
from tests.applications.fake_machine import PROBLEM, FakeMachine
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
        time_us = laboratory.known.times[target]
        assert time_us == pytest.approx(made_up_us("up", target.m, target.config), rel=0.02)
    assert len(machine.log("time")) == len(MS) * 4
    assert len(machine.log("open")) == 1
    # Nothing new: no GPU is touched.
    with machine.journal() as journal, machine.laboratory(journal, MS) as again:
        again.want(targets(*CONFIGS[:4]))
        again.run()
    assert again.known.times == laboratory.known.times
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
            assert laboratory.prepare(tasks)
            laboratory.want(wanted)
            laboratory.run()
        orders.append([(line["m"], line["config"]) for line in machine.log("time")])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) != orders[0]
    changes = sum(a[0] != b[0] for a, b in pairwise(orders[0]))
    assert changes > len(orders[0]) / 3, "not one m after the other"


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
    assert not laboratory.known.times
    assert not machine.log("open")


def test_a_config_that_the_kernel_cannot_take_is_answered_without_a_gpu(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    tma = KernelConfig(16, 64, 64, 1, 4, 3, use_tma=True)
    # The kernel for weights in groups has no descriptors.
    int4 = replace(PROBLEM, quantization=Quantization(Dtype.INT4_W4A16, "made", group_size=128))
    with machine.journal(int4) as journal, machine.laboratory(journal, MS, int4) as laboratory:
        laboratory.want([Target("up", 1, tma)])
        laboratory.run()
    assert laboratory.known.times == {Target("up", 1, tma): None}
    assert not machine.log("open")


def test_a_problem_that_cannot_be_kept_cold_is_no_fault_of_a_config(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {CONFIGS[0]}": "not cold"}})
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.want(targets(CONFIGS[0]))
        with pytest.raises(NotMeasurableError, match="cannot be kept out"):
            laboratory.run()
    with machine.journal() as journal:
        assert not [line for line in journal.lines if line["kind"] == "failed"]

"""Layers, checks and peaks: asked once, then known; what cannot be answered says why."""

from __future__ import annotations

from pathlib import Path

from moetune.applications.questions import check_target, measure_peaks, time_layer
from moetune.applications.targets import Target
from moetune.domain.choose import Pair
from moetune.domain.config import KernelConfig
from tests.applications.fake_machine import FakeMachine

MS = (1, 64, 1024)
CONFIGS = [KernelConfig(16, 32, 64, 1, 4, 3), KernelConfig(16, 32, 128, 1, 4, 3)]


def test_layers_and_checks_come_from_the_journal_the_second_time(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    pairs = (Pair(CONFIGS[0], CONFIGS[0]), Pair(CONFIGS[1], CONFIGS[1]))
    found = []
    for _ in range(2):
        with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
            layer = time_layer(laboratory, 64, pairs, "uniform", 5)
            found.append((layer, check_target(laboratory, Target("down", 64, CONFIGS[0]))))
    assert found[0] == found[1]
    assert found[0][0] is not None
    assert [len(row) for row in found[0][0].samples_us] == [5, 5]
    assert len(machine.log("layer")) == len(machine.log("check")) == 1


def test_a_sealed_laboratory_answers_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        laboratory.sealed = True
        pair = Pair(CONFIGS[0], CONFIGS[0])
        assert time_layer(laboratory, 1, (pair,), "uniform", 3) is None
        assert check_target(laboratory, Target("up", 1, CONFIGS[0])) is None
        assert measure_peaks(laboratory) is None
    assert not machine.log("open")

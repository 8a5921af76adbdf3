"""An anchor tells whether the GPU's clock drifts; what was measured while it did is measured again."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from moetune.applications.bench import ANCHOR_EVERY, DRIFT, Bench
from moetune.applications.measuring import Laboratory
from moetune.applications.targets import Progress, Target
from moetune.applications.worker_pool import Device
from moetune.domain.config import KernelConfig
from moetune.measure.protocol import Timed
from tests.applications.fake_machine import FakeMachine
from tests.measure.fake_gpu import made_up_us

MS = (1, 64, 1024)
CONFIGS = [
    KernelConfig(m, n, k, 1, 4, 3) for m in (16, 32, 64, 128) for n in (32, 64, 128) for k in (64, 128)
]
TARGETS = [Target("up", m, config) for config in CONFIGS for m in MS]


def anchored(laboratory: Laboratory, count: int) -> Target:
    anchor = Target("up", 64, KernelConfig(16, 64, 64, 2, 4, 3))
    laboratory.use_anchor(anchor)
    laboratory.want(TARGETS[:count])
    laboratory.run()
    return anchor


def test_an_anchor_is_measured_first_and_every_fifty(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        anchor = anchored(laboratory, 72)
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

    with machine.journal() as journal, machine.laboratory(journal, MS, progress=slow_down) as laboratory:
        anchored(laboratory, 72)
    assert laboratory.drifts
    assert laboratory.drifts[0] == pytest.approx(0.1, abs=0.02)
    # The first ones too are what the slower clock gives: times can be compared.
    ratios = [
        (laboratory.known.times[target] or 0.0) / made_up_us("up", target.m, target.config)
        for target in TARGETS[:72]
    ]
    assert min(ratios) > 1.07


def test_an_anchor_that_was_held_up_once_is_no_drift(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)

    def hold_up(_: Progress) -> None:
        bench = laboratory._equipment.benches[0]
        if bench.since >= ANCHOR_EVERY and not bench.repeated:
            machine.set(clock=1.3)  # the next one is the anchor

    with machine.journal() as journal:
        laboratory = machine.laboratory(journal, MS, progress=hold_up)
        real = laboratory._on_anchor

        def on_anchor(bench: Bench, timed: Timed) -> None:
            machine.set(clock=1.0)
            real(bench, timed)

        laboratory._on_anchor = on_anchor  # type: ignore[method-assign]
        with laboratory:
            anchored(laboratory, 72)
    with machine.journal() as journal:
        drifts = [line["drift"] for line in journal.lines if line["kind"] == "anchor"]
    assert any(drift > 0.2 for drift in drifts), "nothing was held up: the test tests nothing"
    assert not laboratory.drifts
    assert laboratory.measured == 72 + 1, "the anchor, and nothing twice"


A, B, ANCHOR = TARGETS[0], TARGETS[1], TARGETS[2]


def a_bench() -> Bench:
    """One that has measured its anchor, at 100 us, and then A and B."""
    bench = Bench(cast("Device", None))
    for target in (ANCHOR, A, B):
        bench.add_time(target, 100.0, ANCHOR)
    return bench


def test_an_anchor_that_agrees_ends_the_block() -> None:
    bench = a_bench()
    assert bench.since == 2
    seen = bench.add_anchor(100.0 * (1 + DRIFT / 2))
    assert seen.drift == pytest.approx(DRIFT / 2)
    assert not seen.repeat
    assert (bench.since, bench.block, bench.doubted) == (0, [], False)


def test_a_drift_is_believed_the_second_time_and_repeats_the_block_once() -> None:
    bench = a_bench()
    assert not bench.add_anchor(110.0).repeat
    assert bench.doubted
    assert bench.is_unsure
    assert bench.is_anchor_due(A, ANCHOR), "before anything else"
    assert bench.add_anchor(110.0).repeat == (ANCHOR, A, B)
    # What is repeated is not repeated again, whatever the clock does now: it would never end.
    for target in (ANCHOR, A, B):
        bench.add_time(target, 120.0, ANCHOR)
    bench.add_anchor(120.0)
    assert not bench.add_anchor(120.0).repeat


def test_a_clock_that_comes_back_is_compared_with_the_first_anchor() -> None:
    bench = a_bench()
    bench.add_anchor(130.0)
    seen = bench.add_anchor(100.5)
    assert seen.drift == pytest.approx(0.005)
    assert not seen.repeat


def test_the_anchor_is_due_first_and_after_fifty() -> None:
    bench = Bench(cast("Device", None))
    assert bench.is_anchor_due(A, ANCHOR)
    assert not bench.is_anchor_due(ANCHOR, ANCHOR), "it is about to be measured anyway"
    bench.add_time(ANCHOR, 100.0, ANCHOR)
    for number in range(ANCHOR_EVERY):
        assert not bench.is_anchor_due(A, ANCHOR), number
        bench.add_time(A, 50.0, ANCHOR)
    assert bench.is_anchor_due(A, ANCHOR)

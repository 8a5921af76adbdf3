"""What was measured is on the disk before it counts, and comes back from there as it was."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.applications.journal import Journal
from moetune.applications.known import Known
from moetune.applications.targets import Target
from moetune.domain.config import KernelConfig
from moetune.measure.protocol import Checked, LayerTimed, Peaks, Timed
from tests.applications.fake_machine import PROBLEM

GOOD, BAD = KernelConfig(16, 64, 64, 1, 4, 3), KernelConfig(32, 64, 64, 1, 4, 3)


def timed(time_us: float) -> Timed:
    return Timed(time_us, 0.00123456, 7, launches=8, copies=3, reuse_bytes=1 << 30, l2_bytes=1 << 26)


def fill(known: Known, time_us: float = 12.345678) -> None:
    known.add_time(Target("up", 1, GOOD), timed(time_us), 0)
    known.add_time(Target("up", 64, GOOD), timed(2 * time_us), 0)
    known.add_time(Target("up", 1, BAD), timed(time_us / 2), 0)
    known.add_layer("1 uniform", LayerTimed(((1.5, 2.5), (3.5, 4.5)), 1 << 30, 0))
    known.add_check("up 1", Checked(0.001, 0.02))
    known.add_peaks(Peaks(700.0, 4500.0))


@given(time_us=st.floats(0.5, 1e6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_second_run_knows_exactly_what_the_first_did(tmp_path: Path, time_us: float) -> None:
    folder = tmp_path / str(time_us)
    with Journal.open(folder, PROBLEM, "GPU-0") as journal:
        first = Known(journal)
        fill(first, time_us)
        first.add_failure("up", BAD, "crashed", m=1)
    with Journal.open(folder, PROBLEM, "GPU-0") as journal:
        again = Known(journal)
    for name in ("times", "spreads", "failed", "layers", "checks", "peaks"):
        assert getattr(again, name) == getattr(first, name), name
    assert again.best_us(Target("up", 64, BAD)) == first.best_us(Target("up", 64, BAD))


def test_a_config_that_failed_is_known_as_failed_at_every_m(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        known = Known(journal)
        fill(known)
        known.add_failure("up", GOOD, "hung\x1b[2J\n", m=64)
    assert known.times[Target("up", 1, GOOD)] is None
    assert known.times[Target("up", 64, GOOD)] is None
    assert known.times_at("up", 1).keys() == {BAD}
    assert known.times_at("up", 64) == {}
    assert known.failed["up", GOOD].isprintable()


def test_the_best_is_that_of_the_same_kernel_and_m(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        known = Known(journal)
        fill(known, 8.0)
    assert known.best_us(Target("up", 1, GOOD)) == 4.0
    assert known.best_us(Target("up", 64, GOOD)) == 16.0
    assert known.best_us(Target("down", 1, GOOD)) is None


def test_a_layer_that_could_not_be_timed_may_be_asked_again(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        known = Known(journal)
        known.add_layer_failure("1 uniform", "out of memory")
    with Journal.open(tmp_path, PROBLEM, "GPU-0") as journal:
        assert [line["kind"] for line in journal.lines] == ["layer failed"]
        assert not Known(journal).layers

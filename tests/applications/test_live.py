"""The live line's watch: the GPU is asked once a second, and what slowed it down is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moetune.applications import live as module
from moetune.applications.gpu_health import Health
from moetune.applications.live import Live, LiveWatch
from moetune.applications.targets import Progress

if TYPE_CHECKING:
    import pytest


def test_the_gpu_is_asked_once_a_second_and_reasons_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], []
    found = [Health(throttled=("power cap",)), Health(), Health(throttled=("heat",))]

    class Monitor:
        def __init__(self, uuid: str) -> None:
            assert uuid == "GPU-1"

        def look(self) -> Health:
            asked.append(now[0])
            return found[len(asked) - 1]

    monkeypatch.setattr(module, "HealthMonitor", Monitor)
    monkeypatch.setattr("moetune.applications.live.time.monotonic", lambda: now[0])
    seen: list[Live] = []
    watch = LiveWatch("GPU-1", seen.append, started=90.0)
    for step in (0.0, 0.5, 1.5, 3.0):
        now[0] = 100.0 + step
        watch.see(Progress("search", 1, 2))
    assert asked == [100.0, 101.5, 103.0]
    assert [one.seconds for one in seen] == [10.0, 10.5, 11.5, 13.0]
    assert [one.health.throttled for one in seen] == [("power cap",), ("power cap",), (), ("heat",)]
    assert list(watch.throttled) == ["power cap", "heat"]


def test_nobody_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Monitor:
        def __init__(self, _: str) -> None: ...

        def look(self) -> Any:
            return Health(throttled=("heat",))

    monkeypatch.setattr(module, "HealthMonitor", Monitor)
    watch = LiveWatch("GPU-0", None)
    watch.see(Progress("search", 1, 2))
    assert list(watch.throttled) == ["heat"]

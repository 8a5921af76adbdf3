"""What a live line shows while something is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.gpu_health import Health, HealthMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.applications.targets import Progress

_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Live:
    """What the live line shows: the laboratory's progress, the GPU, and the time."""

    progress: Progress
    health: Health
    seconds: float


class LiveWatch:
    """Tells the live line, and keeps why the GPU ran slower than it could.

    Args:
        uuid: of the GPU that is looked at.
        live: told after each measurement.
        started: time of the monotonic clock from which the seconds count; None: now.

    Attributes:
        throttled: reasons for which the GPU was slowed down at some time.
    """

    def __init__(self, uuid: str, live: Callable[[Live], None] | None, started: float | None = None) -> None:
        self._monitor, self._live = HealthMonitor(uuid), live
        self._started = time.monotonic() if started is None else started
        self._looked, self._last = 0.0, Health()
        self.throttled: dict[str, None] = {}

    def see(self, progress: Progress) -> None:
        """Called after each measurement; the GPU is asked once a second at most."""
        now = time.monotonic()
        if now - self._looked > _EVERY_S:
            self._looked, self._last = now, self.look()
            self.throttled.update(dict.fromkeys(self._last.throttled))
        if self._live is not None:
            self._live(Live(progress, self._last, now - self._started))

    def look(self) -> Health:
        """Ask the GPU."""
        return self._monitor.look()

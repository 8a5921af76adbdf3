"""What a live line shows while something is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.applications.gpu_health import Health
    from moetune.applications.targets import Progress


@dataclass(frozen=True, slots=True)
class Live:
    """What the live line shows: the laboratory's progress, the GPU, and the time."""

    progress: Progress
    health: Health
    seconds: float

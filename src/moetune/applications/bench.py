"""One GPU as the laboratory sees it: what it works on, and whether its clock has drifted.

A config, the anchor, is measured again and again. Where its time has changed, the measurements since the
last one that agreed cannot be compared with those that follow: they are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.applications.targets import Target
    from moetune.applications.worker_pool import Device
    from moetune.measure.protocol import DeviceFacts

ANCHOR_EVERY = 50
"""Measurements between two of the anchor config."""
_CLOSING = 10
"""Measurements since the last anchor after which it is measured once more at the end."""
DRIFT = 0.02
"""Change of the anchor above which the measurements since the last one are repeated."""


@dataclass(frozen=True, slots=True)
class AnchorSeen:
    """What one more measurement of the anchor says.

    Attributes:
        drift: its change since the last one, as a part of it.
        repeat: what has to be measured again because of it.
    """

    drift: float
    repeat: tuple[Target, ...] = ()


@dataclass(slots=True)
class Bench:
    """One GPU.

    Attributes:
        device: the process that measures on it.
        facts: what that process said of it.
        busy: it works on something.
        gone: it will not work again.
        since: measurements since the last anchor.
        anchor_us: what the anchor took last.
        block: targets measured since, for when they have to be repeated.
        repeated: they were repeated already.
        doubted: the anchor has changed; it is measured once more before that is believed.
    """

    device: Device
    facts: DeviceFacts | None = None
    busy: bool = True
    gone: bool = False
    since: int = 0
    anchor_us: float | None = None
    block: list[Target] = field(default_factory=list)
    repeated: bool = False
    doubted: bool = False

    def add_time(self, target: Target, time_us: float, anchor: Target | None) -> None:
        """Count a measurement; the first one of the anchor is what later ones are compared with."""
        self.since += 1
        self.block.append(target)
        if target == anchor and self.anchor_us is None:
            self.anchor_us, self.since = time_us, 0

    def add_anchor(self, time_us: float) -> AnchorSeen:
        """Compare the anchor with what it took last; one that was held up once is no drift."""
        drift = time_us / self.anchor_us - 1 if self.anchor_us else 0.0
        if abs(drift) > DRIFT and not self.doubted:
            self.doubted = True
            return AnchorSeen(drift)
        self.doubted = False
        self.anchor_us, self.since = time_us, 0
        block, self.block = self.block, []
        if abs(drift) <= DRIFT or self.repeated:
            self.repeated = False
            return AnchorSeen(drift)
        self.repeated = True
        return AnchorSeen(drift, tuple(dict.fromkeys(block)))

    @property
    def is_unsure(self) -> bool:
        """Whether it has measured a while since its last anchor: its clock may have drifted since."""
        return self.since >= _CLOSING or self.doubted

    def is_anchor_due(self, target: Target, anchor: Target) -> bool:
        """Whether the anchor comes before a target."""
        return self.doubted or self.since >= ANCHOR_EVERY or (self.anchor_us is None and target != anchor)

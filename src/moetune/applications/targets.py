"""What is measured, and what is told of it while it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from moetune.domain.choose import Pair
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel


class NotMeasurableError(MoetuneError):
    """A problem that moetune cannot measure."""


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """What is measured: a config of a kernel at an m.

    Attributes:
        sorted_output: the up kernel writes its rows for a down kernel whose config has USE_TMA.
    """

    kernel: Kernel
    m: int
    config: KernelConfig
    sorted_output: bool = False

    @property
    def in_order(self) -> bool:
        """Whether it reads or writes rows in sorted order: it stands beside nothing that does not."""
        return self.sorted_output or (self.kernel == "down" and self.config.use_tma)


def targets_of(m: int, pair: Pair) -> tuple[Target, Target]:
    """Both measurements of a pair."""
    return Target("up", m, pair.up, pair.down.use_tma), Target("down", m, pair.down)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the live line shows.

    Attributes:
        phase: in a word or two.
        answered: measurements that have come.
        wanted: measurements asked for so far.
        target: what was measured last, with its time.
        time_us: None where it failed.
        best_us: the best of that kernel and m so far.
    """

    phase: str
    answered: int
    wanted: int
    target: Target | None = None
    time_us: float | None = None
    best_us: float | None = None

"""Targets that were asked for and have no answer yet: each waits for its binary, then for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from moetune.applications.targets import Target
    from moetune.domain.compilation import CompileTask
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Kernel


class Backlog:
    """What is still to be measured.

    Args:
        rng: draws the order of measurements.
    """

    def __init__(self, rng: random.Random) -> None:
        self.wanted = 0
        """Measurements asked for so far, repeated ones too."""
        self._rng = rng
        self._pending: set[Target] = set()
        self._compiling: dict[CompileTask, set[Target]] = {}
        self._ready: dict[tuple[Kernel, int], list[Target]] = {}
        self._homes: dict[tuple[Kernel, int], int] = {}

    def __contains__(self, target: Target) -> bool:
        return target in self._pending

    def __bool__(self) -> bool:
        return bool(self._pending or self._compiling)

    @property
    def answered(self) -> int:
        """Measurements that have come."""
        return self.wanted - len(self._pending)

    def add_ready(self, targets: Iterable[Target]) -> None:
        """Ask for targets whose binary is there, be it for a second time."""
        for target in targets:
            self._pending.add(target)
            self.wanted += 1
            self.put_back(target)

    def add_compiling(self, target: Target, task: CompileTask) -> None:
        """Ask for a target whose binary is not there."""
        self._pending.add(target)
        self.wanted += 1
        self._compiling.setdefault(task, set()).add(target)

    def await_binary(self, task: CompileTask) -> None:
        """Wait for a binary that no target needs."""
        self._compiling.setdefault(task, set())

    def take_compiling(self, task: CompileTask) -> set[Target]:
        """The targets that waited for a binary; they wait for it no more."""
        return self._compiling.pop(task, set())

    def put_back(self, target: Target) -> None:
        """Have a target drawn, for the first time or again."""
        self._ready.setdefault((target.kernel, target.m), []).append(target)

    def draw(self, device: int) -> Target | None:
        """A random target for a GPU; all candidates of one kernel and m run on one GPU."""
        mine = [key for key, ready in self._ready.items() if ready and self._homes.get(key, device) == device]
        if not mine:
            return None
        key = self._rng.choices(mine, [len(self._ready[key]) for key in mine])[0]
        self._homes[key] = device
        ready = self._ready[key]
        place = self._rng.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def finish(self, target: Target) -> None:
        """A target is answered."""
        self._pending.discard(target)

    def drop(self, kernel: Kernel, config: KernelConfig) -> list[Target]:
        """Ask for a config no more, at any m; the targets that had no answer."""
        lost = [target for target in self._pending if (target.kernel, target.config) == (kernel, config)]
        self._pending.difference_update(lost)
        for task in list(self._compiling):
            if (task.launch.kernel, task.launch.config) == (kernel, config):
                del self._compiling[task]
        for targets in self._ready.values():
            targets[:] = [item for item in targets if (item.kernel, item.config) != (kernel, config)]
        return lost

    def lose_device(self, device: int) -> None:
        """What ran on a GPU that is gone may run on another one."""
        self._homes = {key: home for key, home in self._homes.items() if home != device}

    def clear(self) -> set[Target]:
        """Ask for nothing any more; the targets that had no answer."""
        given_up, self._pending = self._pending, set()
        self._compiling.clear()
        self._ready.clear()
        return given_up

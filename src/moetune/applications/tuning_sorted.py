"""Pairs whose down config has USE_TMA: offered where the server reads it, and measured as pairs.

USE_TMA changes the layout of what the up kernel writes: in sorted order, padding between the rows. So the
up kernel is measured once more for such a pair, and what stands between the kernels is another work too:
the sum of both kernels' times says which of these pairs are good, and the layer alone whether one of them
beats a plain pair (`tuning_finals`).
"""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from moetune.applications.targets import targets_of
from moetune.domain.choose import Pair
from moetune.domain.errors import ConfigFileError
from moetune.domain.space import worth_trying
from moetune.domain.version import parse_release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moetune.applications.measuring import Laboratory
    from moetune.applications.tuning_efforts import Effort
    from moetune.domain.config import KernelConfig
    from moetune.domain.problem import Problem
    from moetune.servers.protocol import Server

_FIRST_WITH_TMA = (9, 0)
"""Before it Triton turns descriptors into pointers, and copies nothing ahead."""


class SortedPairs:
    """Tries good pairs with USE_TMA in the down config.

    Args:
        server: the release that would read it.
        problem: the problem.
        laboratory: where is measured.
        effort: how many are tried.
    """

    def __init__(self, server: Server, problem: Problem, laboratory: Laboratory, effort: Effort) -> None:
        self._server, self._problem, self._lab, self._effort = server, problem, laboratory, effort
        self._triton = parse_release(problem.triton_version)

    def measure(self, ms: Sequence[int], deadline: float | None) -> None:
        """Measure both kernels of the pairs that are tried."""
        capability = self._problem.gpu.compute_capability
        if not self._server.separate_down_file or capability is None or capability < _FIRST_WITH_TMA:
            return
        self._lab.want(target for m in ms for pair in self._tried(m) for target in targets_of(m, pair))
        self._lab.run(deadline)

    def best(self, m: int, count: int) -> list[Pair]:
        """The pairs whose measured times have the least sums."""
        ups = self._lab.known.times_at("up", m, in_order=True)
        downs = self._lab.known.times_at("down", m, in_order=True)
        sums = [
            (of_up + of_down, Pair(up, down))
            for up, of_up in ups.items()
            for down, of_down in downs.items()
            if up.block_size_m == down.block_size_m
        ]
        least = nsmallest(
            count, sums, key=lambda item: (item[0], item[1].up.sort_key(), item[1].down.sort_key())
        )
        return [pair for _, pair in least]

    def _tried(self, m: int) -> Iterator[Pair]:
        ups, downs = (self._lab.known.times_at(kernel, m) for kernel in ("up", "down"))
        best_up, best_down = _best_by_size(ups), _best_by_size(downs)
        sizes = sorted(best_up.keys() & best_down.keys(), key=lambda s: (best_up[s][0] + best_down[s][0], s))
        for size in sizes[: self._effort.sorted_sizes]:
            up, down = best_up[size][1], best_down[size][1]
            near = (one for one in _near(down) if self._is_offered(up, one))
            downs_tried = [one for _, one in zip(range(self._effort.sorted_downs), near, strict=False)]
            yield from (Pair(up, one) for one in downs_tried)
            # The up kernel has descriptors of its own, for its weights alone.
            by_tma = replace(up, use_tma=True)
            if len(downs_tried) > 1 and self._is_offered(by_tma, downs_tried[0]):
                yield Pair(by_tma, downs_tried[0])

    def _is_offered(self, up: KernelConfig, down: KernelConfig) -> bool:
        """Whether the server takes such a pair, computes right numbers with it, and it can run."""
        try:
            launches = (
                self._server.launch(self._problem, "up", up, down=down),
                self._server.launch(self._problem, "down", down, up),
            )
        except ConfigFileError:
            return False
        return launches[1].sorted_input and all(
            worth_trying(launch, self._problem.gpu, self._triton) for launch in launches
        )


def _best_by_size(times: dict[KernelConfig, float]) -> dict[int, tuple[float, KernelConfig]]:
    """The fastest config of each BLOCK_SIZE_M."""
    found: dict[int, tuple[float, KernelConfig]] = {}
    for config, time_us in times.items():
        found[config.block_size_m] = min((time_us, config), found.get(config.block_size_m, (time_us, config)))
    return found


def _near(config: KernelConfig) -> Iterator[KernelConfig]:
    """A config with USE_TMA, and those one step from it: a descriptor wants other tiles and more stages."""
    config = replace(config, use_tma=True)
    stages, depth = config.num_stages, config.block_size_k
    yield config
    yield replace(config, num_stages=stages + 1)
    yield replace(config, block_size_k=2 * depth)
    yield replace(config, block_size_k=2 * depth, num_stages=max(stages - 1, 2))
    yield replace(config, num_stages=max(stages - 1, 2))
    yield replace(config, num_warps=8 if config.num_warps == 4 else 4)
    yield replace(config, block_size_k=depth // 2, num_stages=stages + 1)

"""Which up and down configs can stand in the files of a server together, and the least of their sums."""

from __future__ import annotations

from heapq import nsmallest
from itertools import product
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moetune.domain.config import KernelConfig

Sum = tuple[float, int, int]
"""A sum of two values, and the places of the up and the down config that they belong to."""


class Pairing(Protocol):
    """The pairs that a server allows, as places in two lists of configs."""

    def least(self, of_up: Sequence[float], of_down: Sequence[float], count: int) -> list[Sum]:
        """The pairs with the least sums, ascending, at most `count`."""
        ...

    def within(self, of_up: Sequence[float], of_down: Sequence[float], limit: float, count: int) -> list[Sum]:
        """The pairs whose sums do not exceed the limit, ascending, at most `count`."""
        ...


class SameConfig:
    """One file: both kernels run with the same config.

    Args:
        places: of each config in the up and in the down list.
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self._places = places

    def least(self, of_up: Sequence[float], of_down: Sequence[float], count: int) -> list[Sum]:
        """See `Pairing.least`."""
        return nsmallest(count, [(of_up[i] + of_down[j], i, j) for i, j in self._places])

    def within(self, of_up: Sequence[float], of_down: Sequence[float], limit: float, count: int) -> list[Sum]:
        """See `Pairing.within`."""
        sums = [(of_up[i] + of_down[j], i, j) for i, j in self._places if of_up[i] + of_down[j] <= limit]
        return nsmallest(count, sums)


class SameBlockSizeM:
    """Two files: the configs agree on BLOCK_SIZE_M.

    No loop runs over all pairs: within one BLOCK_SIZE_M the `count` least sums are made of the
    `count` least of each side.

    Args:
        ups: BLOCK_SIZE_M to places in the up list.
        downs: the same of the down list.
    """

    def __init__(self, ups: Mapping[int, Sequence[int]], downs: Mapping[int, Sequence[int]]) -> None:
        self._groups = [(ups[size], downs[size]) for size in ups if size in downs]

    def least(self, of_up: Sequence[float], of_down: Sequence[float], count: int) -> list[Sum]:
        """See `Pairing.least`."""
        found: list[Sum] = []
        for least, ups, downs in self._by_least_sum(of_up, of_down):
            if len(found) == count and found[-1][0] < least:
                break
            pairs = product(_first(ups, of_up, count), _first(downs, of_down, count))
            found = nsmallest(count, [*found, *_sums(pairs, of_up, of_down)])
        return found

    def within(self, of_up: Sequence[float], of_down: Sequence[float], limit: float, count: int) -> list[Sum]:
        """See `Pairing.within`."""
        found: list[Sum] = []
        for least, ups, downs in self._by_least_sum(of_up, of_down):
            if least > limit:
                break
            least_up, least_down = min(of_up[i] for i in ups), min(of_down[j] for j in downs)
            near_ups = [i for i in ups if of_up[i] + least_down <= limit]
            near_downs = [j for j in downs if least_up + of_down[j] <= limit]
            pairs = product(_first(near_ups, of_up, count), _first(near_downs, of_down, count))
            found += [item for item in _sums(pairs, of_up, of_down) if item[0] <= limit]
        return nsmallest(count, found)

    def _by_least_sum(
        self, of_up: Sequence[float], of_down: Sequence[float]
    ) -> list[tuple[float, Sequence[int], Sequence[int]]]:
        groups = [
            (min(map(of_up.__getitem__, ups)) + min(map(of_down.__getitem__, downs)), ups, downs)
            for ups, downs in self._groups
        ]
        return sorted(groups, key=lambda group: group[0])


def _first(places: Sequence[int], values: Sequence[float], count: int) -> list[int]:
    return sorted(places, key=values.__getitem__)[:count]


def _sums(
    pairs: Iterable[tuple[int, int]], of_up: Sequence[float], of_down: Sequence[float]
) -> Iterable[Sum]:
    return ((of_up[i] + of_down[j], i, j) for i, j in pairs)


class Layout:
    """Where each config stands in a list, and which share a BLOCK_SIZE_M.

    Configs with USE_TMA have no place: they change the layout of what the other kernel reads or
    writes, so that a sum of two times says nothing about them.
    """

    def __init__(self, configs: Sequence[KernelConfig]) -> None:
        self.configs: Sequence[KernelConfig] = configs
        self.place = {config: index for index, config in enumerate(configs) if not config.use_tma}
        self.groups: dict[int, list[int]] = {}
        for config, index in self.place.items():
            self.groups.setdefault(config.block_size_m, []).append(index)

    def extended(self, config: KernelConfig) -> Layout:
        """The same with one more config at the end; itself where the config has a place already."""
        if config in self.place or config.use_tma:
            return self
        new = Layout(())
        index = len(self.configs)
        size = config.block_size_m
        new.configs = (*self.configs, config)
        new.place = self.place | {config: index}
        new.groups = self.groups | {size: [*self.groups.get(size, []), index]}
        return new


class Pairings:
    """Makes layouts and pairings, each once for all m that share their lists of configs."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, KernelConfig | None], Layout] = {}
        self._pairings: dict[tuple[int, int, bool], Pairing] = {}

    def layout(self, configs: Sequence[KernelConfig], extra: KernelConfig | None) -> Layout:
        """The layout of a list of configs with one more. The list must live as long as this object."""
        key = (id(configs), extra)
        if key not in self._layouts:
            if extra is None:
                self._layouts[key] = Layout(configs)
            else:
                self._layouts[key] = self.layout(configs, None).extended(extra)
        return self._layouts[key]

    def pairing(self, up: Layout, down: Layout, one_file: bool) -> Pairing:
        """The pairs of two layouts of this object."""
        key = (id(up), id(down), one_file)
        if key not in self._pairings:
            if one_file:
                shared = ((i, down.place.get(config)) for config, i in up.place.items())
                self._pairings[key] = SameConfig([(i, j) for i, j in shared if j is not None])
            else:
                self._pairings[key] = SameBlockSizeM(up.groups, down.groups)
        return self._pairings[key]

"""How hard tuning tries: `quick`, `full`, `exhaustive`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard is tried.

    Attributes:
        name: as on the command line.
        rounds: measurements for each kernel and m, asked for in batches of these sizes; between two
            of them the model learns.
        limit: distinct configs of a kernel to compile.
        budget_seconds: wall clock; None without.
        finalists: pairs that meet the default in the layer.
        layer_rounds: samples of each of them.
        wide: search beyond SGLang's grid.
        exhaustive: measure every config of the grid.
        sorted_sizes: values of BLOCK_SIZE_M, at each m, whose pairs are tried with USE_TMA for down; none in
            `quick`, which has no seconds for it.
        sorted_downs: down configs that are tried so, of each of them.
    """

    name: str
    rounds: tuple[int, ...] = ()
    limit: int = 0
    budget_seconds: float | None = None
    finalists: int = 2
    layer_rounds: int = 9
    wide: bool = True
    exhaustive: bool = False
    sorted_sizes: int = 0
    sorted_downs: int = 0


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort("quick", rounds=(4, 4, 4), limit=40, budget_seconds=45.0, wide=False),
    "full": Effort(
        "full",
        rounds=(6, 6, 8, 8, 8, 8, 8, 8, 8, 8),
        limit=240,
        budget_seconds=180.0,
        finalists=6,
        layer_rounds=21,
        sorted_sizes=2,
        sorted_downs=6,
    ),
    "exhaustive": Effort(
        "exhaustive",
        finalists=4,
        layer_rounds=15,
        wide=False,
        exhaustive=True,
        sorted_sizes=2,
        sorted_downs=6,
    ),
}

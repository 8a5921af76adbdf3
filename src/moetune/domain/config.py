"""One kernel config, a table of them by m, and the JSON that holds a table."""

from __future__ import annotations

from dataclasses import dataclass

CONFIG_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


@dataclass(frozen=True, slots=True, order=True)
class KernelConfig:
    """A config of the fused-MoE kernel.

    `num_warps` and `num_stages` are Triton's own defaults (4 and 3) where an entry lacks them.

    Attributes:
        extra: further keys as they stand in the file (`SPLIT_K`, `waves_per_eu`, ...), sorted.
    """

    block_size_m: int
    block_size_n: int
    block_size_k: int
    group_size_m: int
    num_warps: int = 4
    num_stages: int = 3
    use_tma: bool = False
    extra: tuple[tuple[str, int | bool | str], ...] = ()

    def __str__(self) -> str:
        tma = " tma" if self.use_tma else ""
        return (
            f"{self.block_size_m}x{self.block_size_n}x{self.block_size_k} "
            f"g{self.group_size_m} w{self.num_warps} s{self.num_stages}{tma}"
        )


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """m to config, in the order of the file: a server breaks ties by it."""

    entries: tuple[tuple[int, KernelConfig], ...]

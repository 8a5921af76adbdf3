"""Configs that Triton itself cannot compile: no resource rule catches them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from moetune.domain.safe_json import load_json_object
from moetune.domain.version import parse_release

if TYPE_CHECKING:
    from moetune.domain.launch import Launch
    from moetune.domain.version import Release


@dataclass(frozen=True, slots=True)
class CompilerFailure:
    """A family of launches that some Triton versions cannot compile.

    Attributes:
        text: which launches, and what happens.
        block_size_n_over_block_size_k: the quotient that the tile has, None for any.
        min_rows_per_warp: rows of the tile for each warp, at least.
        operand_bits: bits of the operands of the dot, weights converted.
        compute_capability: lowest and highest that were seen to fail.
        seen: releases that fail, oldest first.
        absent: releases that do not.
    """

    name: str
    text: str
    block_size_n_over_block_size_k: float | None
    min_rows_per_warp: int
    operand_bits: tuple[int, ...]
    compute_capability: tuple[tuple[int, int], tuple[int, int]]
    seen: tuple[Release, ...]
    absent: tuple[Release, ...]

    def affects(self, launch: Launch, compute_capability: tuple[int, int], triton: Release) -> bool:
        """Whether this launch fails with that Triton release.

        A release between two that fail fails too, and so does a later one of the same minor version. Of the
        kernels for weights in groups vLLM's fails and SGLang's does not: nothing is said of them. A launch
        that adds to its output, or reads or writes rows in sorted order, does not fail.
        """
        config = launch.config
        quotient = self.block_size_n_over_block_size_k
        return (
            self.seen[0][:2] <= triton[:2] <= self.seen[-1][:2]
            and triton not in self.absent
            and self.compute_capability[0] <= compute_capability <= self.compute_capability[1]
            and launch.a_bits in self.operand_bits
            and not launch.grouped
            and not (launch.sum_topk or launch.sorted_input or launch.sorted_output)
            and config.block_size_m >= self.min_rows_per_warp * config.num_warps
            and (quotient is None or config.block_size_n == quotient * config.block_size_k)
        )


@lru_cache(maxsize=1)
def compiler_failures() -> tuple[CompilerFailure, ...]:
    """The failures that are known."""
    name = "compiler_failures.json"
    text = resources.files("moetune.domain").joinpath("data").joinpath(name).read_text("utf-8")
    return tuple(
        CompilerFailure(
            name=entry["name"],
            text=entry["text"],
            block_size_n_over_block_size_k=entry["conditions"].get("block_size_n_over_block_size_k"),
            min_rows_per_warp=entry["conditions"]["min_rows_per_warp"],
            operand_bits=tuple(entry["conditions"]["operand_bits"]),
            compute_capability=(
                tuple(entry["min_compute_capability"]),
                tuple(entry["max_compute_capability"]),
            ),
            seen=tuple(sorted(map(parse_release, entry["seen_in_triton"]))),
            absent=tuple(sorted(map(parse_release, entry["absent_in_triton"]))),
        )
        for entry in load_json_object(text, name)["failures"]
    )

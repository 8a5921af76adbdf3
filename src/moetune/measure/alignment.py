"""Sorting slots by expert: what turns a routing into blocks that one program can multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ELSEWHERE = -1
"""Expert number of a slot whose expert another rank holds."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """A routing sorted by expert, each expert padded to whole tiles of BLOCK_SIZE_M rows.

    Attributes:
        slot_ids: `[P]` int32, the slots of each expert together; padding holds the number of
            slots, which is no slot.
        tile_experts: `[P / block_size_m]` int32, the expert of each tile, ELSEWHERE for tiles of
            experts that another rank holds.
        used_length: `[1]` int32, how much of P this routing fills.
    """

    slot_ids: torch.Tensor
    tile_experts: torch.Tensor
    used_length: torch.Tensor

    @property
    def padded_length(self) -> int:
        """P, which the launch grid covers whatever the routing fills of it."""
        return int(self.slot_ids.numel())


def padded_length(slots: int, experts: int, block_size_m: int, multiple_of: int = 1) -> int:
    """The longest that any routing of so many slots can get, rounded up to a multiple.

    Every slot alone in its tile is the worst case while there are fewer slots than groups, where
    the slots of other ranks' experts are one group more; after that each group can waste
    `block_size_m - 1` rows. It is SGLang's bound (sglang 0.5.23 wheel,
    srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py), which rounds to 4.
    """
    groups = experts + 1
    longest = slots * block_size_m if slots < groups else slots + groups * (block_size_m - 1)
    return -(-longest // multiple_of) * multiple_of


def align(
    expert_of_slot: torch.Tensor,
    experts: int,
    block_size_m: int,
    multiple_of: int = 1,
    *,
    length: int | None = None,
) -> Alignment:
    """Sort slots by expert and pad each expert to whole tiles, with no loop over experts.

    No size depends on the data and nothing waits for the device, so that a CUDA graph can hold it.

    Args:
        expert_of_slot: `[M, topk]` or `[S]` integers below `experts`, or ELSEWHERE.
        experts: E, experts of this rank.
        block_size_m: rows of a tile.
        multiple_of: what P is rounded up to.
        length: P itself, when something else decides about it.
    """
    device = expert_of_slot.device
    group = expert_of_slot.reshape(-1).long() + 1  # ELSEWHERE is the first group
    slots = group.numel()
    if length is None:
        length = padded_length(slots, experts, block_size_m, multiple_of)

    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    padded = (counts + block_size_m - 1) // block_size_m * block_size_m
    ends = padded.cumsum(0)
    first_padded = ends - padded
    first_sorted = counts.cumsum(0) - counts

    group_sorted, by_group = torch.sort(group, stable=True)
    rank_in_group = torch.arange(slots, device=device) - first_sorted[group_sorted]
    slot_ids = torch.full((length,), slots, dtype=torch.int32, device=device)
    slot_ids[first_padded[group_sorted] + rank_in_group] = by_group.int()

    first_rows = torch.arange(-(-length // block_size_m), device=device) * block_size_m
    # The group whose padded rows a tile begins in; past the last one, no group.
    tile_groups = torch.searchsorted(ends, first_rows, right=True)
    tile_experts = torch.where(tile_groups <= experts, tile_groups - 1, ELSEWHERE).int()
    return Alignment(slot_ids, tile_experts, ends[-1:].int())


def each_alone(expert_of_slot: torch.Tensor, block_size_m: int) -> Alignment:
    """Every slot in a tile of its own, in the order in which they are: what vLLM does with few of them.

    An expert's weights are then read once for each of its slots.

    Args:
        expert_of_slot: as for `align`.
        block_size_m: rows of a tile.
    """
    experts = expert_of_slot.reshape(-1)
    slots = experts.numel()
    slot_ids = torch.full((slots, block_size_m), slots, dtype=torch.int32, device=experts.device)
    slot_ids[:, 0] = torch.arange(slots, dtype=torch.int32, device=experts.device)
    used = torch.full((1,), slots * block_size_m, dtype=torch.int32, device=experts.device)
    return Alignment(slot_ids.reshape(-1), experts.int(), used)


def places_of_slots(alignment: Alignment, slots: int) -> torch.Tensor:
    """Where each slot stands among the sorted and padded ones."""
    ids = alignment.slot_ids
    # Padding, which is no slot, lands behind the last one.
    places = torch.zeros(slots + 1, dtype=torch.int64, device=ids.device)
    places[ids.long()] = torch.arange(ids.numel(), device=ids.device)
    return places[:slots]


def in_order(rows: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of slots in sorted order; rows of padding hold NaN, or 1 where a type has none."""
    filler = float("nan") if rows.dtype.is_floating_point else 1
    found = torch.full((length, *rows.shape[1:]), filler, device=rows.device).to(rows.dtype)
    found[places] = rows
    return found

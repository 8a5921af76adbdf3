"""What stands between the two grouped GEMMs of a layer: activation, and quantization by groups of columns.

The servers have one fused kernel for each (`silu_and_mul`, `per_token_group_quant`), and so has the layer
that is timed here: a chain of torch's own kernels would take several times as long as theirs, and where rows
lie in sorted order the padding between them would be paid for as often. Imports Triton only.

Symbols as in kernels.py. Rows in sorted order may be padding: with `slot_ids` given, rows that no slot of
this rank has are left out, as SGLang does from 0.5.22 on.
"""

# Kernel parameters are Triton's tensors and constants: they have no Python types. What is None is decided
# when the kernel is compiled, before a condition on values.
# ruff: noqa: ANN001, ANN201, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from moetune.measure.alignment import Alignment

HELPERS = frozenset({"activate_rows", "quantize_groups"})
"""Kernels that belong to no config."""

_COLUMNS = 1024
_EPSILON = 1e-10


@triton.jit
def has_slot(row, slot_ids_ptr, tile_expert_ptr, used_length_ptr, num_slots, block_size_m):
    """Whether a row in sorted order belongs to a slot whose expert is here."""
    is_used = row < tl.load(used_length_ptr)
    slot = tl.load(slot_ids_ptr + row, mask=is_used, other=num_slots)
    expert = tl.load(tile_expert_ptr + row // block_size_m, mask=is_used, other=-1)
    return (slot < num_slots) & (expert != -1)


@triton.jit
def activate_rows(
    wide_ptr,  # [R, 2C] gate and up, or [R, C]
    narrow_ptr,  # [R, C]
    slot_ids_ptr,  # [P], None: every row
    tile_expert_ptr,
    used_length_ptr,
    num_slots,
    block_size_m,
    columns,
    gated: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`silu(gate) * up`, or `silu` of all."""
    row = tl.program_id(0).to(tl.int64)
    if slot_ids_ptr is not None:
        if not has_slot(row, slot_ids_ptr, tile_expert_ptr, used_length_ptr, num_slots, block_size_m):
            return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    wide_columns = 2 * columns if gated else columns
    gate = tl.load(wide_ptr + row * wide_columns + column, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate)
    if gated:
        value *= tl.load(wide_ptr + row * wide_columns + columns + column, mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(narrow_ptr + row * columns + column, value.to(narrow_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_groups(
    x_ptr,  # [R, C]
    q_ptr,  # [R, C] fp8 or int8
    scale_ptr,  # [R, ceil(C / group_size)] fp32
    slot_ids_ptr,  # [P], None: every row
    tile_expert_ptr,
    used_length_ptr,
    num_slots,
    block_size_m,
    columns,
    largest,
    epsilon: tl.constexpr,
    group_size: tl.constexpr,
    GROUP: tl.constexpr,  # group_size rounded up to a power of two
):
    """A scale for each group of columns of a row: its largest number becomes the type's largest."""
    row = tl.program_id(0).to(tl.int64)
    if slot_ids_ptr is not None:
        if not has_slot(row, slot_ids_ptr, tile_expert_ptr, used_length_ptr, num_slots, block_size_m):
            return
    group = tl.program_id(1)
    place = tl.arange(0, GROUP)
    column = group * group_size + place
    mask = (place < group_size) & (column < columns)
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)), epsilon) / largest
    units = tl.clamp(x / scale, -largest, largest)
    if q_ptr.dtype.element_ty.is_int():
        units = tl.floor(units + 0.5)
    tl.store(q_ptr + row * columns + column, units.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row * tl.num_programs(1) + group, scale)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of sorted and padded slots, of which those are meant that are no padding.

    Attributes:
        alignment: the slots.
        slots: how many there are.
        block_size_m: rows of a tile.
    """

    alignment: Alignment
    slots: int
    block_size_m: int


def activate(
    wide: torch.Tensor, narrow: torch.Tensor, *, gated: bool, only: SortedRows | None = None
) -> None:
    """Activate the rows of `wide`.

    Args:
        wide: `[R, 2C]`, or `[R, C]` where experts are not gated.
        narrow: `[R, C]`, written.
        gated: the first half of a row is the gate of the second.
        only: leave out what is padding among these; None: every row.
    """
    rows, columns = narrow.shape
    activate_rows[(rows, triton.cdiv(columns, _COLUMNS))](
        wide, narrow, *_filter(only), columns, gated=gated, COLUMNS=_COLUMNS, num_warps=4
    )


def quantize(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int,
    largest: float,
    only: SortedRows | None = None,
) -> None:
    """Quantize the rows of `x` by groups of columns.

    Args:
        x: `[R, C]`.
        values: `[R, C]`, written.
        scales: `[R, ceil(C / group_size)]`, written.
        group_size: columns that share a scale.
        largest: number of the type of `values`.
        only: as in `activate`.
    """
    quantize_groups[(x.shape[0], scales.shape[1])](
        x,
        values,
        scales,
        *_filter(only),
        x.shape[1],
        largest,
        epsilon=_EPSILON,
        group_size=group_size,
        GROUP=triton.next_power_of_2(group_size),
        num_warps=1,
    )


def _filter(only: SortedRows | None) -> tuple[torch.Tensor | int | None, ...]:
    if only is None:
        return None, None, None, 0, 0
    ids = only.alignment
    return ids.slot_ids, ids.tile_experts, ids.used_length, only.slots, only.block_size_m

"""Which value each parameter of a server's fused-MoE kernels gets, by the parameter's name.

The signatures of both servers changed many times; the meaning of a name did not. So one table of names
serves every release, and the kernel that is really there says which of them it wants. What one server
alone has stands in that server's package.

Sources: `invoke_fused_moe_kernel` of the sglang 0.4.9 to 0.5.23 wheels (module homes in sglang/kernels.py)
and of the vllm 0.10.2 to 0.13.0 wheels, `invoke_fused_moe_triton_kernel` and
`invoke_fused_moe_wna16_triton_kernel` of those to 0.33.0 (`fused_moe.py`). Held against the calls of these
functions themselves by tests/servers/test_kernel_values.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError
from moetune.domain.kernel_format import Scales
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moetune.domain.compilation import CompileTask

PLAIN, GROUPED = "fused_moe_kernel", "fused_moe_kernel_gptq_awq"
"""The kernels' names, the same in both servers; the second has weights with scales by group."""


class Part(str, Enum):
    """A tensor that a kernel gets."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"
    OUTPUT = "output"
    BIAS = "bias"
    ACTIVATION_SCALES = "activation scales"
    WEIGHT_SCALES = "weight scales"
    WEIGHT_ZEROS = "weight zeros"
    ROUTING_WEIGHTS = "routing weights"
    SLOT_IDS = "slot ids"
    TILE_EXPERTS = "tile experts"
    USED_LENGTH = "used length"


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor, and Triton's name of the type of what it holds."""

    part: Part
    type: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor whose tiles are loaded through a descriptor: the tensor, Triton's name of its type, a tile."""

    part: Part
    type: str
    tile: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TypeConstant:
    """A type as a compile-time constant, by Triton's name: `bf16`."""

    type: str


Value = Pointer | Descriptor | TypeConstant | int | bool | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """What differs from call to call.

    Attributes:
        covered: rows that the grid covers (`EM`).
        slots: tokens times topk.
    """

    covered: int
    slots: int


def function_name(task: CompileTask) -> str:
    """The kernel that a task launches."""
    return GROUPED if task.grouped else PLAIN


def values_of(
    names: Iterable[str], own: Mapping[str, Value], task: CompileTask, lengths: Lengths
) -> dict[str, Value]:
    """The value of each parameter of a kernel.

    Args:
        names: the kernel's parameters, in their order.
        own: values of the names that one server alone has.
        task: the launch.
        lengths: of this call.

    Raises:
        ServerError: for a parameter that no release had that was read.
    """
    known = {**_operands(task), **_sizes(task, lengths), **_constants(task), **own}
    wanted = list(names)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ServerError(
            f"the server's {function_name(task)} has the parameter {printable(', '.join(unknown), 200)}, "
            "which moetune does not know: it may change what is computed",
            "time moetune's own kernel instead: add --kernel own",
        )
    return {name: known[name] for name in wanted}


def _operands(task: CompileTask) -> dict[str, Value]:
    scaled = task.launch.block_k > 0 or task.scales is not Scales.NONE
    weight_scale_type = task.output_type if task.grouped else "fp32"
    return {
        "a_ptr": Pointer(Part.ACTIVATIONS, task.operand_type),
        "b_ptr": Pointer(Part.WEIGHTS, task.weight_type or task.operand_type),
        "c_ptr": Pointer(Part.OUTPUT, task.output_type),
        "a_scale_ptr": Pointer(Part.ACTIVATION_SCALES, "fp32") if task.quantizes_activations else None,
        "b_scale_ptr": Pointer(Part.WEIGHT_SCALES, weight_scale_type) if scaled else None,
        "b_zp_ptr": Pointer(Part.WEIGHT_ZEROS, "u8") if task.zero_point else None,
        "topk_weights_ptr": Pointer(Part.ROUTING_WEIGHTS, "fp32"),
        "sorted_token_ids_ptr": Pointer(Part.SLOT_IDS, "i32"),
        "expert_ids_ptr": Pointer(Part.TILE_EXPERTS, "i32"),
        "num_tokens_post_padded_ptr": Pointer(Part.USED_LENGTH, "i32"),
    }


def bias_values(task: CompileTask, pointer: str, by_expert: str, by_column: str) -> dict[str, Value]:
    """The bias under the names that a server gives it."""
    return {
        pointer: Pointer(Part.BIAS, task.output_type) if task.bias else None,
        by_expert: task.n if task.bias else 0,
        by_column: 1 if task.bias else 0,
    }


def _sizes(task: CompileTask, lengths: Lengths) -> dict[str, Value]:
    per_byte = 8 // task.launch.b_bits if task.grouped else 1
    packed_k = -(-task.k // per_byte)
    return {
        "N": task.n,
        "K": task.k,
        "EM": lengths.covered,
        "num_valid_tokens": lengths.slots,
        "stride_am": task.k,
        "stride_ak": 1,
        "stride_be": task.n * packed_k,
        "stride_bk": 1,
        "stride_bn": packed_k,
        "stride_cm": task.n,
        "stride_cn": 1,
        **_scale_strides(task),
        **_zero_strides(task, per_byte),
    }


def _scale_strides(task: CompileTask) -> dict[str, Value]:
    """By row or expert, by group along K, by column; nothing where one number is for all or for an expert."""
    if task.launch.block_k:
        groups, blocks = -(-task.k // task.launch.block_k), -(-task.n // task.block_n)
        return _strides(groups, 1, blocks * groups, 1, groups)
    if task.scales is Scales.GROUP:
        groups = -(-task.k // task.group_size)
        return _strides(0, 0, task.n * groups, 1, groups)
    if task.scales is Scales.CHANNEL:
        by_row = int(task.quantizes_activations)
        return _strides(by_row, by_row, task.n, 1, 1)
    return _strides(0, 0, 0, 0, 0)


def _strides(by_row: int, of_row: int, by_expert: int, by_group: int, by_column: int) -> dict[str, Value]:
    return {
        "stride_asm": by_row,
        "stride_ask": of_row,
        "stride_bse": by_expert,
        "stride_bsk": by_group,
        "stride_bsn": by_column,
    }


def _zero_strides(task: CompileTask, per_byte: int) -> dict[str, Value]:
    groups = -(-task.k // task.group_size) if task.zero_point else 0
    return {
        "stride_bze": -(-task.n // per_byte) * groups,
        "stride_bzk": int(task.zero_point),
        "stride_bzn": groups,
    }


def _constants(task: CompileTask) -> dict[str, Value]:
    launch, config = task.launch, task.launch.config
    weights_only = bool(task.weight_type)
    eight_bits = launch.a_bits == launch.b_bits == 8
    return {
        "group_n": task.block_n,
        "group_k": launch.block_k,
        "group_size": task.group_size,
        "has_zp": task.zero_point,
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
        "MUL_ROUTED_WEIGHT": launch.kernel == "down",
        "top_k": task.top_k,
        "compute_type": TypeConstant(task.output_type),
        "use_fp8_w8a8": eight_bits and not launch.integers,
        "use_int8_w8a8": eight_bits and launch.integers,
        "use_int8_w8a16": weights_only and launch.b_bits == 8,
        "use_int4_w4a16": weights_only and launch.b_bits == 4,
        "per_channel_quant": task.scales is Scales.CHANNEL and not weights_only,
    }


def divides(task: CompileTask) -> bool:
    """Whether K is a multiple of BLOCK_SIZE_K."""
    return task.k % task.launch.config.block_size_k == 0

"""How the operands of a problem's grouped GEMMs lie in memory, where moetune's own kernels have it.

Sources of the rules: sglang 0.5.23 wheel, `fused_moe_triton_kernels.py:invoke_fused_moe_kernel`, and
vllm 0.33.0 wheel, `fused_moe.py`: which kernel, which scales; `moe_wna16.py:create_weights` of sglang:
groups that divide both sizes (vllm dies where a group does not divide them).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from moetune.domain.quantization import Dtype

if TYPE_CHECKING:
    from moetune.domain.problem import Problem


class Scales(str, Enum):
    """Which numbers share a scale."""

    NONE = "none"
    BLOCK = "block"
    """Weights: a block of rows and columns; activations: as many columns of one row."""
    TENSOR = "tensor"
    """Weights: an expert; activations: all."""
    CHANNEL = "channel"
    """Weights: an output channel; activations: a row, where they are quantized."""
    GROUP = "group"
    """Weights: a group along K; activations are not quantized."""


@dataclass(frozen=True, slots=True)
class KernelFormat:
    """Types, as Triton names them, and scales.

    Attributes:
        operand_type: of the activations.
        weight_type: of the weights in memory; `u8` holds one or two unsigned weights.
        output_type: of the output.
        scales: which numbers share a scale.
        block_shape: `(block_n, block_k)` of block scales, else zeros.
        group_size: weights along K that share a scale, 0 without groups.
        weight_bits: of one weight.
        zero_point: groups have a zero point of their own.
        static_activation: the scale of the activations is in the checkpoint.
    """

    operand_type: str
    weight_type: str
    output_type: str
    scales: Scales = Scales.NONE
    block_shape: tuple[int, int] = (0, 0)
    group_size: int = 0
    weight_bits: int = 16
    zero_point: bool = False
    static_activation: bool = False

    @property
    def quantizes_activations(self) -> bool:
        """Whether activations have scales."""
        return self.scales is not Scales.NONE and self.operand_type == self.weight_type


_FLOATS = {Dtype.BF16: "bf16", Dtype.FP16: "fp16"}
_EIGHT_BITS = {Dtype.FP8_W8A8: "fp8e4nv", Dtype.INT8_W8A8: "i8"}
_WEIGHTS_ONLY = (Dtype.INT8_W8A16, Dtype.INT4_W4A16)
_SMALLEST_GROUP = 32


def kernel_format(problem: Problem) -> KernelFormat | str:
    """The format of a problem, or why moetune's own kernels do not have it."""
    activation, quantization = problem.activation_dtype, problem.quantization
    dtype = quantization.dtype
    if activation not in _FLOATS or dtype not in (*_FLOATS, *_EIGHT_BITS, *_WEIGHTS_ONLY):
        unknown = dtype if activation in _FLOATS else activation
        return f"moetune's own kernel has no {unknown.value}"
    output = _FLOATS[activation]
    if dtype in _FLOATS:
        return KernelFormat(output, output, output)
    if dtype in _EIGHT_BITS:
        return _eight_bits(problem, _EIGHT_BITS[dtype], output)
    return _weights_only(problem, output)


def _eight_bits(problem: Problem, operand: str, output: str) -> KernelFormat | str:
    quantization = problem.quantization
    static = quantization.dynamic_activation is False
    if quantization.block_shape is not None:
        scales, block_shape = Scales.BLOCK, quantization.block_shape
    elif quantization.per_channel:
        scales, block_shape = Scales.CHANNEL, (0, 0)
    else:
        scales, block_shape = Scales.TENSOR, (0, 0)
    if static and scales is not Scales.TENSOR:
        return f"moetune's own kernel has static activation scales by tensor only, not by {scales.value}"
    return KernelFormat(
        operand, operand, output, scales, block_shape, weight_bits=8, static_activation=static
    )


def _weights_only(problem: Problem, output: str) -> KernelFormat | str:
    quantization = problem.quantization
    bits = quantization.dtype.weight_bits
    if problem.bias:
        # The servers' kernel for groups has none, and their kernel for channels adds it to no such weights.
        return f"moetune's own kernel has no bias with {quantization.dtype.value}"
    if not quantization.group_size or quantization.group_size < 0:
        if bits == 8:
            return KernelFormat(output, "i8", output, Scales.CHANNEL, weight_bits=8)
        return "moetune's own kernel has int4 with groups only"
    size = whole_groups(quantization.group_size, problem.K, problem.N)
    if size is None:
        return (
            f"moetune's own kernel has whole groups only, and K {problem.K} and N {problem.N} are none of "
            f"{quantization.group_size}, nor of a half, a quarter, ... of it down to {_SMALLEST_GROUP}"
        )
    return KernelFormat(
        output,
        "u8",
        output,
        Scales.GROUP,
        group_size=size,
        weight_bits=bits,
        zero_point=quantization.zero_point,
    )


def whole_groups(group_size: int, *sizes: int) -> int | None:
    """The group size that the servers use: halved until it divides the sizes; None: there is none."""
    while any(size % group_size for size in sizes):
        group_size //= 2
        if group_size < _SMALLEST_GROUP:
            return None
    return group_size

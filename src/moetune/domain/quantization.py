"""How the expert weights of a checkpoint are quantized, in the servers' own terms."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dtype(str, Enum):
    """Weight and activation types of the expert GEMMs, named as the servers tag them."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_W8A8 = "fp8_w8a8"
    FP8_W8A16 = "fp8_w8a16"
    INT8_W8A8 = "int8_w8a8"
    INT8_W8A16 = "int8_w8a16"
    INT4_W4A16 = "int4_w4a16"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT4_W4AFP8 = "int4_w4afp8"
    GGUF = "gguf"
    BITSANDBYTES = "bitsandbytes"

    @property
    def weight_bits(self) -> int:
        """Bits of one weight as it lies in memory."""
        return _WEIGHT_BITS[self]

    @property
    def activation_bits(self) -> int:
        """Bits of one activation as the kernel reads it."""
        return _ACTIVATION_BITS[self]


_WEIGHT_BITS = {
    Dtype.BF16: 16,
    Dtype.FP16: 16,
    Dtype.FP32: 32,
    Dtype.FP8_W8A8: 8,
    Dtype.FP8_W8A16: 8,
    Dtype.INT8_W8A8: 8,
    Dtype.INT8_W8A16: 8,
    Dtype.INT4_W4A16: 4,
    Dtype.MXFP4: 4,
    Dtype.MXFP8: 8,
    Dtype.NVFP4: 4,
    Dtype.INT4_W4AFP8: 4,
    Dtype.GGUF: 4,
    Dtype.BITSANDBYTES: 4,
}
_ACTIVATION_BITS = dict.fromkeys(Dtype, 16) | {
    Dtype.FP32: 32,
    Dtype.FP8_W8A8: 8,
    Dtype.INT8_W8A8: 8,
    Dtype.MXFP8: 8,
    Dtype.NVFP4: 4,
    Dtype.INT4_W4AFP8: 8,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of one expert layer.

    Attributes:
        dtype: type of weights and activations in the expert GEMMs.
        method: the checkpoint's own word (`fp8`, `compressed-tensors`, `awq`, `gptq`,
            `modelopt`, ...), `none` when it is not quantized.
        block_shape: `(block_n, block_k)` of block-wise weight scales, None without.
        group_size: weights that share one scale along K (w4a16, w8a16), None without.
        per_channel: one weight scale for each output channel.
        dynamic_activation: activations are quantized at run time (True), with scales from the
            checkpoint (False), or not at all (None).
        zero_point: asymmetric weights.
    """

    dtype: Dtype = Dtype.BF16
    method: str = "none"
    block_shape: tuple[int, int] | None = None
    group_size: int | None = None
    per_channel: bool = False
    dynamic_activation: bool | None = None
    zero_point: bool = False

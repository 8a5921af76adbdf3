"""Quantizations as a person names them (`--quant`), in the servers' own words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.errors import ModelError
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_values import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_STATIC,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NVFP4,
)
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

_FP8_DYNAMIC = Quantization(dtype=Dtype.FP8_W8A8, dynamic_activation=True)
_INT4 = Quantization(dtype=Dtype.INT4_W4A16, group_size=128)
_INT8_GROUPS = Quantization(dtype=Dtype.INT8_W8A16, group_size=128)
_INT8_WEIGHTS = Quantization(dtype=Dtype.INT8_W8A16, per_channel=True)
_W4AFP8 = Quantization(dtype=Dtype.INT4_W4AFP8, group_size=128, dynamic_activation=True)


def _named(method: str, quantization: Quantization) -> Quantization:
    return replace(quantization, method=method)


# A dtype tag of a file name (fp8_w8a8, int4_w4a16, ...) stands for the method under which the
# Triton kernel of both servers writes that tag (`get_config_dtype_str`, sglang 0.5.23 and vllm 0.33.0).
# With int8 weights alone that is moe_wna16, which knows groups only (`create_weights` of both); a scale a
# channel is what vLLM's experts_int8 makes while it loads.
QUANTIZATION_NAMES: Mapping[str, Quantization] = {
    "bf16": Quantization(dtype=Dtype.BF16),
    "bfloat16": Quantization(dtype=Dtype.BF16),
    "fp16": Quantization(dtype=Dtype.FP16),
    "float16": Quantization(dtype=Dtype.FP16),
    "half": Quantization(dtype=Dtype.FP16),
    "fp32": Quantization(dtype=Dtype.FP32),
    "float32": Quantization(dtype=Dtype.FP32),
    "fp8": _named("fp8", _FP8_DYNAMIC),
    "fp8-tensor": _named("fp8", _FP8_DYNAMIC),
    "fp8-static": _named("fp8", FP8_STATIC),
    "fp8_w8a8": _named("fp8", _FP8_DYNAMIC),
    "fp8-block": _named("fp8", FP8_BLOCK),
    "fp8-channel": _named("compressed-tensors", FP8_CHANNEL),
    "fp8_w8a16": _named("compressed-tensors", Quantization(dtype=Dtype.FP8_W8A16)),
    "w8a8_fp8": _named("w8a8_fp8", FP8_CHANNEL),
    "ptpc_fp8": _named("ptpc_fp8", FP8_CHANNEL),
    "fbgemm_fp8": _named("fbgemm_fp8", FP8_CHANNEL),
    "modelopt_fp8": _named("modelopt", FP8_STATIC),
    "int8": _named("w8a8_int8", INT8_CHANNEL),
    "int8_w8a8": _named("w8a8_int8", INT8_CHANNEL),
    "int8-channel": _named("compressed-tensors", INT8_CHANNEL),
    "w8a8_int8": _named("w8a8_int8", INT8_CHANNEL),
    "int8-block": _named(
        "blockwise_int8",
        Quantization(dtype=Dtype.INT8_W8A8, block_shape=(128, 128), dynamic_activation=True),
    ),
    "blockwise_int8": _named(
        "blockwise_int8",
        Quantization(dtype=Dtype.INT8_W8A8, block_shape=(128, 128), dynamic_activation=True),
    ),
    "int8_w8a16": _named("moe_wna16", _INT8_GROUPS),
    "int8_w8a16-asym": _named("moe_wna16", replace(_INT8_GROUPS, zero_point=True)),
    "int8_w8a16-channel": _named("experts_int8", _INT8_WEIGHTS),
    "experts_int8": _named("experts_int8", _INT8_WEIGHTS),
    "int4": _named("moe_wna16", _INT4),
    "int4_w4a16": _named("moe_wna16", _INT4),
    "int4-asym": _named("moe_wna16", replace(_INT4, zero_point=True)),
    "moe_wna16": _named("moe_wna16", _INT4),
    "awq": _named("awq", replace(_INT4, zero_point=True)),
    "awq_marlin": _named("awq_marlin", replace(_INT4, zero_point=True)),
    "gptq": _named("gptq", _INT4),
    "gptq-int8": _named("gptq", _INT8_GROUPS),
    "gptq_marlin": _named("gptq_marlin", _INT4),
    "w4afp8": _named("w4afp8", _W4AFP8),
    "int4_w4afp8": _named("w4afp8", _W4AFP8),
    "mxfp4": _named("mxfp4", MXFP4),
    "mxfp8": _named("mxfp8", MXFP8),
    "nvfp4": _named("modelopt", NVFP4),
    "modelopt_fp4": _named("modelopt", NVFP4),
    "gguf": _named("gguf", Quantization(dtype=Dtype.GGUF)),
    "bitsandbytes": _named("bitsandbytes", Quantization(dtype=Dtype.BITSANDBYTES)),
}

_GRAMMAR = re.compile(r"([a-z0-9_-]{1,32})(?:\[ ?(\d{1,5})(?:, ?(\d{1,5}))? ?\])?", re.A)
_TAKES_BLOCK = frozenset(
    {"fp8", "fp8_w8a8", "fp8-block", "int8", "int8_w8a8", "int8-block", "blockwise_int8"}
)
_TAKES_GROUP = frozenset({Dtype.INT4_W4A16, Dtype.INT8_W8A16, Dtype.INT4_W4AFP8})


def parse_quantization(text: str) -> Quantization:
    """Read the name of a quantization: `bf16`, `fp8-block[128,128]`, `int8_w8a16[64]`, `awq`, ...

    Two numbers in brackets are the block of the weight scales, one is the group along K.

    Raises:
        ModelError: for a name that is not known, or numbers that do not belong to it.
    """
    match = _GRAMMAR.fullmatch(text.strip().lower())
    named = QUANTIZATION_NAMES.get(match.group(1)) if match else None
    if match is None or named is None:
        raise ModelError(
            f"{printable(text, 60)!r} is no quantization that is known",
            f"one of: {', '.join(QUANTIZATION_NAMES)}; with a block as in fp8-block[128,128] or a group "
            "as in int4_w4a16[32]",
        )
    name, first, second = match.groups()
    if first is None:
        return named
    sizes = [int(size) for size in (first, second) if size is not None]
    if 0 in sizes:
        raise ModelError(f"{printable(text, 60)!r} has a size of 0")
    if len(sizes) == 2 and name in _TAKES_BLOCK:
        method = "blockwise_int8" if named.dtype is Dtype.INT8_W8A8 else named.method
        return replace(named, method=method, block_shape=(sizes[0], sizes[1]), per_channel=False)
    if len(sizes) == 1 and named.group_size and named.dtype in _TAKES_GROUP:
        return replace(named, group_size=sizes[0])
    raise ModelError(
        f"{printable(text, 60)!r}: {name} takes no {'block' if len(sizes) == 2 else 'group size'}",
        "a block belongs to fp8-block and int8-block, a group size to the int4 and int8 weight-only methods",
    )

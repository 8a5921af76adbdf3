"""Facts that the runner rules of both servers ask about: the quantization in one word, environment flags.

A scheme is the checkpoint's method and the arithmetic together, since servers choose by both: fp8 with
block scales from an `fp8` checkpoint is `fp8-block`, from compressed-tensors `ct-fp8-block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.quantization import Dtype, Quantization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.gpu import Gpu

UNKNOWN_SCHEME = "unknown"

# What `--quantization` may say about a checkpoint of that method without changing it.
_SAME_METHOD: Mapping[str, frozenset[str]] = {
    "awq": frozenset({"awq", "awq_marlin", "auto_awq", "marlin"}),
    "gptq": frozenset({"gptq_marlin", "auto_gptq", "marlin"}),
    "modelopt": frozenset({"modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"}),
    "mxfp4": frozenset({"mxfp4", "gpt_oss_mxfp4"}),
}
_CHECKPOINT_METHODS: Mapping[str, str] = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "modelopt_fp8": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
}
# Weights of a 16-bit checkpoint quantized while they are loaded.
_ONLINE: Mapping[str, str] = {
    "fp8": "fp8-tensor-dynamic",
    "fp8_per_tensor": "fp8-tensor-dynamic",
    "fp8_per_block": "fp8-block",
    "mxfp8": "mxfp8",
    "w8a8_fp8": "w8a8-fp8",
    "w8a8_int8": "w8a8-int8",
    "experts_int8": "experts-int8",
    "bitsandbytes": "bitsandbytes",
    "nvfp4_online": "nvfp4",
}
_WEIGHT_ONLY = frozenset({Dtype.INT4_W4A16, Dtype.INT8_W8A16})
_BY_METHOD: Mapping[tuple[Dtype, str], str] = {
    (Dtype.FP8_W8A8, "w8a8_fp8"): "w8a8-fp8",
    (Dtype.INT8_W8A8, "w8a8_int8"): "w8a8-int8",
    (Dtype.INT8_W8A8, "blockwise_int8"): "blockwise-int8",
    (Dtype.INT8_W8A8, "compressed-tensors"): "ct-int8",
    (Dtype.INT8_W8A16, "experts_int8"): "experts-int8",
    (Dtype.MXFP4, "mxfp4"): "mxfp4",
    (Dtype.MXFP4, "fp8"): "fp8-mxfp4-experts",
    (Dtype.MXFP4, "compressed-tensors"): "ct-mxfp4",
    (Dtype.NVFP4, "modelopt"): "nvfp4",
    (Dtype.NVFP4, "fp8"): "nvfp4",
    (Dtype.NVFP4, "compressed-tensors"): "ct-nvfp4",
    (Dtype.INT4_W4A16, "awq"): "awq",
    (Dtype.INT4_W4A16, "gptq"): "gptq",
    (Dtype.INT8_W8A16, "gptq"): "gptq",
    (Dtype.INT4_W4A16, "compressed-tensors"): "ct-wna16",
    (Dtype.INT8_W8A16, "compressed-tensors"): "ct-wna16",
    (Dtype.INT4_W4A16, "moe_wna16"): "moe_wna16",
    (Dtype.INT8_W8A16, "moe_wna16"): "moe_wna16",
}
_BY_DTYPE: Mapping[Dtype, str] = {
    Dtype.BF16: "bf16",
    Dtype.FP16: "bf16",
    Dtype.FP32: "bf16",
    Dtype.MXFP8: "mxfp8",
    Dtype.INT4_W4AFP8: "w4afp8",
    Dtype.GGUF: "gguf",
    Dtype.BITSANDBYTES: "bitsandbytes",
}
# Prefix of the fp8 schemes, by the checkpoint's method.
_FP8_PREFIX: Mapping[str, str] = {
    "fp8": "fp8",
    "none": "fp8",
    "compressed-tensors": "ct-fp8",
    "modelopt": "modelopt-fp8",
    "quark": "quark-fp8",
}


def scheme(quantization: Quantization, requested: str | None) -> str:
    """The quantization in one word; `unknown` for a combination that no rule is written for.

    Args:
        quantization: of the routed experts.
        requested: what `--quantization` says, None without.
    """
    method = _CHECKPOINT_METHODS.get(quantization.method.lower(), quantization.method.lower())
    wanted = requested.lower() if requested else method
    if wanted != method and wanted not in _SAME_METHOD.get(method, frozenset()):
        return _changed(quantization, method, wanted)
    if requested == "gptq" and method == "gptq":
        # Both servers take the explicit word as a refusal of Marlin.
        return "gptq-plain"
    if quantization.dtype is Dtype.FP8_W8A8 and method in _FP8_PREFIX:
        return f"{_FP8_PREFIX[method]}-{_fp8_scales(quantization)}"
    return _BY_METHOD.get((quantization.dtype, method)) or _BY_DTYPE.get(quantization.dtype, UNKNOWN_SCHEME)


def _changed(quantization: Quantization, method: str, wanted: str) -> str:
    if wanted == "moe_wna16" and quantization.dtype in _WEIGHT_ONLY and method in ("awq", "gptq"):
        return "moe_wna16"
    if method == "none" and _BY_DTYPE.get(quantization.dtype) == "bf16":
        return _ONLINE.get(wanted, UNKNOWN_SCHEME)
    return UNKNOWN_SCHEME


def _fp8_scales(quantization: Quantization) -> str:
    if quantization.block_shape is not None:
        return "block"
    if quantization.per_channel:
        return "channel"
    return "tensor-static" if quantization.dynamic_activation is False else "tensor-dynamic"


def flag(environment: Mapping[str, str], name: str) -> bool | None:
    """An environment variable as a server reads a boolean; None when it is not set."""
    value = environment.get(name)
    return None if value is None else value.strip().lower() in ("1", "true", "yes", "on", "y")


def fits_marlin(hidden_size: int, columns: int, group_size: int | None, *, padded: bool) -> bool:
    """Whether the servers' Marlin MoE kernel takes a shape.

    sglang 0.5.23 layers/quantization/marlin_utils.py:check_moe_marlin_supports_layer and vllm 0.33.0
    layers/quantization/utils/marlin_utils.py:check_moe_marlin_supports_config (`allow_tile_padding`).

    Args:
        hidden_size: columns into the up kernel.
        columns: intermediate columns of one rank.
        group_size: weights that share a scale along K, None for one scale a channel.
        padded: the release pads the intermediate columns to a whole tile.
    """
    group = -1 if group_size is None else group_size
    if group not in (-1, 32, 64, 128) or hidden_size % 128:
        return False
    if padded:
        return group <= 0 or columns % group == 0
    return columns % max(64, group) == 0


def compute_capability(gpu: Gpu) -> int | None:
    """120 for compute capability 12.0; 0 for a GPU that has none; None when it is not known."""
    if gpu.compute_capability is not None:
        return gpu.compute_capability[0] * 10 + gpu.compute_capability[1]
    # Only NVIDIA's GPUs have one; without it, what depends on it stays open.
    return None if gpu.vendor.lower() == "nvidia" else 0

"""From the quantization config of a checkpoint to how its routed experts are quantized.

One reader a method, in a table. What a method means to the servers was read from the sglang 0.5.23
and vllm 0.33.0 wheels (`layers/quantization/*`: `from_config` of the class that the method names).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moetune.domain.errors import ModelError
from moetune.domain.expert_modules import ExpertModules
from moetune.domain.module_patterns import PatternError
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_groups import read_compressed_tensors, read_modelopt, read_quark
from moetune.domain.quantization_values import (
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NVFP4,
    QUANT_HINT,
    Config,
    Found,
    block_shape,
    dynamic_activation,
    first,
    group_size,
    texts,
)
from moetune.domain.text import printable

_BITS_TO_WEIGHT_ONLY = {4: Dtype.INT4_W4A16, 8: Dtype.INT8_W8A16}
# Lists of modules that stay unquantized, by the key that each method writes.
_EXCLUSION_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")


@dataclass(frozen=True, slots=True)
class ReadQuantization:
    """What was read.

    Attributes:
        quantization: of the routed experts.
        note: what of the config decided it, for the provenance of the layer.
    """

    quantization: Quantization
    note: str


def read_quantization(
    config: Config | None,
    *,
    experts: ExpertModules | None = None,
    activation_dtype: Dtype = Dtype.BF16,
    expert_dtype: str | None = None,
) -> ReadQuantization:
    """Read how the routed experts are quantized.

    Args:
        config: the checkpoint's `quantization_config` (or the content of ModelOpt's
            hf_quant_config.json); None when it has none.
        experts: where the routed experts stand, for lists that name modules.
        activation_dtype: type of the hidden states, and of the weights where nothing is quantized.
        expert_dtype: the checkpoint's `expert_dtype` key (DeepSeek-V4).

    Raises:
        ModelError: for a method or scheme that is not known, or a config that contradicts itself.
    """
    experts = experts or ExpertModules()
    plain = Quantization(dtype=activation_dtype)
    if not config:
        return ReadQuantization(plain, "no quantization config")
    config = _unwrapped(config)
    method = _method(config)
    reader = METHODS.get(method)
    if reader is None:
        raise ModelError(
            f"the quantization method {printable(method, 60)!r} is not known (known: {', '.join(METHODS)})",
            QUANT_HINT,
        )
    try:
        found = reader(config, experts)
        excluded = _excluded(config, experts, by_targets=method == "compressed-tensors")
    except PatternError as broken:
        raise ModelError(
            f"the quantization config names modules by a pattern that cannot be read: {broken}", QUANT_HINT
        ) from None
    if found is None or excluded is None:
        return ReadQuantization(plain, f"{method}, which leaves the experts out")
    found = _special_experts(found, config, expert_dtype)
    note = f"{method}{found.note}"
    if excluded:
        note += f"; {len(excluded)} layers with experts are left out (first: {min(excluded)})"
    return ReadQuantization(replace(found.quantization, method=method), note)


def names_modelopt_only(config: object) -> bool:
    """Whether a config names ModelOpt and leaves the rest to its hf_quant_config.json."""
    return (
        isinstance(config, Mapping)
        and str(config.get("quant_method", "")).startswith("modelopt")
        and not any(config.get(key) for key in ("quant_algo", "quantization", "config_groups"))
    )


def _unwrapped(config: Config) -> Config:
    """ModelOpt's hf_quant_config.json wraps its config in `quantization`."""
    inner = config.get("quantization")
    if isinstance(inner, Mapping):
        return {"quant_method": config.get("quant_method") or "modelopt", **inner}
    return config


def _method(config: Config) -> str:
    method = config.get("quant_method")
    if method is None and "quant_algo" in config:
        return "modelopt"
    if method is None and "config_groups" in config:
        return "compressed-tensors"
    if not isinstance(method, str) or not method:
        raise ModelError("the quantization config has no quant_method", QUANT_HINT)
    return method.lower()


def _excluded(config: Config, experts: ExpertModules, *, by_targets: bool) -> frozenset[int] | None:
    entries = [entry for key in _EXCLUSION_KEYS for entry in texts(config.get(key), key)]
    if not entries:
        return frozenset()
    return experts.named_by_targets(entries) if by_targets else experts.named_by_paths(entries)


def _special_experts(found: Found, config: Config, expert_dtype: str | None) -> Found:
    """Checkpoints whose routed experts differ from the rest by a key of their own.

    sglang 0.5.23 configs/model_config.py:ModelConfig.__init__ (routed_experts_quant_method,
    store_dtype, moe_quant_algo); vllm 0.33.0 models/deepseek_v41/quant_config.py (expert_dtype).
    The most specific key stands first.
    """
    keys = {
        "moe_quant_algo": config.get("moe_quant_algo"),
        "routed_experts_quant_method": config.get("routed_experts_quant_method"),
        "store_dtype": config.get("store_dtype"),
        "expert_dtype": config.get("expert_dtype", expert_dtype),
    }
    if found.quantization.dtype is not Dtype.FP8_W8A8:
        return found
    for key, value in keys.items():
        if isinstance(value, str) and value.lower() in _EXPERT_DTYPES:
            special = _EXPERT_DTYPES[value.lower()]
            return Found(special, f" with {key} {value.lower()}")
    return found


_EXPERT_DTYPES = {"mxfp4": MXFP4, "fp4": MXFP4, "nvfp4": NVFP4}


# --- methods whose config is flat -------------------------------------------------------------------


def _fp8(config: Config, experts: ExpertModules) -> Found | None:
    if config.get("quant_algo") is not None and config.get("moe_quant_algo") is None:
        return read_modelopt(config, experts)
    return Found(
        Quantization(
            dtype=Dtype.FP8_W8A8,
            block_shape=block_shape(config.get("weight_block_size")),
            dynamic_activation=dynamic_activation(config),
        )
    )


def _int8_block(config: Config, experts: ExpertModules) -> Found:
    del experts
    block = block_shape(config.get("weight_block_size"))
    if block is None:
        raise ModelError("blockwise_int8 without a weight_block_size of two numbers", QUANT_HINT)
    dynamic = dynamic_activation(config)
    return Found(Quantization(dtype=Dtype.INT8_W8A8, block_shape=block, dynamic_activation=dynamic))


def _weight_only(config: Config, experts: ExpertModules) -> Found | None:
    """AWQ, GPTQ, AutoRound and moe_wna16: integer weights, a scale a group, 16-bit activations."""
    bits = first(config, "bits", "w_bit", "weight_bits")
    group = first(config, "group_size", "q_group_size")
    override = _gptq_dynamic(config, experts)
    if override is None:
        return None
    bits, group = override.get("bits", bits), override.get("group_size", group)
    data_type = config.get("data_type", "int")
    if data_type != "int":
        raise ModelError(f"weights of data_type {printable(str(data_type), 40)!r} are not known", QUANT_HINT)
    if type(bits) is not int or bits not in _BITS_TO_WEIGHT_ONLY:
        raise ModelError(
            f"weights of {printable(str(bits), 40)} bits: the servers' grouped kernel has 4 and 8",
            QUANT_HINT,
        )
    symmetric = config.get("sym")
    zero_point = config.get("zero_point", not symmetric if isinstance(symmetric, bool) else False)
    return Found(
        Quantization(
            dtype=_BITS_TO_WEIGHT_ONLY[bits],
            group_size=group_size(group),
            per_channel=group_size(group) is None,
            zero_point=bool(zero_point),
        )
    )


def _gptq_dynamic(config: Config, experts: ExpertModules) -> Config | None:
    """GPTQModel's `dynamic`: `-:regex` leaves modules out (None here), `+:regex` or `regex` overrides."""
    rules = config.get("dynamic")
    if not isinstance(rules, Mapping):
        return {}
    for pattern, values in rules.items():
        sign, _, rest = pattern.rpartition(":") if pattern[:2] in ("-:", "+:") else ("", "", pattern)
        if experts.named_by_targets([f"re:{rest}"]) is None:
            return None if sign == "-" else (values if isinstance(values, Mapping) else {})
    return {}


def _fixed(quantization: Quantization) -> Callable[[Config, ExpertModules], Found]:
    """A method that says all by its name."""
    return lambda _config, _experts: Found(quantization)


def _w4afp8(config: Config, experts: ExpertModules) -> Found:
    del experts
    return Found(
        Quantization(
            dtype=Dtype.INT4_W4AFP8,
            group_size=group_size(config.get("group_size", 128)),
            dynamic_activation=dynamic_activation(config),
        )
    )


METHODS: Mapping[str, Callable[[Config, ExpertModules], Found | None]] = {
    "fp8": _fp8,
    "deepseek_v4_fp8": _fp8,
    "fbgemm_fp8": _fixed(FP8_CHANNEL),
    "ptpc_fp8": _fixed(FP8_CHANNEL),
    "w8a8_fp8": _fixed(FP8_CHANNEL),
    "mxfp8": _fixed(MXFP8),
    "w8a8_int8": _fixed(INT8_CHANNEL),
    "blockwise_int8": _int8_block,
    "experts_int8": _fixed(Quantization(dtype=Dtype.INT8_W8A16, per_channel=True)),
    "awq": _weight_only,
    "awq_marlin": _weight_only,
    "gptq": _weight_only,
    "gptq_marlin": _weight_only,
    "auto-round": _weight_only,
    "auto_round": _weight_only,
    "intel/auto-round": _weight_only,
    "moe_wna16": _weight_only,
    "w4afp8": _w4afp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "modelopt_fp8": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_mxfp8": read_modelopt,
    "modelopt_mixed": read_modelopt,
    "mxfp4": _fixed(MXFP4),
    "gpt_oss_mxfp4": _fixed(MXFP4),
    "quark": read_quark,
    "bitsandbytes": _fixed(Quantization(dtype=Dtype.BITSANDBYTES)),
    "gguf": _fixed(Quantization(dtype=Dtype.GGUF)),
}
"""Every `quant_method` that is read, in lower case."""

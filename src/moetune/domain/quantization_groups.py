"""Readers of quantization configs that speak of groups of modules.

compressed-tensors (`config_groups`), ModelOpt (`quant_algo`, `quantized_layers`) and Quark
(`global_quant_config`, `layer_quant_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moetune.domain.errors import ModelError
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_values import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_STATIC,
    MXFP8,
    NVFP4,
    QUANT_HINT,
    Config,
    Found,
    block_shape,
    group_size,
    look_up,
    texts,
)
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.domain.expert_modules import ExpertModules


# --- compressed-tensors -----------------------------------------------------------------------------


def read_compressed_tensors(config: Config, experts: ExpertModules) -> Found | None:
    """Read the group that targets the experts; None when no group does."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("a compressed-tensors config without config_groups", QUANT_HINT)
    group, name = _group_of_experts(groups, experts)
    if group is None:
        return None
    form = group.get("format") or config.get("format") or ""
    return Found(_scheme(group, str(form)), f" group {printable(name, 40)}")


def _group_of_experts(groups: Config, experts: ExpertModules) -> tuple[Config | None, str]:
    """The one group that targets the experts: by their name first, else by the class of their layers."""
    by_name: list[tuple[str, Config]] = []
    by_class: list[tuple[str, Config]] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ModelError(f"the config group {printable(name, 40)!r} is no object", QUANT_HINT)
        targets = texts(group.get("targets", ["Linear"]), "targets")
        owned = any(experts.owns(target) for target in targets)
        if owned or experts.named_by_targets(targets) is None:
            by_name.append((name, group))
        elif {"Linear", "FusedMoE", "RoutedExperts"} & set(targets):
            by_class.append((name, group))
    matching = by_name or by_class
    schemes = {repr(_scheme(group, str(group.get("format") or ""))) for _, group in matching}
    if len(schemes) > 1:
        names = ", ".join(printable(name, 40) for name, _ in matching)
        raise ModelError(f"several config groups target the experts, and they differ: {names}", QUANT_HINT)
    return (matching[0][1], matching[0][0]) if matching else (None, "")


def _scheme(member: Config, form: str) -> Quantization:
    weights, activations = member.get("weights"), member.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ModelError("a config group without weights", QUANT_HINT)
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if activations is not None and not isinstance(activations, Mapping):
        raise ModelError("input_activations of a config group is no object", QUANT_HINT)
    acting = (activations.get("type", "int"), activations.get("num_bits")) if activations else None
    group = group_size(weights.get("group_size"))
    dtype = look_up(_SCHEMES, (kind, bits, acting))
    if (kind, bits) == ("float", 4):
        dtype = Dtype.MXFP4 if form.startswith("mxfp4") or group == 32 else Dtype.NVFP4
    elif (kind, bits) == ("float", 8) and (form.startswith("mxfp8") or group == 32):
        dtype = Dtype.MXFP8
    if dtype is None:
        described = f"{kind} weights of {bits} bits with activations {acting or 'in 16 bits'}"
        raise ModelError(f"{printable(described)} are no scheme that is known", QUANT_HINT)
    strategy = weights.get("strategy")
    if strategy == "block" and weights.get("block_structure") is None:
        raise ModelError("a config group of strategy block without a block_structure", QUANT_HINT)
    return Quantization(
        dtype=dtype,
        block_shape=block_shape(weights.get("block_structure")) if strategy in ("block", None) else None,
        group_size=group,
        per_channel=strategy == "channel",
        dynamic_activation=bool(activations.get("dynamic", False)) if activations else None,
        zero_point=weights.get("symmetric", True) is False,
    )


_SCHEMES: Mapping[tuple[str, int, tuple[str, int] | None], Dtype] = {
    ("float", 8, ("float", 8)): Dtype.FP8_W8A8,
    ("float", 8, None): Dtype.FP8_W8A16,
    ("int", 8, ("int", 8)): Dtype.INT8_W8A8,
    ("int", 8, None): Dtype.INT8_W8A16,
    ("int", 4, None): Dtype.INT4_W4A16,
    ("int", 4, ("float", 8)): Dtype.INT4_W4AFP8,
}


# --- ModelOpt ---------------------------------------------------------------------------------------


def read_modelopt(config: Config, experts: ExpertModules) -> Found | None:
    """Read ModelOpt's algorithm for the experts; None when they are not among its layers."""
    algorithm, group = config.get("quant_algo"), config.get("group_size")
    note = ""
    if algorithm == "MIXED_PRECISION":
        owned = _mixed_algorithm(config, experts)
        if owned is None:
            return None
        (algorithm, group), note = owned, " MIXED_PRECISION"
    quantization = look_up(_MODELOPT, algorithm)
    if quantization is None:
        raise ModelError(
            f"ModelOpt's quant_algo {printable(str(algorithm), 60)!r} is not known "
            f"(known: {', '.join(_MODELOPT)}, MIXED_PRECISION)",
            QUANT_HINT,
        )
    own_group = group_size(group)
    if own_group is not None and quantization.group_size is not None:
        quantization = replace(quantization, group_size=own_group)
    if quantization.dtype is Dtype.NVFP4 and _weights_only(config, experts):
        quantization = replace(quantization, dynamic_activation=None)
    return Found(quantization, f"{note} {algorithm}")


def _weights_only(config: Config, experts: ExpertModules) -> bool:
    """A config that says NVFP4 and whose group for the experts quantizes no activations is W4A16.

    vllm 0.33.0 layers/quantization/modelopt.py:ModelOptNvFp4Config.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    group, _ = _group_of_experts(groups, experts)
    return group is not None and group.get("input_activations") is None


def _mixed_algorithm(config: Config, experts: ExpertModules) -> tuple[Any, Any] | None:
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping):
        raise ModelError("ModelOpt's MIXED_PRECISION without quantized_layers", QUANT_HINT)
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    for name, values in layers.items():
        if isinstance(values, Mapping) and experts.owns(name):
            pair = (values.get("quant_algo"), values.get("group_size"))
            found[(str(pair[0]), str(pair[1]))] = pair
    if len(found) > 1:
        shown = ", ".join(sorted(printable(algorithm, 40) for algorithm, _ in found))
        raise ModelError(f"the experts' layers differ in their quant_algo: {shown}", QUANT_HINT)
    return next(iter(found.values()), None)


# vllm 0.33.0 layers/quantization/modelopt.py (the algorithms and their tensors); NVIDIA's ModelOpt
# names for the integer ones.
_MODELOPT: Mapping[str, Quantization] = {
    "FP8": FP8_STATIC,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": FP8_BLOCK,
    "FP8_BLOCK_SCALES": FP8_BLOCK,
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": replace(NVFP4, dynamic_activation=None),
    "W4A8_AWQ": Quantization(dtype=Dtype.INT4_W4AFP8, group_size=128, dynamic_activation=False),
    "W4A16_AWQ": Quantization(dtype=Dtype.INT4_W4A16, group_size=128),
    "INT4_AWQ": Quantization(dtype=Dtype.INT4_W4A16, group_size=128),
}


# --- Quark ------------------------------------------------------------------------------------------


def read_quark(config: Config, experts: ExpertModules) -> Found | None:
    """Read Quark's scheme for the experts; None when it leaves their weights alone."""
    chosen = config.get("global_quant_config")
    layers = config.get("layer_quant_config")
    for pattern, values in layers.items() if isinstance(layers, Mapping) else ():
        if experts.named_by_paths([pattern]) is None:
            chosen = values
    if not isinstance(chosen, Mapping):
        raise ModelError("a Quark config without global_quant_config", QUANT_HINT)
    weight, activation = chosen.get("weight"), chosen.get("input_tensors")
    if weight is None:
        return None
    if not isinstance(weight, Mapping) or not (activation is None or isinstance(activation, Mapping)):
        raise ModelError("a Quark config of several stages a weight is not read here", QUANT_HINT)
    pair = (weight.get("dtype"), activation.get("dtype") if activation else None)
    dtype = look_up(_QUARK, pair)
    if dtype is None:
        raise ModelError(f"Quark's {printable(str(pair))} is no scheme that is known", QUANT_HINT)
    scheme = weight.get("qscheme")
    return Found(
        Quantization(
            dtype=dtype,
            per_channel=scheme == "per_channel",
            group_size=group_size(weight.get("group_size")) if scheme == "per_group" else None,
            dynamic_activation=bool(activation.get("is_dynamic")) if activation else None,
            zero_point=weight.get("symmetric", True) is False,
        )
    )


_QUARK: Mapping[tuple[str, str | None], Dtype] = {
    ("fp8_e4m3", "fp8_e4m3"): Dtype.FP8_W8A8,
    ("fp8_e4m3", None): Dtype.FP8_W8A16,
    ("int8", "int8"): Dtype.INT8_W8A8,
    ("int8", None): Dtype.INT8_W8A16,
    ("fp4", "fp4"): Dtype.MXFP4,
    ("fp4", "fp8_e4m3"): Dtype.MXFP4,
    ("fp4", None): Dtype.MXFP4,
    ("int4", None): Dtype.INT4_W4A16,
}

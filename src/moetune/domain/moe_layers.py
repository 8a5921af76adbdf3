"""Which layers of a model have experts, from the keys that say which are dense.

Read in sglang 0.5.23 models/*.py (the condition on `layer_id` of each decoder layer) and in the
config classes of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moetune.domain.model_keys import FIELD_KEYS

if TYPE_CHECKING:
    from moetune.domain.model_levels import Level

_MAX_LAYERS = 4096
Rule = Callable[[Any, int, Mapping[str, Any]], bool]


def moe_layers(level: Level) -> tuple[int, ...] | None:
    """Numbers of the layers with experts; None when the number of layers is unknown or makes no sense."""
    config: dict[str, Any] = {}
    for part in reversed(level.chain):
        config.update(part)
    listed = _listed(config)
    if listed is not None:
        return listed
    count = next((config[key] for key in FIELD_KEYS["num_layers"] if _is_size(config.get(key))), None)
    if count is None or count > _MAX_LAYERS:
        return None
    rules = [(config[key], rule) for key, rule in _RULES.items() if _is_size(config.get(key))]
    sparse = config.get("mlp_only_layers")
    dense = {n for n in sparse if type(n) is int} if isinstance(sparse, list) else set()
    return tuple(
        layer
        for layer in range(count)
        if layer not in dense and all(rule(value, layer, config) for value, rule in rules)
    )


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _every(value: int, layer: int, _config: Mapping[str, Any]) -> bool:
    return value == 0 or layer % value == 0


def _every_last(value: int, layer: int, _config: Mapping[str, Any]) -> bool:
    return value == 0 or (layer + 1) % value == 0


def _from(value: int, layer: int, _config: Mapping[str, Any]) -> bool:
    return layer >= value


def _until(value: int, layer: int, _config: Mapping[str, Any]) -> bool:
    return layer <= value


def _interval(value: int, layer: int, config: Mapping[str, Any]) -> bool:
    start = config.get("moe_layer_start_index")
    return value == 0 or (layer - (start if _is_size(start) and start is not None else 0)) % value == 0


def _period(value: int, layer: int, config: Mapping[str, Any]) -> bool:
    offset = config.get("expert_layer_offset")
    return value == 0 or layer % value == (offset if _is_size(offset) else 0)


# Key to the condition under which a layer has experts.
_RULES: Mapping[str, Rule] = {
    "first_k_dense_replace": _from,
    "num_dense_layers": _from,
    "moe_layer_start_index": _from,
    "moe_layer_end_index": _until,
    "moe_layer_freq": _every,
    "decoder_sparse_step": _every_last,
    "interleave_moe_layer_step": _every_last,
    "moe_layer_interval": _interval,
    "expert_layer_period": _period,
}


def _listed(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers that the config lists one by one."""
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and types:
        return _where(types, lambda kind: kind != "dense")
    blocks = config.get("layers_block_type")
    if isinstance(blocks, list) and "moe" in blocks:
        return _where(blocks, lambda kind: kind == "moe")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "E" in pattern:
        return _where(list(pattern), lambda kind: kind == "E")
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list) and frequency:
        return _where(frequency, bool)
    numbers = config.get("moe_layers_enum", config.get("moe_layers"))
    if isinstance(numbers, str):
        parts = numbers[: 8 * _MAX_LAYERS].split(",")
        numbers = [int(part) for part in parts if part.strip().isascii() and part.strip().isdigit()]
    if isinstance(numbers, list) and numbers and all(_is_size(n) and n < _MAX_LAYERS for n in numbers):
        return tuple(sorted(set(numbers)))
    return None


def _where(values: list[Any], holds: Callable[[Any], bool]) -> tuple[int, ...] | None:
    return tuple(n for n, value in enumerate(values) if holds(value)) if len(values) <= _MAX_LAYERS else None

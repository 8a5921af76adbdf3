"""From a checkpoint's config.json to its expert layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moetune.domain.errors import ModelError
from moetune.domain.expert_modules import ExpertModules
from moetune.domain.model_keys import (
    BIASED,
    EXPERT_CONTAINERS,
    EXPERT_SIZE_KEYS,
    NOT_GATED,
    UNGATED_ACTIVATIONS,
)
from moetune.domain.model_levels import BY_HAND, Level, Reading, expert_level, find_levels
from moetune.domain.moe_layers import moe_layers
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_config import names_modelopt_only, read_quantization
from moetune.domain.quantization_names import parse_quantization
from moetune.domain.text import printable

BY_HAND_SOURCE = "by hand"
_LARGEST = {"num_experts": 1 << 16, "topk": 1 << 16, "num_shared_experts": 1 << 10}
_LARGEST_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The Mixture-of-Experts layer of a checkpoint, whole: before any sharding.

    Attributes:
        model: the name or path it was asked for by.
        architecture: first entry of `architectures` (the parent's for a nested config).
        model_type: the checkpoint's `model_type`, empty when absent.
        num_experts: routed experts of one layer.
        topk: routed experts a token goes to.
        hidden_size: columns of the residual stream.
        latent_size: columns that enter the experts where the model has a latent projection.
        intermediate_size: columns between up and down of one routed expert.
        num_shared_experts: experts that every token goes to.
        shared_intermediate_size: columns of the shared experts together, None without.
        gated: the up kernel writes gate and up (2N) rather than N columns.
        bias: the experts have biases.
        activation_dtype: bf16, fp16 or fp32: the type of the hidden states.
        quantization: of the routed experts.
        num_moe_layers: layers that have experts, None when unknown.
        source: where it was read: `packaged`, a path, or a hub id.
        provenance: field name to where the value came from, for the user to check.
    """

    model: str
    architecture: str
    num_experts: int
    topk: int
    hidden_size: int
    intermediate_size: int
    model_type: str = ""
    latent_size: int | None = None
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    gated: bool = True
    bias: bool = False
    activation_dtype: Dtype = Dtype.BF16
    quantization: Quantization = field(default_factory=Quantization)
    num_moe_layers: int | None = None
    source: str = ""
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LayerOverrides:
    """What a person says by hand; it wins over the checkpoint. None: not said.

    Attributes:
        experts: routed experts of one layer.
        topk: routed experts a token goes to.
        hidden: columns of the residual stream.
        intermediate: columns between up and down of one routed expert.
        latent: columns that enter the experts where the model has a latent projection.
        shared_experts: experts that every token goes to.
        gated: the up kernel writes gate and up.
        quant: a name as in `fp8-block[128,128]`, or the quantization itself.
    """

    experts: int | None = None
    topk: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    latent: int | None = None
    shared_experts: int | None = None
    gated: bool | None = None
    quant: str | Quantization | None = None

    @property
    def complete(self) -> bool:
        """Whether no config is needed: all four sizes are said."""
        return None not in (self.experts, self.topk, self.hidden, self.intermediate)

    @property
    def missing(self) -> tuple[str, ...]:
        """The flags of the sizes that are not said."""
        sizes = {
            "--experts": self.experts,
            "--topk": self.topk,
            "--hidden": self.hidden,
            "--intermediate": self.intermediate,
        }
        return tuple(flag for flag, value in sizes.items() if value is None)

    def quantization(self) -> Quantization | None:
        """The quantization that is said.

        Raises:
            ModelError: for a name that is not known.
        """
        return parse_quantization(self.quant) if isinstance(self.quant, str) else self.quant


NO_OVERRIDES = LayerOverrides()


def read_expert_layer(
    config: Mapping[str, Any],
    *,
    name: str,
    source: str,
    overrides: LayerOverrides = NO_OVERRIDES,
    hf_quant_config: Mapping[str, Any] | None = None,
) -> ExpertLayer:
    """Read the expert layer of a checkpoint.

    Args:
        config: the content of config.json; may be empty when all four sizes are given by hand.
        name: what the model was asked for by.
        source: where the config was read.
        overrides: what is given by hand.
        hf_quant_config: the content of ModelOpt's hf_quant_config.json, which counts only where
            config.json itself says nothing about quantization.

    Raises:
        ModelError: when the model is dense, when a value is missing or contradicts another, or when
            something is no size. Nothing is ever guessed.
    """
    levels = find_levels(config)
    level = _level(levels, overrides, config)
    reader = _Reader(level, {})
    layers = moe_layers(level)

    def read(field_name: str) -> Callable[[], Reading | None]:
        return lambda: level.number(field_name, layers)

    experts = reader.required("num_experts", overrides.experts, read("num_experts"))
    topk = reader.required("topk", overrides.topk, read("topk"))
    hidden = reader.required("hidden_size", overrides.hidden, read("hidden_size"))
    intermediate = reader.required(
        "intermediate_size", overrides.intermediate, lambda: _expert_size(level, layers)
    )
    if topk > experts:
        raise ModelError(f"a token cannot go to {topk} of {experts} experts", BY_HAND)
    latent = reader.optional("latent_size", overrides.latent, read("latent_size"))
    shared, shared_size = _shared(reader, overrides, layers, intermediate)
    activation = _activation_dtype(reader, overrides)
    return ExpertLayer(
        model=printable(name),
        architecture=_outermost(level, "architectures"),
        model_type=_outermost(level, "model_type"),
        num_experts=experts,
        topk=topk,
        hidden_size=hidden,
        latent_size=latent or None,
        intermediate_size=intermediate,
        num_shared_experts=shared,
        shared_intermediate_size=shared_size,
        gated=_gated(reader, overrides),
        bias=bool(level.kinds & BIASED),
        activation_dtype=activation,
        quantization=_quantization(reader, overrides, activation, layers, hf_quant_config),
        num_moe_layers=len(layers) if layers else None,
        source=source,
        provenance=tuple(reader.provenance.items()),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    level: Level
    provenance: dict[str, str]

    def required(self, field_name: str, by_hand: int | None, read: Callable[[], Reading | None]) -> int:
        value = self.optional(field_name, by_hand, read)
        if not value:
            what = _DESCRIBED[field_name]
            raise ModelError(
                f"the config does not say {what} under a key that is known; keys seen: {self.level.seen()}",
                BY_HAND,
            )
        return value

    def optional(
        self, field_name: str, by_hand: int | None, read: Callable[[], Reading | None]
    ) -> int | None:
        # What is said by hand wins, also over keys that contradict one another.
        reading = Reading(by_hand, BY_HAND_SOURCE) if by_hand is not None else read()
        if reading is None:
            return None
        largest = _LARGEST.get(field_name, _LARGEST_SIZE)
        if type(reading.value) is not int or not 0 <= reading.value <= largest:
            raise ModelError(f"{reading.key}: {field_name} cannot be {str(reading.value)[:40]}", BY_HAND)
        self.provenance[field_name] = reading.key
        return reading.value


_DESCRIBED = {
    "num_experts": "how many experts a layer has",
    "topk": "how many experts a token goes to",
    "hidden_size": "the hidden size",
    "intermediate_size": "the intermediate size of one expert",
}


def _level(levels: tuple[Level, ...], overrides: LayerOverrides, config: Mapping[str, Any]) -> Level:
    """The level to read: the one with experts, or, when their number is given by hand, the likeliest."""
    top = levels[0]
    if overrides.complete and not config:
        return top
    try:
        found = expert_level(levels)
    except ModelError:
        if not overrides.complete:
            raise
        return top
    if found is not None:
        return found
    if overrides.experts is not None:
        return max(
            levels,
            key=lambda level: (any(level.raw("intermediate_size")), any(level.raw("topk")), len(level.path)),
        )
    off = next((level.switched_off for level in levels if level.switched_off), None)
    if off is not None:
        raise ModelError(f"this is a dense model: its config says {off}: false", _DENSE_HINT)
    few = next((r for level in levels for r in level.raw("num_experts")), None)
    if few is not None:
        raise ModelError(f"this is a dense model: its config says {few[0]}: {few[1]!s:.40}", _DENSE_HINT)
    if any(any(level.raw("topk")) or any(level.raw("intermediate_size")) for level in levels):
        holder = next(lv for lv in levels if any(lv.raw("topk")) or any(lv.raw("intermediate_size")))
        raise ModelError(
            f"the config does not say how many experts a layer has; keys seen: {holder.seen()}", BY_HAND
        )
    architecture = _outermost(max(levels, key=lambda level: len(level.path)), "architectures")
    raise ModelError(
        f"this is a dense model: its config names no experts (architecture {architecture or 'unknown'}; "
        f"keys seen: {top.seen()})",
        _DENSE_HINT,
    )


_DENSE_HINT = "moetune tunes Mixture-of-Experts layers only; if it is one, " + BY_HAND


def _expert_size(level: Level, layers: tuple[int, ...] | None) -> Reading | None:
    reading = level.number("intermediate_size", layers)
    if reading is not None:
        return reading
    for kind in sorted(level.kinds & EXPERT_SIZE_KEYS.keys()):
        return level.number_at(EXPERT_SIZE_KEYS[kind], layers)
    if level.number_at("intermediate_size", layers) is not None:
        architecture = _outermost(level, "architectures") or "an unknown architecture"
        raise ModelError(
            f"for {architecture} it is not known whether intermediate_size is the size of an expert or of "
            f"the dense layers; keys seen: {level.seen()}",
            "say which: --intermediate N",
        )
    return None


def _shared(
    reader: _Reader, overrides: LayerOverrides, layers: tuple[int, ...] | None, intermediate: int
) -> tuple[int, int | None]:
    """Number of shared experts and their columns together: either key may be there without the other."""
    level = reader.level
    count = reader.optional(
        "num_shared_experts",
        overrides.shared_experts,
        lambda: level.number("num_shared_experts", layers),
    )
    size = level.number("shared_intermediate_size", layers)
    if count is None and size is not None and size.value:
        count = 1
        reader.provenance["num_shared_experts"] = f"one, since {size.key} is not 0"
    if not count:
        return 0, None
    if size is not None and size.value:
        return count, reader.optional("shared_intermediate_size", None, lambda: size)
    return count, count * intermediate


def _gated(reader: _Reader, overrides: LayerOverrides) -> bool:
    if overrides.gated is not None:
        reader.provenance["gated"] = BY_HAND_SOURCE
        return overrides.gated
    level = reader.level
    kind = min(level.kinds & NOT_GATED, default=None)
    if kind is not None:
        reader.provenance["gated"] = f"{kind} has no gate"
        return False
    for key, value in level.raw("activation"):
        if isinstance(value, str) and value.lower() in UNGATED_ACTIVATIONS:
            raise ModelError(
                f"{key} is {printable(value, 40)}, which some models use with a gate and some without",
                "say which: --gated or --no-gated",
            )
    return True


_DTYPES = {
    "bfloat16": Dtype.BF16,
    "bf16": Dtype.BF16,
    "float16": Dtype.FP16,
    "half": Dtype.FP16,
    "fp16": Dtype.FP16,
    # Both servers halve a float32 checkpoint unless told otherwise (`_get_and_verify_dtype`, sglang
    # 0.5.23 configs/model_config.py; vllm 0.33.0 config/model.py): 16 bits either way.
    "float32": Dtype.BF16,
    "float": Dtype.BF16,
}


def _activation_dtype(reader: _Reader, overrides: LayerOverrides) -> Dtype:
    said = overrides.quantization()
    if said is not None and said.dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32):
        reader.provenance["activation_dtype"] = BY_HAND_SOURCE
        return said.dtype
    for key, value in reader.level.raw("activation_dtype"):
        known = _DTYPES.get(value.removeprefix("torch.").lower()) if isinstance(value, str) else None
        if known is not None:
            halved = " (float32, which the servers halve)" if "float32" in str(value) else ""
            reader.provenance["activation_dtype"] = key + halved
            return known
        if said is None and value != "auto":
            raise ModelError(
                f"{key} is {printable(str(value)[:400], 40)!r}, no dtype that is known", "--quant bf16"
            )
    reader.provenance["activation_dtype"] = "no dtype key: bfloat16"
    return Dtype.BF16


def _quantization(
    reader: _Reader,
    overrides: LayerOverrides,
    activation: Dtype,
    layers: tuple[int, ...] | None,
    hf_quant_config: Mapping[str, Any] | None,
) -> Quantization:
    said = overrides.quantization()
    if said is not None:
        reader.provenance["quantization"] = BY_HAND_SOURCE
        return said
    level = reader.level
    found, place = None, ""
    # The servers look at the top first, then into the text config.
    for depth, config in reversed(list(enumerate(level.chain))):
        for key in ("quantization_config", "compression_config"):
            if found is None and config.get(key):
                found, place = config[key], level.label(depth, key)
    if hf_quant_config and (found is None or names_modelopt_only(found)):
        found, place = hf_quant_config, "hf_quant_config.json"
    if found is not None and not isinstance(found, Mapping):
        raise ModelError(f"{place} is no object", BY_HAND)
    kind = min(level.kinds & EXPERT_CONTAINERS.keys(), default="")
    read = read_quantization(
        found,
        experts=ExpertModules(EXPERT_CONTAINERS.get(kind, "mlp.experts"), layers or ()),
        activation_dtype=activation,
        expert_dtype=next(level.texts("expert_dtype"), None),
    )
    reader.provenance["quantization"] = f"{place}: {read.note}" if place else read.note
    return read.quantization


def _outermost(level: Level, key: str) -> str:
    return ([*level.texts(key)] or [""])[-1]

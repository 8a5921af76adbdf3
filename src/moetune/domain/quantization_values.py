"""Values of a quantization config, checked: what its readers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from moetune.domain.errors import ModelError
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.text import printable

Config = Mapping[str, Any]
Value = TypeVar("Value")
QUANT_HINT = "say it by hand: --quant bf16, fp8, fp8-block[128,128], int4_w4a16[128], awq, nvfp4, ..."

_MAX_GROUP = 1 << 16


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader found.

    Attributes:
        quantization: of the routed experts, without the method's name.
        note: what of the config decided it beside the method, with a space before it.
    """

    quantization: Quantization
    note: str = ""


FP8_STATIC = Quantization(dtype=Dtype.FP8_W8A8, dynamic_activation=False)
FP8_CHANNEL = Quantization(dtype=Dtype.FP8_W8A8, per_channel=True, dynamic_activation=True)
FP8_BLOCK = Quantization(dtype=Dtype.FP8_W8A8, block_shape=(128, 128), dynamic_activation=True)
INT8_CHANNEL = Quantization(dtype=Dtype.INT8_W8A8, per_channel=True, dynamic_activation=True)
MXFP4 = Quantization(dtype=Dtype.MXFP4, group_size=32)
MXFP8 = Quantization(dtype=Dtype.MXFP8, group_size=32, dynamic_activation=True)
NVFP4 = Quantization(dtype=Dtype.NVFP4, group_size=16, dynamic_activation=False)


def first(config: Config, *keys: str) -> Any:  # noqa: ANN401 - whatever the file holds
    """The first value that is not null."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def look_up(table: Mapping[Any, Value], key: object) -> Value | None:
    """A value of a table; None for a key that it lacks or that no table can hold (a list)."""
    try:
        return table.get(key)
    except TypeError:
        return None


def texts(value: object, key: str) -> list[str]:
    """A list of names.

    Raises:
        ModelError: when it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{key} of the quantization config is no list of names", QUANT_HINT)
    return [entry for entry in value if entry]


def dynamic_activation(config: Config) -> bool:
    """Whether activations are quantized at run time, the default of every method that has a choice."""
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static", None):
        raise ModelError(f"activation_scheme {printable(str(scheme), 40)!r} is not known", QUANT_HINT)
    return bool(scheme != "static")


def group_size(value: object) -> int | None:
    """A group size; None for null and -1, both of which mean one scale a channel."""
    if value is None or (type(value) is int and value in (-1, 0)):
        return None
    if type(value) is not int or not 0 < value <= _MAX_GROUP:
        raise ModelError(f"group_size {printable(str(value), 40)} is no size", QUANT_HINT)
    return value


def block_shape(value: object) -> tuple[int, int] | None:
    """Two block sizes; None when missing or when one of them is null or 0 (ModelOpt's `[0, null]`)."""
    if isinstance(value, str):  # compressed-tensors also writes `128x128`
        value = [int(part) if part.isascii() and part.isdigit() else part for part in value[:32].split("x")]
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ModelError(f"the block size {printable(str(value), 40)} is no pair of numbers", QUANT_HINT)
    if any(side is None or (type(side) is int and side == 0) for side in value):
        return None
    if not all(type(side) is int and 0 < side <= _MAX_GROUP for side in value):
        raise ModelError(f"the block size {printable(str(value), 40)} is no pair of numbers", QUANT_HINT)
    return value[0], value[1]

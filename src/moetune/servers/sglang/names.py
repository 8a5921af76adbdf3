"""File names of SGLang: device, dtype tag and the name itself, built and taken apart.

Source: sglang wheels, `get_config_file_name` and `get_config_dtype_str` of
`fused_moe_triton_config.py` (0.5.1 and before: `fused_moe.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moetune.domain.errors import ServerError
from moetune.domain.quantization import Dtype
from moetune.domain.text import printable

_MAX_DEVICE_CHARS = 128
_NO_TAG = ""

# The tags in the server's order of precedence; everything that reaches the kernel as bf16 or fp16 has
# none. MXFP4 and bitsandbytes experts are upcast before they reach it (quantization/mxfp4.py,
# quantization/bitsandbytes.py).
_TAGS: dict[Dtype, str] = {
    Dtype.FP8_W8A8: "fp8_w8a8",
    Dtype.INT8_W8A8: "int8_w8a8",
    Dtype.INT4_W4A16: "int4_w4a16",
    Dtype.INT8_W8A16: "int8_w8a16",
    Dtype.FP32: "float32",
    Dtype.BF16: _NO_TAG,
    Dtype.FP16: _NO_TAG,
    Dtype.MXFP4: _NO_TAG,
    Dtype.BITSANDBYTES: _NO_TAG,
}
TAGS = frozenset(_TAGS.values()) - {_NO_TAG}

_NAME = re.compile(
    r"E=(?P<E>[0-9]{1,6}),N=(?P<N>[0-9]{1,8}),device_name=(?P<device>[^,/\\\x00-\x1f\x7f]{0,128}?)"
    r"(?:,dtype=(?P<dtype>[A-Za-z0-9_]{1,32}?))?"
    r"(?:,block_shape=\[(?P<block_n>[1-9][0-9]{0,5}), (?P<block_k>[1-9][0-9]{0,5})\])?"
    r"(?P<channel>,per_channel_quant=True)?(?P<down>_down)?\.json",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class FileName:
    """What a file name says.

    Attributes:
        E: experts of one rank, fused shared ones included.
        N: intermediate columns of one rank as the server counts them (packed for int4).
        device: the GPU's name as it stands in the file name.
        dtype: the tag, empty without one.
        block_shape: block of the weight scales.
        per_channel: one weight scale for each output channel.
        down: the file of the down kernel.
    """

    E: int
    N: int
    device: str
    dtype: str = _NO_TAG
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    down: bool = False

    def __str__(self) -> str:
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        # A block of 0 (int4 groups come as [0, group]) is left out; there is a space after the comma.
        block = self.block_shape
        shape = f",block_shape=[{block[0]}, {block[1]}]" if block and all(block) else ""
        channel = ",per_channel_quant=True" if self.per_channel else ""
        down = "_down" if self.down else ""
        return f"E={self.E},N={self.N},device_name={self.device}{dtype}{shape}{channel}{down}.json"


def parse_file_name(name: str) -> FileName | None:
    """Take a file name apart; None for what is no name of SGLang's grammar."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in match["device"]:
        return None
    block = (int(match["block_n"]), int(match["block_k"])) if match["block_n"] else None
    return FileName(
        int(match["E"]),
        int(match["N"]),
        match["device"],
        match["dtype"] or _NO_TAG,
        block,
        match["channel"] is not None,
        match["down"] is not None,
    )


def device_name(torch_name: str) -> str:
    """A GPU's name as SGLang spells it: spaces become underscores, and nothing else changes.

    Raises:
        ServerError: for a name that would not stay one component of a path.
    """
    unfit = (
        not torch_name
        or len(torch_name) > _MAX_DEVICE_CHARS
        or not torch_name.isprintable()
        or ".." in torch_name
        or any(character in torch_name for character in "/\\,")
    )
    if unfit:
        raise ServerError(
            f"{printable(torch_name, 60)!r} cannot stand in a config file name",
            "give the GPU's name as torch.cuda.get_device_name() prints it",
        )
    return torch_name.replace(" ", "_")


def dtype_tag(dtype: Dtype, activation: Dtype) -> str:
    """The dtype part of the name, empty for bf16 and fp16.

    Raises:
        ServerError: for weights that no release sends through this kernel.
    """
    if dtype not in _TAGS:
        raise ServerError(
            f"SGLang has no config file name for {dtype.value} experts: they run on other kernels",
            "moetune plan says which kernel the server uses",
        )
    tag = _TAGS[dtype]
    # The server asks for the type of the hidden states last.
    return _TAGS[Dtype.FP32] if not tag and activation is Dtype.FP32 else tag

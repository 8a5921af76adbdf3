"""Names of config files taken apart and put together again: the grammar that both servers share.

Sources: `get_config_file_name` of the sglang 0.5.23 wheel (`fused_moe_triton_config.py`) and of the
vllm 0.33.0 wheel (`fused_moe.py`). Whether a server would ever look for a name is that server's to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Digits, tags and lengths are bounded, so that the expression runs in linear time. A device name may
# hold whatever torch reports but what ends a field or a component of a path.
_NAME = re.compile(
    r"E=(?P<E>[1-9][0-9]{0,5}),N=(?P<N>[1-9][0-9]{0,7}),device_name=(?P<device>[^,/\\\x00-\x1f\x7f]{0,128}?)"
    r"(?:,dtype=(?P<dtype>[A-Za-z0-9_]{1,32}?))?"
    r"(?:,block_shape=\[(?P<block_n>[1-9][0-9]{0,5}),(?P<space> ?)(?P<block_k>[1-9][0-9]{0,5})\])?"
    r"(?P<channel>,per_channel_quant=True)?(?:,backend=(?P<backend>[a-z0-9]{1,32}))?(?P<down>_down)?\.json"
)
MAX_NAME_BYTES = 255
"""Longest name of a file on the file systems that servers run on."""


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a config file says.

    Attributes:
        E: experts of one rank, fused shared ones included.
        N: intermediate columns of one rank as the server counts them (SGLang: packed for int4).
        device: the GPU as the server spells it; may be empty.
        dtype: the tag, empty without one.
        block_shape: `(block_n, block_k)` of the weight scales.
        spaced: there is a space in the block shape (SGLang writes one, vLLM does not).
        per_channel: one weight scale for each output channel (SGLang).
        backend: another kernel that the file is for (`flydsl`), empty for Triton's.
        down: the file of the down kernel (SGLang).
    """

    E: int
    N: int
    device: str
    dtype: str = ""
    block_shape: tuple[int, int] | None = None
    spaced: bool = False
    per_channel: bool = False
    backend: str = ""
    down: bool = False

    def __str__(self) -> str:
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        comma = ", " if self.spaced else ","
        block = f",block_shape=[{comma.join(map(str, self.block_shape))}]" if self.block_shape else ""
        channel = ",per_channel_quant=True" if self.per_channel else ""
        backend = f",backend={self.backend}" if self.backend else ""
        down = "_down" if self.down else ""
        return f"E={self.E},N={self.N},device_name={self.device}{dtype}{block}{channel}{backend}{down}.json"


def parse_file_name(name: str) -> FileName | None:
    """Take a file name apart; None for what is no name of the grammar."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in match["device"] or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        return None
    return FileName(
        E=int(match["E"]),
        N=int(match["N"]),
        device=match["device"],
        dtype=match["dtype"] or "",
        block_shape=(int(match["block_n"]), int(match["block_k"])) if match["block_n"] else None,
        spaced=bool(match["space"]),
        per_channel=match["channel"] is not None,
        backend=match["backend"] or "",
        down=match["down"] is not None,
    )

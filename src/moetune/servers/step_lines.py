"""Lines in which a server says how fast it decodes: requests under way, tokens a second."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEEDLES = (b"Decode batch", b"Avg generation throughput")
"""Every such line holds one of these."""


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """What one line says.

    Attributes:
        server: that prints it.
        running: requests under way.
        tokens_per_s: generated since the line before.
        accept_length: tokens of a request in one step where the server speculates, else None.
    """

    server: str
    running: int
    tokens_per_s: float
    accept_length: float | None = None

    @property
    def step_us(self) -> float:
        """Wall time of a decode step; prefills between decode steps are in it."""
        return 1e6 * self.running * (self.accept_length or 1.0) / self.tokens_per_s


# sglang 0.5.6, 0.5.9, 0.5.12, 0.5.15 and 0.5.23: the order of the fields is one, others stand between.
_SGLANG = re.compile(
    r"Decode batch[^,]{0,24}, #running-req: (\d{1,7}),.{0,300}?"
    r"gen throughput \(token/s\): (\d{1,9}(?:\.\d{1,6})?)",
    re.ASCII,
)
_ACCEPTED = re.compile(r"accept len: (\d{1,4}(?:\.\d{1,6})?)", re.ASCII)
# vllm 0.11.0 to 0.33.0: v1/metrics/loggers.py.
_VLLM = re.compile(
    r"Avg generation throughput: (\d{1,9}(?:\.\d{1,6})?) tokens/s, Running: (\d{1,7}) reqs", re.ASCII
)
_SPECULATES = "SpecDecoding metrics"


def decode_rate(line: str) -> DecodeRate | None:
    """What a line says of decoding; None for other lines and for a server with nothing to do."""
    text = line[:2048]
    if match := _SGLANG.search(text):
        accepted = _ACCEPTED.search(text)
        running, rate = int(match[1]), float(match[2])
        found = DecodeRate("sglang", running, rate, float(accepted[1]) if accepted else None)
    elif match := _VLLM.search(text):
        found = DecodeRate("vllm", int(match[2]), float(match[1]))
    else:
        return None
    return found if found.running > 0 and found.tokens_per_s > 0 else None


def speculates(line: str) -> bool:
    """Whether a line says that vLLM decodes speculatively, which its rates do not show."""
    return _SPECULATES in line[:2048]

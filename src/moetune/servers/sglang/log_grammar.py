"""SGLang's log lines, by release. Their texts stand here, in log_lookups.py and in log_starts.py only.

The lines without a rule for a release are the same in all that were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.servers.log_events import Rule, apply_rules
from moetune.servers.sglang.log_lookups import LOOKUP_RULES
from moetune.servers.sglang.log_starts import START_RULES
from moetune.servers.sglang.releases import NEWEST

if TYPE_CHECKING:
    from moetune.servers import log_events as say

RULES: tuple[Rule, ...] = (*LOOKUP_RULES, *START_RULES)


class SGLangLogGrammar:
    """SGLang's lines, those of 0.5.1 to 0.5.23."""

    newest = NEWEST
    needles: tuple[bytes, ...] = (
        b"MoE",
        b"MOE kernel",
        b"_moe",
        b"W8A8 Block",
        b"Config file not",
        b"_args=",
        b"_total_num_tokens=",
        b"KV Cache is",
        b"Capture ",
        b"Disabl",
        b"Breakable CUDA",
        b"Piecewise cuda",
        b"FlashInfer ",
        b"Auto-enabling",
        b"Deterministic inf",
        b"Marlin",
        b"_marlin",
        b"WNA16",
        b"Load weight",
        b"The server is fired",
        b"Received sigquit",
        b"/layers/moe/",
    )
    openers: tuple[str, ...] = (
        "MoE kernel config",
        "Config file not found at",
        "Down MoE config",
        "Using default MoE",
        "Performance might be",
        "server_args=",
        "max_total_num_tokens=",
        "Capture cuda graph",
        "Capture target",
        "down_moe config",
    )

    def read(self, text: str) -> tuple[say.Event, ...]:
        """What a line says."""
        return apply_rules(RULES, text)

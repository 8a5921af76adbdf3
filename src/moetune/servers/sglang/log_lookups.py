"""SGLang's log lines about config files: what was looked for, found, missed and overridden.

Sources: the sglang wheels 0.5.1 to 0.5.23: `get_moe_configs`, `try_get_optimal_moe_config` of
`fused_moe_triton_config.py`. Dense GEMMs: `quantization/fp8_kernel.py`, `int8_kernel.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moetune.domain.text import printable
from moetune.servers import log_events as say
from moetune.servers.log_events import Rule
from moetune.servers.sglang.lookup import FIXED_FALLBACKS
from moetune.servers.sglang.names import parse_file_name

if TYPE_CHECKING:
    from collections.abc import Iterator

SGLANG: say.ServerName = "sglang"
_PATH = r"(\S.{0,2000}?\.json)"
_TRITON = re.compile(r"triton_(\d{1,4}(?:_\d{1,4}){1,3})$", re.ASCII)
_HOMES = (
    ("sglang/srt/layers/moe/moe_runner/triton_utils/configs/", say.Release(SGLANG, since=(0, 5, 11))),
    ("sglang/srt/layers/moe/fused_moe_triton/configs/", say.Release(SGLANG, until=(0, 5, 10))),
)


def read_name(path: str) -> say.ConfigName | None:
    """Take the path of a config file apart; None for what is no name of SGLang's grammar."""
    directory, _, file = path.rpartition("/")
    name = parse_file_name(file)
    if name is None:
        return None
    triton = _TRITON.search(directory)
    return say.ConfigName(
        file=file,
        directory=printable(directory, 1024),
        E=name.E,
        N=name.N,
        device=name.device,
        dtype=name.dtype,
        block_shape=name.block_shape,
        per_channel=name.per_channel,
        kernel="down" if name.down else "up",
        triton=triton[1].replace("_", ".") if triton else "",
    )


def _home(name: say.ConfigName) -> Iterator[say.Event]:
    """The package's own folder moved with 0.5.11."""
    for folder, bounds in _HOMES:
        if folder in f"{name.directory}/":
            yield bounds


def _found(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigFound(SGLANG, name)
        yield from _home(name)


def _stale(match: re.Match[str]) -> Iterator[say.Event]:
    wanted, found = read_name(match[1]), read_name(match[3])
    if wanted is not None and found is not None:
        yield say.ConfigStale(SGLANG, wanted, found)
        yield from _home(wanted)
        if found.triton not in FIXED_FALLBACKS:
            yield say.Release(SGLANG, since=(0, 5, 12))


def _default(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigMissing(SGLANG, (name,))
        yield from _home(name)


def _old_default(match: re.Match[str]) -> Iterator[say.Event]:
    """The words of vLLM, from which 0.4 took the code: the path tells."""
    if "sglang/" in match[1]:
        yield from _default(match)
        yield say.Release(SGLANG, until=(0, 5, 1))


def _down_false(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigMissing(SGLANG, (name,), down_only=True)
        yield say.Release(SGLANG, since=(0, 5, 6), until=(0, 5, 15))


def _down_reused(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigMissing(SGLANG, (name,), reused_up=True, down_only=True)
        yield say.Release(SGLANG, since=(0, 5, 16))


def _dense(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.DenseConfigMissing(None, printable(match[1].rpartition("/")[2], 300))


def _deterministic(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.FilesIgnored(SGLANG, "deterministic inference")
    yield say.Release(SGLANG, since=(0, 5, 5))


def _override(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.PairOverridden(SGLANG, int(match[1]), int(match[2]), int(match[3]))
    yield say.Release(SGLANG, since=(0, 5, 13))


def _tma(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.TmaEnabled(SGLANG, "up" if match[1] == "Up" else "down")
    yield say.Release(SGLANG, since=(0, 5, 18))


LOOKUP_RULES: tuple[Rule, ...] = (
    Rule("Using MoE kernel config from", re.compile(rf"Using MoE kernel config from {_PATH}"), _found),
    Rule(
        "Fallback to triton version",
        re.compile(
            rf"Config file not found at {_PATH}\. ?Fallback to triton version ([\d.]{{1,20}}) and use "
            rf"MoE kernel config from {_PATH}"
        ),
        _stale,
    ),
    Rule(
        "Using default MoE kernel config",
        re.compile(
            r"Using default MoE kernel config\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _default,
    ),
    Rule(
        "Using default MoE config.",
        re.compile(
            r"Using default MoE config\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _old_default,
    ),
    Rule(
        "down_moe=False",
        re.compile(
            r"Using MoE kernel config with down_moe=False\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _down_false,
    ),
    Rule(
        "Down MoE config file not found",
        re.compile(rf"Down MoE config file not found at {_PATH}; ?reusing"),
        _down_reused,
    ),
    Rule(
        "kernel config. Performance might be",
        re.compile(
            r"Using default W8A8 Block (?:FP8|INT8) kernel config\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _dense,
    ),
    Rule(
        "Deterministic inference is enabled, using default MoE",
        re.compile(r"Deterministic inference is enabled, using default MoE kernel config"),
        _deterministic,
    ),
    Rule(
        "down_moe config BLOCK_SIZE_M",
        re.compile(
            r"down_moe config BLOCK_SIZE_M=(\d{1,6}) does not match up config BLOCK_SIZE_M=(\d{1,6}) "
            r"at M=(\d{1,9})"
        ),
        _override,
    ),
    Rule("MoE TMA is enabled", re.compile(r"\b(Up|Down) MoE TMA is enabled"), _tma),
)

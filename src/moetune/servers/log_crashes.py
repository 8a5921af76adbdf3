"""Exceptions that the loading of a tuned file or the launch of the kernel ends with, by both servers.

The texts are Python's, Triton's and json's. Sources: triton 3.6.0 and 3.8.0,
`triton/runtime/errors.py:OutOfResources` and `triton/runtime/jit.py` (what binding a launch raises);
which of them a file can cause was tried with the loaders and kernels of the sglang 0.5.23 and vllm
0.33.0 wheels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.text import printable
from moetune.servers.log_events import Event, OutOfResources, Raised, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MESSAGE = 300


def _out_of_resources(match: re.Match[str]) -> Iterator[Event]:
    yield OutOfResources(None, match[1].strip(), int(match[2]), int(match[3]))


def _raised(match: re.Match[str]) -> Iterator[Event]:
    yield Raised(None, match[1].rpartition(".")[2], printable((match[2] or "").strip(), MAX_MESSAGE))


RULES = (
    Rule(
        "Hardware limit",
        re.compile(
            r"out of resource: ([a-z ]{1,40}), Required: (\d{1,12}),? Hardware limit: (\d{1,12})", re.ASCII
        ),
        _out_of_resources,
    ),
    Rule(
        "Error",
        re.compile(
            r"(?:^|[\] :])((?:[a-z_]\w{0,40}\.){0,6}[A-Z]\w{0,60}Error)(?:: (.{0,1000})|()$)", re.ASCII
        ),
        _raised,
    ),
)
NEEDLES = (b"Error", b"Hardware limit")


@dataclass(frozen=True, slots=True)
class Fault:
    """What an exception means for a tuned file.

    Attributes:
        code: of the finding.
        kinds: types of the exception.
        message: expression that the message must hold.
        parts: where the traceback must have passed: `loader`, `kernel`, or both.
        explanation: what was wrong, with the groups of the expression filled in.
    """

    code: str
    kinds: tuple[str, ...]
    message: re.Pattern[str]
    parts: tuple[str, ...]
    explanation: str


_LOADER, _KERNEL = ("loader",), ("kernel",)
_ANY = ("loader", "kernel")


def _text(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "MOE004",
        ("FileNotFoundError",),
        _text(r"No such file or directory: '?([^'\n]{0,400}configs)/?'?\s*$"),
        _LOADER,
        "the directory {0} does not exist, and the server lists it when its own Triton's file is missing",
    ),
    Fault(
        "MOE005",
        ("ValueError",),
        _text(r"invalid literal for int\(\) with base 10: '([^'\n]{0,80})'"),
        _LOADER,
        "{0!r} is read as a whole number and is none: a top-level key of the file, or a part of the name of "
        "an entry triton_* of the directory configs",
    ),
    Fault(
        "MOE006",
        ("JSONDecodeError", "UnicodeDecodeError"),
        _text(r"(.{0,200})"),
        _LOADER,
        "the file is no JSON: {0}",
    ),
    Fault(
        "MOE006",
        ("AttributeError",),
        _text(r"'(list|str|int|float|bool|NoneType)' object has no attribute '(items|pop|keys)'"),
        _ANY,
        "the file holds a {0}, not an object of entries",
    ),
    Fault(
        "MOE007",
        ("KeyError",),
        _text(r"['\"]?Keyword argument (\w{1,64}) was specified but unrecogni[sz]ed"),
        _ANY,
        "an entry has the key {0}, which the kernel does not take",
    ),
    Fault(
        "MOE008",
        ("TypeError",),
        _text(
            r"missing (?:a )?\d{0,3} ?required (?:positional |keyword-only )?arguments?: '?([\w', ]{1,200})"
        ),
        _KERNEL,
        "an entry lacks {0}, which the kernel requires",
    ),
    Fault(
        "MOE008",
        ("KeyError",),
        _text(r"^['\"]?((?:BLOCK_SIZE_[MNK]|GROUP_SIZE_M|SPLIT_K))['\"]?$"),
        _ANY,
        "an entry lacks {0}",
    ),
    Fault(
        "MOE009",
        ("AssertionError",),
        _text(r"(.{0,200})"),
        _LOADER,
        "BLOCK_SIZE_M of the up file and of the down file differ for one number of tokens {0}",
    ),
    Fault(
        "MOE010",
        ("CompilationError", "ValueError"),
        _text(
            r"(arange's range must be a power of 2|must be (?:at least|>=) ?16|"
            r"Shape element \d{1,3} must be a power of 2)"
        ),
        _KERNEL,
        "an entry has a block size that Triton cannot compile: {0}",
    ),
    Fault(
        "MOE011",
        ("AcceleratorError", "RuntimeError", "TorchRuntimeError"),
        _text(r"(illegal memory access|misaligned address|unspecified launch failure)"),
        _KERNEL,
        "the kernel ended with: {0}",
    ),
)


def fault_of(raised: Raised, part: str) -> tuple[Fault, str] | None:
    """What an exception that passed a part of the fused-MoE code means, and the sentence for it."""
    for fault in FAULTS:
        if raised.kind in fault.kinds and part in fault.parts:
            match = fault.message.search(raised.message)
            if match is not None:
                groups = [printable((group or "").strip(), 120) for group in match.groups()]
                return fault, fault.explanation.format(*groups).strip()
    return None

"""The grammar of GPU names and of compute capabilities: they end up in file names."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ()._+-]*", re.A)
# `1g.10gb`, with a compute instance `1c.3g.40gb`, with media engines `1g.10gb+me`.
_MIG = re.compile(r"(.+) MIG ((?:[1-7]c\.)?([1-7])g\.(\d{1,4})gb(?:[+-][a-z]+(?:\.[a-z]+)*)?)", re.I | re.A)
_TARGET = re.compile(r"(?:sm_?)?(\d{1,2}?)(?:\.(\d)|(\d))[af]?|(gfx[0-9a-f]{3,5})", re.I | re.A)
# Words that people leave out of a name.
_VENDOR_WORDS = frozenset({"nvidia", "geforce", "amd", "instinct"})


@dataclass(frozen=True, slots=True)
class MigName:
    """The name of a MIG slice, taken apart.

    Attributes:
        whole: name of the GPU that was cut.
        profile: `1g.10gb`.
        compute_slices: of the seven of a whole GPU.
        memory_gb: memory as the profile says it.
    """

    whole: str
    profile: str
    compute_slices: int
    memory_gb: int


def check_name(name: str) -> str:
    """Check a GPU's name and give back its plain spelling: blanks for underscores.

    Raises:
        InputError: for separators, `..`, control characters and whatever else no GPU has in its name.
    """
    text = re.sub("[ _]+", " ", name[: _MAX_LENGTH + 1]).strip(" ")
    if len(name) > _MAX_LENGTH or _NAME.fullmatch(text) is None or ".." in text:
        raise InputError(
            f"{name[:_MAX_LENGTH]!a} is not the name of a GPU",
            "give it as torch prints it, as in `--gpu 'NVIDIA H100 80GB HBM3'`",
        )
    return text


def parse_mig(name: str) -> MigName | None:
    """Take the name of a MIG slice apart; None for a whole GPU."""
    match = _MIG.fullmatch(name)
    return MigName(match[1], match[2].lower(), int(match[3]), int(match[4])) if match else None


def parse_target(text: str) -> str:
    """Read a compute capability or a gfx name: `9.0`, `90` and `sm_90a` give `9.0`.

    Raises:
        InputError: when the text is neither.
    """
    match = _TARGET.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{text[:40]!a} is not a compute capability", "give it as in `--compute-capability 9.0`"
        )
    return match[4].lower() if match[4] else f"{int(match[1])}.{match[2] or match[3]}"


def short_names(name: str) -> list[str]:
    """A lower-case name without the vendor's words, one after the other."""
    words = name.lower().split()
    short = []
    while len(words) > 1 and words[0] in _VENDOR_WORDS:
        words = words[1:]
        short.append(" ".join(words))
    return short


def nearest_names(name: str, names: Iterable[str], count: int = 4) -> tuple[str, ...]:
    """The names that look like a name, most alike first."""
    words = frozenset(name.lower().split())

    def likeness(other: str) -> tuple[float, float]:
        shared = words & frozenset(other.lower().split()) - _VENDOR_WORDS
        ratio = difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()
        return len(shared) / max(len(words), 1), ratio

    scored = [(likeness(other), other) for other in names]
    alike = [(score, other) for score, other in scored if score[0] > 0 or score[1] > 0.6]
    # A stable sort: names that are equally alike stay in their order.
    return tuple(other for _, other in sorted(alike, key=lambda pair: pair[0], reverse=True)[:count])

"""Whether a published server can print a text: its log messages, read from its source.

A message is what stands between quotation marks, f-strings and `%s` included: its constant pieces with
gaps between them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tests.wheels import members, read_member

_SOURCES = {
    "sglang": re.compile(
        r"sglang/srt/(server_args\.py|arg_groups/[a-z_]*(hook|overrides)\.py|"
        r"model_executor/(model_runner|[a-z_]*graph_runner)\.py|"
        r"model_executor/model_runner_components/cuda_graph_setup\.py|"
        r"layers/flashinfer_comm_fusion\.py|layers/moe/(fused_moe_triton|moe_runner/triton_utils)/[^/]*\.py)"
    ),
    "vllm": re.compile(
        r"vllm/(compilation/(collective_fusion|passes/fusion/allreduce_rms_fusion)\.py|"
        r"model_executor/layers/fused_moe/(fused_moe|oracle/[^/]*)\.py)"
    ),
}
_GAP = re.compile(r"%(?:\.\d+)?[sdrf]")
_SHORTEST = 5
Pieces = tuple[str, ...]


@dataclass(frozen=True)
class Messages:
    """The messages of a release.

    Attributes:
        constants: all constant pieces, one a line.
        before_gaps: the last characters of a piece to the pieces from there on.
    """

    constants: str
    before_gaps: Mapping[str, list[Pieces]]

    def can_print(self, text: str) -> bool:
        """Whether one of them can hold a text."""
        if text in self.constants:
            return True
        for end in range(_SHORTEST, len(text) + 1):
            for first, *rest in self.before_gaps.get(text[end - _SHORTEST : end], ()):
                if first.endswith(text[:end]) and _goes_on(text[end:], tuple(rest)):
                    return True
        return False


def _goes_on(text: str, pieces: Pieces) -> bool:
    """Whether a text goes on with a gap and then these pieces; it may end within any of them."""
    if not text or not pieces or not pieces[0]:
        return len(text.split()) <= 1
    at = text.find(pieces[0])
    if at >= 0:
        return _goes_on(text[at + len(pieces[0]) :], pieces[1:])
    return len(text.split()) == 1 or any(text.endswith(pieces[0][:end]) for end in range(4, len(pieces[0])))


@cache
def messages(package: str, version: str) -> Messages:
    """The texts in the sources that log what proofs speak of."""
    found: set[Pieces] = set()
    for name in members(package, version):
        if _SOURCES[package].fullmatch(name):
            for node in ast.walk(ast.parse(read_member(package, version, name))):
                if isinstance(node, ast.Constant | ast.JoinedStr):
                    found.update(_pieces(node))
    index: dict[str, list[Pieces]] = {}
    for pieces in found:
        for at, piece in enumerate(pieces[:-1]):
            if len(piece) >= _SHORTEST:
                index.setdefault(piece[-_SHORTEST:], []).append(pieces[at:])
    return Messages("\n".join(piece for pieces in found for piece in pieces), index)


def _pieces(node: ast.Constant | ast.JoinedStr) -> Iterator[Pieces]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and len(node.value) >= _SHORTEST:
            yield tuple(_GAP.split(node.value))
        return
    pieces = [""]
    for part in node.values:
        if isinstance(part, ast.Constant):
            first, *rest = _GAP.split(str(part.value))
            pieces[-1] += first
            pieces += rest
        else:
            pieces.append("")
    yield tuple(pieces)

"""What the kernels and the steps in a trace of a server are, by their names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

Phase = Literal["decode", "prefill", "unknown"]

MOE_GEMM = "moe gemm"
TRITON = "Triton"
"""The runner whose kernel reads the tuned files."""
OTHER = "other"


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a kernel does in a step.

    Attributes:
        part: `moe gemm`, `align`, `route`, `activation`, `sum`, `all-reduce` or `other`.
        runner: of a `moe gemm`, whose kernel it is.
    """

    part: str
    runner: str = ""

    @property
    def tunable(self) -> bool:
        """Whether a config file changes this kernel."""
        return self.part == MOE_GEMM and self.runner == TRITON


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step of a server as its trace names it.

    Attributes:
        server: that names steps so.
        phase: `decode` or `prefill`; a step with both is a prefill, whose tokens are the larger part.
        requests: in the step, None when the name does not say.
        tokens: that enter the MoE layers, None when the name does not say.
    """

    server: str
    phase: Phase
    requests: int | None
    tokens: int | None


@cache
def _data() -> dict[str, Any]:
    text = (resources.files("moetune.servers") / "data" / "step_parts.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@cache
def _parts() -> tuple[tuple[re.Pattern[str], StepPart], ...]:
    return tuple(
        (re.compile(item["pattern"], re.DOTALL), StepPart(item["part"], item.get("runner", "")))
        for item in _data()["parts"]
    )


@cache
def _spans() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(item["pattern"], re.ASCII), item["server"]) for item in _data()["spans"])


def part_of(kernel: str) -> StepPart:
    """What a kernel does, by its name in a trace."""
    name = kernel[:1024].removeprefix("void ")
    for pattern, part in _parts():
        if pattern.match(name):
            return part
    return StepPart(OTHER)


def span_of(annotation: str) -> StepSpan | None:
    """The step that an annotation in a trace stands for, None for any other annotation."""
    for pattern, server in _spans():
        match = pattern.match(annotation[:512])
        if match is None:
            continue
        found = {name: text for name, text in match.groupdict().items() if text is not None}
        if "word" in found:
            return _sglang_span(found["word"], int(found["requests"]), _whole(found.get("tokens")))
        if "contexts" in found:
            requests = int(found["contexts"]) + int(found["generations"])
            tokens = int(found["context_tokens"]) + int(found["generation_tokens"])
            return StepSpan(server, "prefill" if int(found["contexts"]) else "decode", requests, tokens)
        new, cached = int(found["new"]), int(found["cached"])
        # Without new requests a step of vLLM decodes, or goes on with a chunked prefill: the name
        # does not say which, so a token each is no more than the usual case.
        return StepSpan(server, "prefill" if new else "decode", new + cached, None if new else cached)
    return None


def _sglang_span(word: str, requests: int, tokens: int | None) -> StepSpan:
    if word in ("DECODE", "VERIFY", "TARGET_VERIFY"):
        return StepSpan(
            "sglang", "decode", requests, tokens if tokens is not None else _one_each(word, requests)
        )
    phase: Phase = "prefill" if word in ("EXTEND", "MIXED") else "unknown"
    return StepSpan("sglang", phase, requests, tokens)


def _one_each(word: str, requests: int) -> int | None:
    """Tokens of a decode step: one a request; a verification has several, which its name leaves out."""
    return requests if word == "DECODE" else None


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)

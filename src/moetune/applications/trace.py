"""Traces of torch's profiler, streamed: kernels, the steps they belong to, and what takes their time.

A Chrome trace is one JSON object whose `traceEvents` is a list of events, gigabytes of it. Events
are decoded one at a time; of a kernel only four numbers are kept. A kernel belongs to the step in
which it was launched: the launch and the kernel carry the same correlation, and all kernels of a
replayed CUDA graph carry that of the replay.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moetune.applications.doctor_reader import LogSource, whole_text
from moetune.domain.errors import InputError
from moetune.domain.step_time import StepTime, step_times
from moetune.domain.text import printable
from moetune.servers.step_parts import MOE_GEMM, OTHER, Phase, StepPart, StepSpan, part_of, span_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

_MAX_EVENT = 1 << 20
"""Characters of one event; those of torch have a few hundred, with shapes and stacks some thousands."""
_MAX_KERNELS = 20_000_000
_MAX_NAMES = 100_000
_OPENING = re.compile(r'"traceEvents"\s{0,64}:\s{0,64}\[')
_SEPARATORS = re.compile(r"[\s,]*")
_PHASE_OF_FILE = re.compile(r"-(DECODE|EXTEND|PREFILL)\.trace\.json(?:\.gz)?$")
_PHASES: dict[str, Phase] = {"DECODE": "decode", "EXTEND": "prefill", "PREFILL": "prefill"}
_TOP = 10
_LEAST_OF_GRAPH = 4
"""MoE kernels of a graph that is a whole decode step: two layers at least."""


class TraceError(InputError):
    """A file that is no trace of torch's profiler, or none of a GPU."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step of the server in a trace.

    Attributes:
        phase: `decode`, `prefill`, or `unknown`.
        requests: in it, None when nothing says so.
        tokens: that entered its MoE layers, None when nothing says so.
        time: its times.
    """

    phase: Phase
    requests: int | None
    tokens: int | None
    time: StepTime


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace says.

    Attributes:
        path: of the file.
        server: whose steps it names, empty when it names none.
        steps: in the order of time; without named steps and graphs one that is the whole trace.
        runners: of the MoE GEMMs, name to their kernels' microseconds, longest first.
        parts: what takes the GPU's time, part to the sum of microseconds, longest first.
        top_kernels: `(name, microseconds)` of the longest kernels that no part is known for.
        how: where the steps come from: `named`, `graphs`, or `whole`.
        problems: why it may be less than the whole, in sentences.
    """

    path: str
    server: str
    steps: tuple[TracedStep, ...]
    runners: tuple[tuple[str, float], ...]
    parts: tuple[tuple[str, float], ...]
    top_kernels: tuple[tuple[str, float], ...]
    how: str
    problems: tuple[str, ...] = ()


def read_trace(path: str | Path) -> Trace:
    """Read a trace of one rank, plain or gzip.

    Args:
        path: a `*.trace.json` or `*.trace.json.gz`, of SGLang's or vLLM's torch profiler.

    Raises:
        TraceError: for what is no such trace, and for one without GPU kernels.
        InputError: for what cannot be read.
    """
    source = LogSource(str(path))
    book = _Book()
    for event in _events(source):
        book.add(event)
    name = printable(str(path), 200)
    if not book.begins:
        raise TraceError(
            f"{name} holds no GPU kernels",
            'profile with "activities": ["CPU", "GPU"], and give the trace of a rank',
        )
    return _trace(name, book, tuple(source.problems + book.problems))


# --- events -----------------------------------------------------------------------------------------


def _events(source: LogSource) -> Iterator[dict[str, Any]]:
    """The events of a trace, one at a time."""
    decoder = json.JSONDecoder()
    name = printable(source.name, 200)
    chunks = (chunk.decode("utf-8", "replace") for chunk in whole_text(source))
    buffer, inside = "", False
    for chunk in chunks:
        buffer += chunk
        if not inside:
            opening = _OPENING.search(buffer)
            if opening is None:
                if len(buffer) > 64 * _MAX_EVENT:
                    raise TraceError(f"{name} is no trace of torch's profiler: it has no traceEvents")
                continue
            buffer, inside = buffer[opening.end() :], True
        at = 0
        while True:
            at = _past_separators(buffer, at)
            if at >= len(buffer):
                break
            if buffer[at] == "]":
                return
            if buffer[at] != "{":
                raise TraceError(f"{name}: an event is no JSON object: {printable(buffer[at : at + 40])!r}")
            try:
                event, at = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError):
                if len(buffer) - at > _MAX_EVENT:
                    raise TraceError(
                        f"{name}: an event is damaged or larger than {_MAX_EVENT} bytes"
                    ) from None
                break
            yield event
        buffer = buffer[at:]
    if not inside:
        raise TraceError(
            f"{name} is no trace of torch's profiler: it has no traceEvents",
            "give a *.trace.json or *.trace.json.gz as the server's /start_profile writes it",
        )
    source.problems.append("it is cut off: what stands before the cut was read")


def _past_separators(buffer: str, at: int) -> int:
    match = _SEPARATORS.match(buffer, at)
    return match.end() if match is not None else at


@dataclass(slots=True)
class _Book:
    """What is kept of the events."""

    begins: array[float] = field(default_factory=lambda: array("d"))
    durations: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("i"))
    correlations: array[int] = field(default_factory=lambda: array("q"))
    launch_times: array[float] = field(default_factory=lambda: array("d"))
    launch_correlations: array[int] = field(default_factory=lambda: array("q"))
    graph_launches: set[int] = field(default_factory=set)
    spans: list[tuple[float, float, StepSpan]] = field(default_factory=list)
    gpu_spans: list[tuple[float, float, StepSpan]] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Take what is of use from an event."""
        if event.get("ph") != "X":
            return
        category, name = event.get("cat"), event.get("name")
        begin, duration = _time(event.get("ts")), _time(event.get("dur", 0))
        if not isinstance(name, str) or begin is None or duration is None:
            return
        if category == "kernel":
            self._add_kernel(name, begin, duration, event)
        elif category in ("cuda_runtime", "cuda_driver"):
            correlation = _correlation(event)
            if correlation is not None and "Launch" in name:
                self.launch_times.append(begin)
                self.launch_correlations.append(correlation)
                if "GraphLaunch" in name:
                    self.graph_launches.add(correlation)
        elif category in ("user_annotation", "gpu_user_annotation"):
            span = span_of(name)
            if span is not None:
                spans = self.spans if category == "user_annotation" else self.gpu_spans
                spans.append((begin, begin + duration, span))

    def _add_kernel(self, name: str, begin: float, duration: float, event: dict[str, Any]) -> None:
        if len(self.begins) >= _MAX_KERNELS:
            if not self.problems:
                self.problems.append(f"it holds more than {_MAX_KERNELS} kernels: the rest was left out")
            return
        index = self.known.get(name)
        if index is None:
            index = len(self.known)
            if index >= _MAX_NAMES:
                name, index = "", self.known.setdefault("", index)
            self.known[name] = index
        correlation = _correlation(event)
        self.begins.append(begin)
        self.durations.append(duration)
        self.names.append(index)
        self.correlations.append(-1 if correlation is None else correlation)


def _time(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    return None


def _correlation(event: dict[str, Any]) -> int | None:
    arguments = event.get("args")
    value = arguments.get("correlation") if isinstance(arguments, dict) else None
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else None


# --- steps ------------------------------------------------------------------------------------------


def _trace(name: str, book: _Book, problems: tuple[str, ...]) -> Trace:
    parts = [part_of(kernel) for kernel in book.known]
    kernels = _Kernels(book, parts)
    spans, owners = _named_steps(book, kernels)
    how = "named"
    if not spans:
        spans, owners = _graph_steps(book, kernels)
        how = "graphs"
    if not spans:
        spans, owners = [_file_span(name)], np.zeros(len(kernels.begin), dtype=np.int64)
        how = "whole"
    members = _groups(owners, len(spans))
    order = sorted(
        (index for index, member in enumerate(members) if len(member)),
        key=lambda index: float(kernels.begin[members[index]].min()),
    )
    times = step_times(
        [(kernels.begin[members[i]], kernels.end[members[i]], kernels.moe[members[i]]) for i in order]
    )
    steps = tuple(
        TracedStep(spans[index].phase, spans[index].requests, spans[index].tokens, time)
        for index, time in zip(order, times, strict=True)
    )
    runners, totals, others = kernels.totals(list(book.known))
    return Trace(
        path=name,
        server=next((span.server for span in spans if span.server), ""),
        steps=steps,
        runners=runners,
        parts=totals,
        top_kernels=others,
        how=how,
        problems=problems,
    )


class _Kernels:
    """The kernels of a book as arrays `[n]`."""

    def __init__(self, book: _Book, parts: list[StepPart]) -> None:
        self.begin = np.frombuffer(book.begins, dtype=np.float64)
        self.duration = np.frombuffer(book.durations, dtype=np.float64)
        self.end = self.begin + self.duration
        self.name = np.frombuffer(book.names, dtype=np.int32)
        self.correlation = np.frombuffer(book.correlations, dtype=np.int64)
        self.moe = np.array([part.part == MOE_GEMM for part in parts])[self.name]
        self._parts = parts

    def totals(
        self, names: list[str]
    ) -> tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float], ...], tuple[tuple[str, float], ...]]:
        """Microseconds by runner, by part, and of the longest unknown kernels."""
        by_name = np.bincount(self.name, weights=self.duration, minlength=len(names))
        runners: dict[str, float] = {}
        parts: dict[str, float] = {}
        others: dict[str, float] = {}
        for index, part in enumerate(self._parts):
            spent = float(by_name[index])
            parts[part.part] = parts.get(part.part, 0.0) + spent
            if part.part == MOE_GEMM:
                runners[part.runner] = runners.get(part.runner, 0.0) + spent
            elif part.part == OTHER:
                name = printable(names[index], 120)
                others[name] = others.get(name, 0.0) + spent
        return _longest(runners), _longest(parts), _longest(others)[:_TOP]


def _longest(totals: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _named_steps(book: _Book, kernels: _Kernels) -> tuple[list[StepSpan], Indices]:
    """Steps that the server names, and of each kernel its step or -1."""
    launched = _launch_times(book, kernels)
    if book.spans and launched is not None:
        return _within(book.spans, launched)
    if book.gpu_spans:
        return _within(book.gpu_spans, kernels.begin)
    return [], np.empty(0, dtype=np.int64)


def _within(
    spans: list[tuple[float, float, StepSpan]], moments: NDArray[np.float64]
) -> tuple[list[StepSpan], Indices]:
    """The innermost span that began last before each moment and has not ended by then."""
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    begins = np.array([begin for begin, _, _ in ordered])
    ends = np.array([end for _, end, _ in ordered])
    owner = np.searchsorted(begins, moments, side="right").astype(np.int64) - 1
    outside = (owner < 0) | (moments > ends[np.maximum(owner, 0)])
    owner[outside | ~np.isfinite(moments)] = -1
    return [span for _, _, span in ordered], owner


def _launch_times(book: _Book, kernels: _Kernels) -> NDArray[np.float64] | None:
    """When each kernel was launched, NaN where the trace does not say; None where it never does."""
    if not book.launch_times:
        return None
    correlations = np.frombuffer(book.launch_correlations, dtype=np.int64)
    times = np.frombuffer(book.launch_times, dtype=np.float64)
    order = np.argsort(correlations, kind="stable")
    place = np.minimum(np.searchsorted(correlations[order], kernels.correlation), len(order) - 1)
    found = correlations[order][place] == kernels.correlation
    return np.where(found, times[order][place], np.nan)


def _graph_steps(book: _Book, kernels: _Kernels) -> tuple[list[StepSpan], Indices]:
    """Replays of graphs that hold whole layers: decode steps of releases that name none."""
    owner = np.full(len(kernels.begin), -1, dtype=np.int64)
    spans: list[StepSpan] = []
    order = np.argsort(kernels.correlation, kind="stable")
    values, starts = np.unique(kernels.correlation[order], return_index=True)
    for value, members in zip(values, np.split(order, starts[1:]), strict=True):
        if int(value) in book.graph_launches and int(kernels.moe[members].sum()) >= _LEAST_OF_GRAPH:
            owner[members] = len(spans)
            spans.append(StepSpan("", "decode", None, None))
    return spans, owner


def _groups(owners: Indices, count: int) -> list[Indices]:
    order = np.argsort(owners, kind="stable")
    edges = np.searchsorted(owners[order], np.arange(count + 1))
    return [order[edges[index] : edges[index + 1]] for index in range(count)]


def _file_span(name: str) -> StepSpan:
    """The whole of a trace as one step, of the phase that SGLang puts into the file's name."""
    match = _PHASE_OF_FILE.search(name)
    return StepSpan("", _PHASES[match[1]] if match else "unknown", None, None)

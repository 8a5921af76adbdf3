"""`moetune routing`: what a recording says, written on where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from moetune import __version__
from moetune.applications.provenance import rounded
from moetune.applications.routings import Read, for_tuner, read_recording, write_directory
from moetune.domain.codec import to_json
from moetune.domain.errors import InputError
from moetune.domain.keys import LARGEST_M
from moetune.domain.recording import Recording
from moetune.domain.routing_statistics import (
    USUAL_BLOCKS,
    USUAL_MS,
    LayerStatistics,
    layer_statistics,
)
from moetune.domain.synthetic_routing import law_name, skew_of, synthetic_recording

SCHEMA = "moetune.routing/1"
_LARGEST_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What is asked of a recording.

    Attributes:
        paths: files and directories of one recording; empty for a synthetic one.
        synthetic: `uniform` or `zipf:S`, for a recording that is made up.
        layers: numbers of the layers of a synthetic one; of another those that are kept, empty keeps all.
        tokens: of each call of a synthetic one.
        calls: of each layer of a synthetic one.
        experts: global experts.
        topk: experts of a token, for a synthetic one and where only counts are known.
        seed: of a synthetic one.
        ep: ranks of expert parallelism.
        rank: see what this rank sees; None sees all.
        ms: tokens of calls to count blocks for.
        block_ms: BLOCK_SIZE_M to count blocks for.
        out: where to write what SGLang's separate tuner reads.
        python: the interpreter that reads and writes `.pt` files; None takes this one.
    """

    paths: tuple[str | Path, ...] = ()
    synthetic: str | None = None
    layers: tuple[int, ...] = ()
    tokens: int | None = None
    calls: int = 2
    experts: int | None = None
    topk: int | None = None
    seed: int = 0
    ep: int = 1
    rank: int | None = None
    ms: tuple[int, ...] = USUAL_MS
    block_ms: tuple[int, ...] = USUAL_BLOCKS
    out: str | Path | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        if bool(self.paths) == (self.synthetic is not None):
            raise InputError(
                "give the files of a recording, or a law for a synthetic one",
                "moetune routing DIR, or moetune routing --synthetic zipf:1.2 --layers 48 --tokens 8192 "
                "--experts 128 --topk 8 --out DIR",
            )
        if self.synthetic is None and self.tokens is not None:
            raise InputError("--tokens says how large a synthetic recording is", "add --synthetic zipf:1.2")
        if not all(1 <= m <= LARGEST_M for m in self.ms):
            raise InputError(f"--m names no calls of 1 to {LARGEST_M:,} tokens", "as in --m 16,1024")
        if not all(1 <= size <= _LARGEST_BLOCK for size in self.block_ms):
            raise InputError("--block-m names no BLOCK_SIZE_M", "as in --block-m 16,64,128")
        if self.rank is not None and self.ep < 2:
            raise InputError("--rank is one of expert parallelism", "add --ep SIZE")


@dataclass(frozen=True, slots=True)
class RoutingAnswer:
    """What a recording says.

    Attributes:
        recording: what was read, or made; of the rank that was asked for.
        law: of a synthetic one; empty for what was recorded.
        files: that were read.
        topk: experts of a token; None where it is not known.
        global_experts: over all ranks.
        ep: ranks.
        rank: that of the numbers; None for all.
        layers: one for each.
        remarks: what a person should know.
        out: the directory that was written; None where none was.
        written: the names in it.
    """

    recording: Recording
    law: str
    files: int
    topk: int | None
    global_experts: int
    ep: int
    rank: int | None
    layers: tuple[LayerStatistics, ...]
    remarks: tuple[str, ...]
    out: Path | None = None
    written: tuple[str, ...] = ()

    @property
    def by_balance(self) -> tuple[LayerStatistics, ...]:
        """The layers, the worst balanced one first."""
        return tuple(sorted(self.layers, key=lambda layer: (layer.balance, layer.number)))

    @property
    def median(self) -> LayerStatistics:
        """The layer in the middle."""
        return self.by_balance[len(self.layers) // 2]

    def mean(self, name: str) -> float | None:
        """The mean of a number over the layers; None where one of them lacks it."""
        values = [getattr(layer, name) for layer in self.layers]
        return None if any(value is None for value in values) else fmean(values)

    def blocks(self) -> Iterator[tuple[int, int, float, float]]:
        """For each m and BLOCK_SIZE_M blocks and those of uniform routing, the mean over the layers."""
        found: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for layer in self.layers:
            for blocks in layer.blocks:
                found.setdefault((blocks.m, blocks.block_m), []).append((blocks.blocks, blocks.uniform))
        for (m, block_m), pairs in sorted(found.items()):
            yield m, block_m, fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune routing --json`."""
        ordered = self.by_balance
        document: Mapping[str, Any] = {
            "schema": SCHEMA,
            "moetune": __version__,
            "form": self.recording.form,
            "law": self.law or None,
            "files": self.files,
            "routing": self.recording.routing if self.recording.has_ids and self.rank is None else None,
            "experts": self.recording.experts,
            "experts_known": self.recording.experts_known,
            "global_experts": self.global_experts,
            "topk": self.topk,
            "ep": self.ep,
            "rank": self.rank,
            "remarks": list(self.remarks),
            "layers": [self._layer(layer) for layer in self.layers],
            "summary": {
                "layers": len(self.layers),
                "worst_layer": ordered[0].number,
                "median_layer": self.median.number,
                "best_layer": ordered[-1].number,
                "balance": self.mean("balance"),
                "rank_balance": self.mean("rank_balance"),
                "variation": self.mean("variation"),
                "never_hit": sum(layer.never_hit for layer in self.layers),
                "exponent": self.mean("exponent"),
                "blocks": [
                    {"m": m, "block_m": size, "blocks": blocks, "uniform": even, "ratio": blocks / even}
                    for m, size, blocks, even in self.blocks()
                ],
            },
            "out": None if self.out is None else str(self.out),
            "written": list(self.written),
        }
        rounded_document: dict[str, Any] = rounded(document)
        return rounded_document

    @staticmethod
    def _layer(layer: LayerStatistics) -> dict[str, Any]:
        document: dict[str, Any] = to_json(layer)
        for part, blocks in zip(document["blocks"], layer.blocks, strict=True):
            part["ratio"] = blocks.ratio
        return document


def inspect(request: RoutingRequest) -> RoutingAnswer:
    """Answer a request; what `out` asks for is written.

    Raises:
        MoetuneError: for what cannot be read, made or written.
    """
    read, law = _made(request) if request.synthetic is not None else (_read(request), "")
    recording, everywhere = read.recording, read.recording.experts
    topk, remarks = recording.topk or request.topk, list(read.remarks)
    if request.topk is not None and recording.topk not in (None, request.topk):
        raise InputError(f"tokens of the recording have {recording.topk} experts, not {request.topk}")
    if request.ep > 1:
        seen = recording.on_rank(request.ep, request.rank or 0)  # says what cannot be spread
        recording = recording if request.rank is None else seen
    layers = tuple(
        layer_statistics(
            layer,
            recording.experts,
            topk,
            global_experts=everywhere,
            ms=request.ms,
            block_ms=request.block_ms,
            ranks=request.ep,
        )
        for layer in recording.layers
    )
    out: Path | None = None
    written: tuple[str, ...] = ()
    if request.out is not None:
        whole, more = for_tuner(recording)
        remarks += more
        out, written = Path(request.out), write_directory(whole, request.out, request.python)
    return RoutingAnswer(
        recording,
        law,
        read.files,
        topk,
        everywhere,
        request.ep,
        request.rank,
        layers,
        tuple(remarks),
        out,
        written,
    )


def _read(request: RoutingRequest) -> Read:
    read = read_recording(request.paths, experts=request.experts, python=request.python)
    if not request.layers:
        return read
    return Read(_kept(read.recording, request.layers), read.files, read.remarks)


def _kept(recording: Recording, wanted: Sequence[int]) -> Recording:
    layers = tuple(layer for layer in recording.layers if layer.number in set(wanted))
    if not layers:
        numbers = [layer.number for layer in recording.layers]
        raise InputError(
            "none of these layers was recorded",
            f"there are {len(numbers)} from {numbers[0]} to {numbers[-1]}",
        )
    return Recording(recording.form, recording.experts, recording.experts_known, layers)


def _made(request: RoutingRequest) -> tuple[Read, str]:
    if request.experts is None or request.topk is None or request.tokens is None or not request.layers:
        raise InputError(
            "a synthetic recording needs --layers, --tokens, --experts and --topk",
            "moetune routing --synthetic zipf:1.2 --layers 48 --tokens 8192 --experts 128 --topk 8 --out DIR",
        )
    skew = skew_of(request.synthetic or "")
    recording = synthetic_recording(
        request.layers, request.tokens, request.calls, request.experts, request.topk, skew, request.seed
    )
    return Read(recording, 0), law_name(skew)

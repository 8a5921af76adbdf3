"""From a file that a server looked for back to what would make it: release, GPU, model, split, dtype.

Every answer is tried forwards: a split counts only if the server's own rules give exactly the file
name that stands in the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError
from moetune.domain.gpu import Gpu, find_gpu
from moetune.domain.model import ExpertLayer, read_expert_layer
from moetune.domain.packaged_models import find_packaged, packaged_models
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization_names import parse_quantization
from moetune.domain.text import printable
from moetune.domain.version import parse_release
from moetune.servers.protocol import ServerOptions
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moetune.applications.doctor_records import Crash, ServerFacts, Shape, Start
    from moetune.domain.version import Release
    from moetune.servers.log_events import ConfigName
    from moetune.servers.protocol import Server

MAX_TP = 64
_DP = (1, 2, 4, 8, 16)
_MAX_RANKS = MAX_TP * _DP[-1]
_PADDING = 128  # columns by which a server may fill up a slice

# Releases that a log can be of, oldest first: those whose wheels were read.
RELEASES = {
    "sglang": tuple(f"0.5.{patch}" for patch in (*range(1, 7), *range(9, 17), 18, 20, 23)),
    "vllm": ("0.10.2", "0.11.0", "0.11.1", "0.12.0", "0.13.0", "0.20.0", "0.27.1", "0.33.0"),
}
# `--quant` for a dtype tag: with a block, per channel, plain.
_QUANT = {
    "fp8_w8a8": ("fp8-block", "fp8-channel", "fp8"),
    "int8_w8a8": ("int8-block", "int8", "int8"),
    "int4_w4a16": ("int4_w4a16", "int4_w4a16", "int4_w4a16"),
    "int8_w8a16": ("int8_w8a16", "int8_w8a16", "int8_w8a16"),
    "fp8_w8a16": ("fp8_w8a16", "fp8_w8a16", "fp8_w8a16"),
    "float32": ("fp32", "fp32", "fp32"),
    "": ("bf16", "bf16", "bf16"),
}


@dataclass(frozen=True, slots=True)
class Known:
    """What a person says beside the log.

    Attributes:
        model: as for `moetune tune`, None: what the log says.
        gpu: name of the GPU, None: what the file names say.
        server_version: None: what the log says.
        compute_capability: for a GPU that the registry lacks.
        offline: ask no network about the model.
    """

    model: str | None = None
    gpu: str | None = None
    server_version: str | None = None
    compute_capability: str | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class VersionGuess:
    """A release, and how sure it is.

    Attributes:
        version: for commands.
        text: for people.
        exact: the log says the number, or a person did.
    """

    version: str
    text: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """A split of a model that gives the file of the log.

    Attributes:
        quant: `--quant`, empty where the checkpoint's own is right.
        unfused: with --disable-shared-experts-fusion.
        problem: what the server computes with it.
    """

    tp: int
    ep: int
    dp: int
    quant: str
    unfused: bool
    problem: Problem

    @property
    def text(self) -> str:
        """In words."""
        sizes = {"tp": self.tp, "ep": self.ep, "dp": self.dp}
        said = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "tp"]
        return ", ".join(said) + (", shared experts not fused" if self.unfused else "")


def guess_version(
    facts: ServerFacts, known: Known, explains: Callable[[Crash, Server], bool] | None = None
) -> VersionGuess:
    """The release of a server: said, or between bounds that its lines set.

    Args:
        facts: of the server.
        known: what a person says beside the log.
        explains: whether the default of a release explains a crash: such releases are meant then.
    """
    if known.server_version:
        return VersionGuess(known.server_version, known.server_version, True)
    every = RELEASES[facts.name]
    if facts.exact:
        try:
            _open(facts.name, facts.exact)
        except MoetuneError:
            # Older than any whose rules are known, or no number at all: its lines still tell a lot.
            return VersionGuess(
                every[0], f"{printable(facts.exact, 40)}, read by the rules of {every[0]}", False
            )
        return VersionGuess(facts.exact, facts.exact, True)
    fitting = [
        text
        for text in every
        if facts.since <= parse_release(text) and (not facts.until or parse_release(text) <= facts.until)
    ] or list(every)
    triton = running_triton(facts)
    fitting = [text for text in fitting if _open(facts.name, text).triton_version == triton] or fitting
    for crash in facts.crashes.values():
        if explains is not None and crash.resources is not None:
            fitting = [text for text in fitting if explains(crash, _open(facts.name, text))] or fitting
    if len(fitting) == 1:
        return VersionGuess(fitting[0], f"{fitting[0]} (by its lines)", False)
    if len(fitting) == len(every):
        return VersionGuess(fitting[-1], "of unknown release", False)
    return VersionGuess(fitting[-1], f"between {fitting[0]} and {fitting[-1]} (by its lines)", False)


@lru_cache(maxsize=64)
def _open(name: str, version: str) -> Server:
    return open_server(name, version)


def running_triton(facts: ServerFacts) -> str:
    """The Triton that the server runs, where its directories tell; else empty."""
    wanted = [s.name.triton for s in facts.shapes.values() if s.outcome != "found" and s.name.triton]
    found = [s.name.triton for s in facts.shapes.values() if s.outcome == "found" and s.name.triton]
    return next(iter(wanted or found), "")


def gpu_of(device: str, known: Known) -> tuple[Gpu, bool]:
    """The GPU of a file name, and whether the registry has it."""
    name = known.gpu or device
    try:
        return find_gpu(name, compute_capability=known.compute_capability), True
    except MoetuneError:
        return Gpu(torch_name=printable(device.replace("_", " "))), False


@dataclass(frozen=True, slots=True)
class ModelGuess:
    """A model, and where it is known from.

    Attributes:
        name: for commands, empty when the log names none.
        layer: its expert layer, None where it is not packaged: a log's path is never opened.
        note: what was assumed.
    """

    name: str
    layer: ExpertLayer | None
    note: str = ""


def guess_model(start: Start | None, known: Known) -> ModelGuess:
    """The model of a start."""
    if known.model is not None:
        return ModelGuess(known.model, _resolved(known.model, known.offline))
    name = start.text("model_path", "model", "model_tag") if start is not None else ""
    return packaged_layer(name)


@lru_cache(maxsize=8)
def _resolved(model: str, offline: bool) -> ExpertLayer:
    from moetune.applications.checkpoints import resolve

    return resolve(model, offline=offline)


def packaged_layer(name: str) -> ModelGuess:
    """A model that a log names, from the packaged checkpoints only."""
    # A name that could steer a terminal is not one to offer for pasting.
    if not name or not name.isprintable():
        return ModelGuess("", None)
    exact = find_packaged(name)
    found = exact or find_packaged(name.rstrip("/").rpartition("/")[2])
    if found is None:
        return ModelGuess(name, None)
    layer = _layer(found.name)
    if layer is None or exact is not None:
        return ModelGuess(name, layer)
    return ModelGuess(name, layer, f"taken for {found.name} by the last part of its path")


@lru_cache(maxsize=256)
def _layer(packaged: str) -> ExpertLayer | None:
    model = packaged_models()[packaged]
    try:
        return read_expert_layer(
            model.config, name=packaged, source="packaged", hf_quant_config=model.hf_quant_config
        )
    except MoetuneError:
        return None


def quant_name(name: ConfigName) -> str:
    """`--quant` that gives the dtype, block and channel parts of a file name."""
    blocked, channel, plain = _QUANT.get(name.dtype, ("", "", ""))
    if name.block_shape and blocked.endswith("-block"):
        return f"{blocked}[{name.block_shape[0]},{name.block_shape[1]}]"
    return channel if name.per_channel else plain


def solve(shape: Shape, layer: ExpertLayer, server: Server, gpu: Gpu, start: Start | None) -> tuple[Fit, ...]:
    """Splits of a model that give the shape's file, those that the log itself names first.

    What the log says of tp, ep and dp is tried alone first; where nothing fits it, everything is.
    """
    for quant in ("", quant_name(shape.name)):
        try:
            tried = replace(layer, quantization=parse_quantization(quant)) if quant else layer
        except MoetuneError:
            continue
        for free in (False, True):
            fits = tuple(_fits(shape.name, tried, quant, server, gpu, start, free=free))
            if fits:
                fewest = min((fit.unfused, fit.dp) for fit in fits)
                return tuple(fit for fit in fits if free or (fit.unfused, fit.dp) == fewest)
    return ()


def _fits(
    name: ConfigName,
    layer: ExpertLayer,
    quant: str,
    server: Server,
    gpu: Gpu,
    start: Start | None,
    *,
    free: bool,
) -> Iterator[Fit]:
    redundant = (start.number("ep_num_redundant_experts") or 0) if start is not None else 0
    unfused = start is not None and start.values.get("disable_shared_experts_fusion") == "True"
    for off in dict.fromkeys((unfused, not unfused) if layer.num_shared_experts else (unfused,)):
        options = ServerOptions(disable_shared_experts_fusion=off)
        seen = False
        for split in _splits(name, layer, server, start, redundant, free=free):
            try:
                problem = server.problem(layer, replace(split, redundant_experts=redundant), gpu, options)
                fits = server.file_name(problem, name.kernel) == name.file
            except MoetuneError:
                continue
            if fits:
                seen = True
                yield Fit(split.tp, split.ep, split.dp, quant, off, problem)
        if seen:
            return


def _splits(
    name: ConfigName, layer: ExpertLayer, server: Server, start: Start | None, redundant: int, *, free: bool
) -> Iterator[Parallelism]:
    """The splits that can give E and N of a file, fewest ranks first; the server's rules decide."""
    said = _Said() if free else _said(start)
    if said is None:
        return
    slices = _slices(layer.intermediate_size, name.N, padded=server.name == "vllm")
    spreads = _spreads(layer.num_experts + redundant, name.E, layer.num_shared_experts)
    if server.name == "vllm":
        whole = [ranks for ranks in slices if 1 in spreads]
        spread = [ranks for ranks in spreads if 1 in slices]
        for ep, counts in ((1, whole), (2, spread)):
            for ranks, dp in product(counts, _DP):
                if ranks % dp == 0 and ranks // dp <= MAX_TP and said.allows(ranks // dp, ep, dp):
                    yield Parallelism(ranks // dp, ep, dp)
        return
    # SGLang's dp changes neither E nor N.
    for ep, count in product(spreads, slices):
        if ep * count <= MAX_TP and said.allows(ep * count, ep, None):
            yield Parallelism(ep * count, ep)


def _slices(columns: int, N: int, *, padded: bool) -> list[int]:
    """Into how many slices an expert is cut; a server may pack two to a byte, or fill a slice up."""
    if N < 1:
        return []
    exact = {columns // size for size in (N, 2 * N) if columns % size == 0}
    filled: set[int] = set()
    if padded and N % _PADDING == 0:
        # A slice of N - 127 to N columns is filled up to N.
        most = min(_MAX_RANKS, columns // (N - _PADDING + 1))
        filled = set(range(-(-columns // N), most + 1))
    return sorted(count for count in exact | filled if 1 <= count <= _MAX_RANKS)


def _spreads(experts: int, E: int, shared: int) -> list[int]:
    """Over how many ranks the experts are spread, with none or all of the shared ones fused."""
    routed = {E - fused for fused in range(shared + 1) if fused < E}
    return sorted({experts // n for n in routed if experts % n == 0 and experts // n <= _MAX_RANKS})


@dataclass(frozen=True, slots=True)
class _Said:
    """The sizes that a start names; None: it does not."""

    tp: int | None = None
    ep: int | None = None
    dp: int | None = None

    def allows(self, tp: int, ep: int, dp: int | None) -> bool:
        return all(
            said is None or size is None or said == size
            for said, size in ((self.tp, tp), (self.ep, ep), (self.dp, dp))
        )


def _said(start: Start | None) -> _Said | None:
    if start is None:
        return None
    ep = start.number("ep_size")
    expert_parallel = start.values.get("enable_expert_parallel")
    if expert_parallel is not None:
        ep = 2 if expert_parallel == "True" else 1
    tp = start.number("tp_size", "tensor_parallel_size")
    return _Said(tp, ep, start.number("dp_size", "data_parallel_size"))


def models_that_fit(shape: Shape, server: Server, gpu: Gpu) -> tuple[tuple[str, Fit], ...]:
    """Packaged checkpoints that give the file as they are, the likeliest split of each; likeliest first."""
    found = []
    for name in packaged_models():
        layer = _layer(name)
        if layer is None or layer.num_experts < shape.name.E - 2 * layer.num_shared_experts:
            continue
        fits = tuple(_fits(shape.name, layer, "", server, gpu, None, free=True))
        if fits:
            found.append((name, min(fits, key=_unlikely)))
    return tuple(sorted(found, key=lambda pair: _unlikely(pair[1])))


def _unlikely(fit: Fit) -> tuple[bool, bool, int]:
    """Machines hold 1, 2, 4, 8, ... GPUs, and few are likelier than many."""
    ranks = fit.tp * fit.dp
    return ranks & (ranks - 1) != 0, fit.unfused, ranks


def release_of(version: str) -> Release:
    """The numbers of a version; of one that cannot be read the highest there are."""
    try:
        return parse_release(version)
    except MoetuneError:
        return (999,)

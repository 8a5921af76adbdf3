"""What a config file is for: its server, its GPU and its problem, as far as its name and place say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from moetune.applications.config_files import CONFIGS, TRITON
from moetune.domain.errors import InputError, MoetuneError, UnknownGpuError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.gpu import Gpu, find_gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.text import printable
from moetune.servers.protocol import Server, ServerOptions

if TYPE_CHECKING:
    from pathlib import Path

_TAGS = {dtype.value: dtype for dtype in Dtype} | {"float32": Dtype.FP32}
_TAG_OF = {dtype: tag for tag, dtype in _TAGS.items()}
# Of int4 experts the name does not say the group; what both servers' own tuners and AWQ use.
_INT4_GROUP = 128
_VENDOR_WORDS = {"AMD": ("AMD", "Radeon", "Instinct"), "Intel": ("Intel", "Arc")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the name of a config file does not say, from a person.

    Attributes:
        layer: the model's expert layer.
        hidden: K by hand: columns that enter the up kernel.
        topk: experts a token goes to, by hand.
    """

    layer: ExpertLayer | None = None
    hidden: int | None = None
    topk: int | None = None


@dataclass(frozen=True, slots=True)
class Meaning:
    """A problem, as far as it is known.

    Attributes:
        problem: with K and topk 0 and 1 where they are not known.
        complete: K and topk are known, so that times can be predicted.
        note: why it is not complete, or what was taken for granted.
    """

    problem: Problem
    complete: bool
    note: str = ""


@lru_cache(maxsize=1024)
def gpu_of(device: str, compute_capability: str | None = None) -> tuple[Gpu, bool]:
    """The GPU of a file name, and whether the registry (or the compute capability) says what it is."""
    try:
        return find_gpu(device, compute_capability=compute_capability), True
    except UnknownGpuError:
        known = False
    except InputError:
        known = False
    words = device.replace("_", " ")
    vendor = next((name for name, marks in _VENDOR_WORDS.items() if any(m in words for m in marks)), "NVIDIA")
    return Gpu(torch_name=words, vendor=vendor), known


def quantization_of(name: FileName) -> Quantization | None:
    """The quantization that a name stands for; None for a tag that no server has."""
    if name.dtype and name.dtype not in _TAGS:
        return None
    dtype = _TAGS[name.dtype] if name.dtype else Dtype.BF16
    if dtype is Dtype.BF16 and name.block_shape is not None:
        dtype = Dtype.INT8_W8A8  # vLLM has no tag for it, and nothing else without one has blocks
    grouped = dtype is Dtype.INT4_W4A16
    return Quantization(
        dtype,
        method="none" if dtype in (Dtype.BF16, Dtype.FP32) else "unknown",
        block_shape=name.block_shape,
        group_size=_INT4_GROUP if grouped else None,
        per_channel=name.per_channel,
    )


def meaning_of(server: Server, name: FileName, gpu: Gpu, sizes: Sizes) -> Meaning | None:
    """The problem of a file name on a server and a GPU; None for a tag that no server has."""
    quantization = quantization_of(name)
    if quantization is None:
        return None
    activation = Dtype.FP32 if quantization.dtype is Dtype.FP32 else Dtype.BF16
    problem = Problem(
        E=name.E,
        global_experts=name.E,
        topk=sizes.topk or 1,
        K=sizes.hidden or 0,
        N=name.N * packing(server, quantization.dtype),
        file_n=name.N,
        gpu=gpu,
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
        activation_dtype=activation,
        quantization=quantization,
    )
    if sizes.layer is not None:
        return _with_layer(server, problem, sizes.layer)
    if sizes.hidden and sizes.topk:
        return Meaning(problem, True, "not sharded over expert-parallel ranks, gated: taken for granted")
    return Meaning(problem, False, "K and topk are not known: add --model MODEL, or --hidden and --topk")


def _with_layer(server: Server, problem: Problem, layer: ExpertLayer) -> Meaning:
    """Take what the name lacks from a model, where the name can be a shard of it."""
    try:
        whole = server.problem(layer, Parallelism(), problem.gpu, ServerOptions())
    except MoetuneError as error:
        return Meaning(problem, False, f"{server.name} cannot shard the model: {error.message}")
    name = printable(layer.model, 80)
    if whole.quantization.dtype is problem.quantization.dtype:
        if whole.quantization.block_shape != problem.quantization.block_shape:
            return Meaning(problem, False, f"{name} has other blocks of scales")
        problem = replace(problem, quantization=whole.quantization)
    if whole.N % problem.N:
        return Meaning(problem, False, f"N={problem.file_n} is no shard of {name}")
    common = replace(problem, K=whole.K, gated=whole.gated, bias=whole.bias)
    if problem.E == whole.E:
        full = replace(
            common,
            global_experts=whole.global_experts,
            topk=whole.topk,
            fused_shared_experts=whole.fused_shared_experts,
            activation_dtype=whole.activation_dtype,
        )
        return Meaning(full, True)
    if layer.num_experts % problem.E:
        return Meaning(problem, False, f"E={problem.E} is no shard of {name}")
    ranks = layer.num_experts // problem.E
    spread = replace(common, global_experts=layer.num_experts, topk=layer.topk, ep=ranks)
    return Meaning(replace(spread, activation_dtype=whole.activation_dtype), True)


@lru_cache(maxsize=64)
def _packing_of(server_name: str, version: str, dtype: Dtype) -> int:
    from moetune.servers.registry import open_server

    layer = ExpertLayer(
        "", "", 8, 2, 4096, 4096, quantization=Quantization(dtype, group_size=_INT4_GROUP, method="awq")
    )
    try:
        problem = open_server(server_name, version).problem(
            layer, Parallelism(), Gpu("NVIDIA H200", compute_capability=(9, 0)), ServerOptions()
        )
    except MoetuneError:
        return 1
    return max(1, problem.N // problem.file_n)


def packing(server: Server, dtype: Dtype) -> int:
    """Elements that one column of the name's N holds (SGLang counts int4 weights two to a byte)."""
    return _packing_of(server.name, server.version, dtype) if dtype.weight_bits < 8 else 1


def why_never_read(server: Server, file_name: str) -> str:
    """Why a release never looks for that name on any GPU; empty when it can."""
    name = parse_file_name(file_name)
    if name is not None and name.down and not server.separate_down_file:
        return f"{server.name} {server.version} reads one file for both kernels, never a _down file"
    own = getattr(server, "never_read", None)
    if callable(own) and (reason := own(file_name)):
        return str(reason)
    if name is None:
        return "names have the form E=..,N=..,device_name=..[,dtype=..][,block_shape=[n, k]].json"
    if not name.device:
        return "every GPU has a name, and this file names none"
    gpu, _ = gpu_of(name.device)
    meaning = meaning_of(server, name, gpu, Sizes())
    if meaning is None:
        return f"{server.name} has no dtype tag {name.dtype!r}"
    try:
        spelled = server.file_name(meaning.problem, "down" if name.down else "up")
    except MoetuneError as error:
        return error.message
    if spelled == file_name:
        return ""
    return f"{server.name} {server.version} looks for {spelled}"


def guess_server(paths: list[Path], texts: dict[Path, bytes]) -> tuple[str, str] | None:
    """The server whose files these are, and what says so; None when nothing does.

    Args:
        paths: the files of one place.
        texts: what was read of them.
    """
    for path in paths:
        if path.parent.name.startswith(TRITON):
            return "sglang", f"{path.parent.name} is a directory of SGLang"
        for part in ("sglang", "vllm"):
            if part in path.parts:
                return part, f"the path has {part} in it"
    for path in paths:
        name = parse_file_name(path.name)
        if name is None:
            continue
        if name.down or name.per_channel or name.spaced:
            return "sglang", "the file is named as SGLang does"
        if name.block_shape or name.backend:
            return "vllm", "the file is named as vLLM does"
        if b'"triton_version"' in texts.get(path, b"") or b'"SPLIT_K"' in texts.get(path, b""):
            return "vllm", "the file holds keys of vLLM"
    return None


def root_of(path: Path) -> Path | None:
    """The directory that SGLang's variable would have to name for a file to be read; None without."""
    folder = path.absolute().parent
    if folder.name.startswith(TRITON) and folder.parent.name == CONFIGS:
        return folder.parent.parent
    return None

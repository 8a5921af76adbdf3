"""GPUs: names as torch gives them, limits and rates, from a packaged registry.

`data/gpus.csv` holds one row a name. Its column `source` says where the numbers of a row were read,
`;` between them: `name:N` the name stands in a published tuned file (sglang 0.5.23, vllm 0.33.0),
`name:recalled` it was not seen in print; `A` a performance-modelling package; `T` a scraped table of
GPU specifications; `D` derived from multiprocessors and clock, `D*` with the correction in brackets.
`confidence` says how far to trust the row, and an empty cell means unknown. What follows from the
compute capability alone stands once, in `data/gpu_targets.csv`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from moetune.domain.errors import InputError, UnknownGpuError
from moetune.domain.gpu_names import MigName, check_name, nearest_names, parse_mig, parse_target, short_names

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. None means unknown.

    Attributes:
        torch_name: as `torch.cuda.get_device_name` returns it.
        vendor: `NVIDIA`, `AMD` or `Intel`.
        family: architecture name (`Hopper`, `Blackwell`, ...). No compatibility key: two families
            called Blackwell share no limit and no instruction.
        compute_capability: `(9, 0)` for an NVIDIA GPU, None for others.
        gfx: `gfx942` for an AMD GPU, None for others.
        smem_optin_bytes: shared memory that one block can ask for.
        smem_per_sm_bytes: shared memory of one multiprocessor.
        mem_bw_gbps: memory bandwidth in 10^9 bytes a second.
        bf16_dense_tflops: dense bf16 rate with fp32 accumulation in 10^12 a second.
        tdp_w: board power in watts.
        product: product line whose editions and variants are nearest to each other.
        source: where the numbers were read; empty for a GPU that the registry lacks.
        confidence: how far to trust the row: `high`, `medium` or `low`.
        mig_slice: name of the MIG profile when this is a slice of a GPU.
    """

    torch_name: str
    vendor: str = "NVIDIA"
    family: str = ""
    compute_capability: tuple[int, int] | None = None
    gfx: str | None = None
    sm_count: int | None = None
    smem_optin_bytes: int | None = None
    smem_per_sm_bytes: int | None = None
    l2_bytes: int | None = None
    memory_gib: float | None = None
    mem_bw_gbps: float | None = None
    bf16_dense_tflops: float | None = None
    fp8_dense_tflops: float | None = None
    tdp_w: float | None = None
    product: str = ""
    source: str = ""
    confidence: str = "low"
    mig_slice: str | None = None

    @property
    def sm(self) -> str:
        """`sm_90` for compute capability 9.0; the gfx name for AMD; empty when unknown."""
        if self.compute_capability is not None:
            major, minor = self.compute_capability
            return f"sm_{major}{minor}"
        return self.gfx or ""

    @property
    def target(self) -> str:
        """Key in the table of targets (`9.0`, `gfx942`); empty when the architecture is unknown."""
        return self.gfx or ".".join(map(str, self.compute_capability or ()))


@dataclass(frozen=True, slots=True)
class Target:
    """What follows from the architecture that code is compiled for.

    Attributes:
        name: `9.0` or `gfx942`.
        cores_per_sm: fp32 lanes, which drivers count, of one multiprocessor; 0 when unknown.
        bf16_dot: instruction of a bf16 dot (`mma.sync`, `wgmma`, `tcgen05`, `mfma`), empty when unknown.
        fp8_dot: the same for fp8 e4m3, empty where Triton rejects it.
        source: where it was read.
    """

    name: str
    smem_optin_bytes: int
    smem_per_sm_bytes: int
    cores_per_sm: int
    bf16_dot: str
    fp8_dot: str
    source: str


@cache
def load_targets() -> dict[str, Target]:
    """Limits and tensor-core paths by compute capability (`9.0`) or gfx name."""
    return {
        row["target"]: Target(
            name=row["target"],
            smem_optin_bytes=int(row["smem_optin_bytes"]),
            smem_per_sm_bytes=int(row["smem_per_sm_bytes"]),
            cores_per_sm=_integer(row["cores_per_sm"]) or 0,
            bf16_dot=row["bf16_dot"],
            fp8_dot=row["fp8_dot"],
            source=row["source"],
        )
        for row in _rows("gpu_targets.csv")
    }


@cache
def load_registry() -> tuple[Gpu, ...]:
    """All GPUs of the registry, each once for each name under which torch or a server reports it."""
    gpus = []
    for row in _rows("gpus.csv"):
        gpu = Gpu(
            torch_name=row["torch_name"],
            vendor=row["vendor"],
            family=row["family"],
            sm_count=_integer(row["sm_count"]),
            l2_bytes=_integer(row["l2_bytes"]),
            memory_gib=_number(row["memory_gib"]),
            mem_bw_gbps=_number(row["mem_bw_gbps"]),
            bf16_dense_tflops=_number(row["bf16_dense_tflops"]),
            fp8_dense_tflops=_number(row["fp8_dense_tflops"]),
            tdp_w=_number(row["tdp_w"]),
            product=row["product"] or row["torch_name"],
            source=row["source"],
            confidence=row["confidence"],
        )
        gpu = _with_target(gpu, row["target"])
        gpus.append(gpu)
        gpus.extend(replace(gpu, torch_name=name) for name in _split(row["reported_names"]))
    return tuple(gpus)


def find_gpu(name: str, *, compute_capability: str | None = None, sm_count: int | None = None) -> Gpu:
    """Find a GPU by its name.

    Args:
        name: as torch gives it, or as a server writes it into a file name, in any case; the vendor's
            word may be left out where that is not ambiguous.
        compute_capability: `9.0`, `sm_90` or `gfx942`, for a GPU that the registry lacks.
        sm_count: multiprocessors, where the registry does not know them.

    Raises:
        InputError: when the name could not stand in a file name, or the registry contradicts the
            compute capability.
        UnknownGpuError: when the registry lacks the name and no compute capability was given, or
            no limits are known for it.
    """
    text = check_name(name)
    target = _known_target(compute_capability) if compute_capability is not None else None
    mig = parse_mig(text)
    gpu = _whole(text, target) if mig is None else _slice(mig, _whole(mig.whole, target))
    if sm_count is not None:
        if not 0 < sm_count <= 4096:
            raise InputError(f"{sm_count} is no number of multiprocessors", "give it as in 132")
        gpu = replace(gpu, sm_count=sm_count)
    return gpu


def _known_target(text: str) -> str:
    target = parse_target(text)
    if target not in load_targets():
        raise UnknownGpuError(
            f"no limits are known for compute capability {target}", f"known are {', '.join(load_targets())}"
        )
    return target


def _whole(name: str, target: str | None) -> Gpu:
    known = _by_name().get(name.lower())
    if known is None:
        if target is None:
            alike = nearest_names(name, (gpu.torch_name for gpu in load_registry()), count=8)
            # `NVIDIA H100`, which is no sure board, must not come before those that are.
            near = sorted(alike, key=lambda other: _by_name()[other.lower()].confidence == "low")[:4]
            choice = f"did you mean {', '.join(map(repr, near))}? Otherwise add" if near else "add"
            raise UnknownGpuError(
                f"the registry has no GPU named {name!r}", f"{choice} `--compute-capability`, as in 9.0"
            )
        return _with_target(Gpu(torch_name=name, vendor=_vendor(target), product=name), target)
    if target is None:
        return known
    if known.vendor != _vendor(target) or known.target not in ("", target):
        raise InputError(
            f"{known.torch_name} is {known.target or f'of {known.vendor}'}, not {target}",
            "leave `--compute-capability` out",
        )
    return _with_target(known, target)


def _vendor(target: str) -> str:
    return "AMD" if target.startswith("gfx") else "NVIDIA"


def _with_target(gpu: Gpu, target: str) -> Gpu:
    """A GPU with the limits of its architecture, unknown ones left unknown."""
    if target.startswith("gfx"):
        gpu = replace(gpu, gfx=target)
    elif target:
        major, _, minor = target.partition(".")
        gpu = replace(gpu, compute_capability=(int(major), int(minor)))
    limits = load_targets().get(target)
    if limits is None:
        return gpu
    return replace(gpu, smem_optin_bytes=limits.smem_optin_bytes, smem_per_sm_bytes=limits.smem_per_sm_bytes)


def whole_of(gpu: Gpu) -> Gpu | None:
    """The GPU that a MIG slice was cut from; None for a whole one and where the registry lacks it."""
    mig = parse_mig(gpu.torch_name)
    return _by_name().get(mig.whole.lower()) if mig is not None else None


def _slice(mig: MigName, whole: Gpu) -> Gpu:
    """A MIG slice: the architecture of the whole GPU, and none of its sizes and rates."""
    return Gpu(
        torch_name=f"{whole.torch_name} MIG {mig.profile}",
        vendor=whole.vendor,
        family=whole.family,
        compute_capability=whole.compute_capability,
        smem_optin_bytes=whole.smem_optin_bytes,
        smem_per_sm_bytes=whole.smem_per_sm_bytes,
        memory_gib=float(mig.memory_gb),
        product=f"{whole.torch_name} MIG",
        source="architecture of the whole GPU, memory by the profile's name",
        mig_slice=mig.profile,
    )


@dataclass(frozen=True, slots=True)
class FilledGpu:
    """The numbers that a prediction needs, none of them unknown.

    Attributes:
        gpu: what it was made from.
        estimated: names of the fields that the registry does not know.
    """

    gpu: Gpu
    sm_count: int
    smem_optin_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    mem_bw_gbps: float
    bf16_dense_tflops: float
    fp8_dense_tflops: float
    estimated: frozenset[str]


def filled(gpu: Gpu) -> FilledGpu:
    """Estimate what is unknown of a GPU.

    An unknown number is the median of the rows of the same product line that know it, else of the
    same compute capability, of the same major one, of the same vendor. A bf16 rate is taken per
    multiprocessor. An fp8 rate is twice the bf16 rate where the architecture has an fp8 dot (as in
    every row that knows both), else the same. A MIG slice has an eighth of the multiprocessors for
    each compute slice (seven have all), and of bandwidth and L2 what it has of the memory.

    Raises:
        UnknownGpuError: when the architecture, and so the shared memory, is unknown.
    """
    if gpu.smem_optin_bytes is None or gpu.smem_per_sm_bytes is None:
        raise UnknownGpuError(
            f"the architecture of {gpu.torch_name} is not known, so nothing can be predicted for it",
            "add `--compute-capability`, as in 9.0"
            if gpu.vendor == "NVIDIA"
            else f"for GPUs of {gpu.vendor} only names, lint and borrow work",
        )
    share, memory_share, like = 1.0, 1.0, gpu
    mig = parse_mig(gpu.torch_name)
    if mig is not None:
        like = whole_of(gpu) or replace(gpu, torch_name=mig.whole, product=mig.whole, memory_gib=None)
        share = 1.0 if mig.compute_slices == 7 else mig.compute_slices / 8
        memory_share = min(1.0, mig.memory_gb / like.memory_gib) if like.memory_gib else share
    sm_count = gpu.sm_count or max(1, int(share * _estimate(like, "sm_count")))
    bf16 = gpu.bf16_dense_tflops or sm_count * _estimate(like, "bf16_dense_tflops", per="sm_count")
    target = load_targets().get(gpu.target)
    fp8 = gpu.fp8_dense_tflops or bf16 * (2 if target is not None and target.fp8_dot else 1)
    return FilledGpu(
        gpu=gpu,
        sm_count=sm_count,
        smem_optin_bytes=gpu.smem_optin_bytes,
        smem_per_sm_bytes=gpu.smem_per_sm_bytes,
        l2_bytes=gpu.l2_bytes or int(memory_share * _estimate(like, "l2_bytes")),
        mem_bw_gbps=gpu.mem_bw_gbps or memory_share * _estimate(like, "mem_bw_gbps"),
        bf16_dense_tflops=bf16,
        fp8_dense_tflops=fp8,
        estimated=frozenset(name for name in _ESTIMABLE if getattr(gpu, name) is None),
    )


_ESTIMABLE = ("sm_count", "l2_bytes", "mem_bw_gbps", "bf16_dense_tflops", "fp8_dense_tflops")


def _estimate(gpu: Gpu, field: str, per: str | None = None) -> float:
    """What is known of the GPU itself, else the median of its nearest relatives that know it."""
    major = (gpu.compute_capability or (0,))[0]
    circles: tuple[Callable[[Gpu], bool], ...] = (
        lambda other: other.torch_name == gpu.torch_name,
        lambda other: other.product == gpu.product,
        lambda other: other.target == gpu.target,
        lambda other: bool(major) and (other.compute_capability or (0,))[0] == major,
        lambda other: other.vendor == gpu.vendor,
    )
    for belongs in circles:
        values = sorted(
            getattr(other, field) / (getattr(other, per) if per else 1)
            for other in load_registry()
            if belongs(other) and getattr(other, field) and (per is None or getattr(other, per))
        )
        if values:
            middle = len(values) // 2
            return float(values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2)
    raise AssertionError(f"no row of {gpu.vendor} knows {field}")


@cache
def _by_name() -> dict[str, Gpu]:
    """Lower-case names to rows. A full name beats an alias, an alias beats a shortened name."""
    registry = {gpu.torch_name.lower(): gpu for gpu in load_registry()}
    aliases = {
        alias.lower(): registry[row["torch_name"].lower()]
        for row in _rows("gpus.csv")
        for alias in _split(row["aliases"])
    }
    # A row of low confidence is not what is most likely meant: `H100` alone is no board.
    short = {
        name: gpu
        for gpu in registry.values()
        if gpu.confidence != "low"
        for name in short_names(gpu.torch_name)
    }
    return {**short, **aliases, **registry}


@cache
def _rows(file: str) -> tuple[dict[str, str], ...]:
    text = resources.files("moetune.domain").joinpath("data").joinpath(file).read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def _split(text: str) -> list[str]:
    return [part for part in text.split(";") if part]


def _integer(text: str) -> int | None:
    return int(text) if text else None


def _number(text: str) -> float | None:
    return float(text) if text else None

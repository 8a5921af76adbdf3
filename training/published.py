"""Winners of other people's searches: the tuned files in published wheels, and random configs beside them.

A file names E and N of one rank, the GPU and the type of the weights, but neither K nor topk: those
are taken from the packaged checkpoints that shard to the same E and N, else from the checkpoint
whose E is nearest.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetune.applications.checkpoints import resolve
from moetune.domain.config import CONFIG_KEYS, KernelConfig
from moetune.domain.errors import MoetuneError
from moetune.domain.features import features, launch_arrays
from moetune.domain.gpu import FilledGpu, filled, find_gpu
from moetune.domain.packaged_models import packaged_models
from moetune.domain.problem import Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.space import can_run, sglang_grid
from moetune.domain.version import parse_release
from moetune.servers.registry import open_server

FloatArray = NDArray[np.float64]
_NAME = re.compile(
    r"E=(?P<E>\d+),N=(?P<N>\d+),device_name=(?P<device>[^,]+?)(?:,dtype=(?P<dtype>\w+))?"
    r"(?:,block_shape=\[(?P<bn>\d+), ?(?P<bk>\d+)\])?"
    r"(?P<channel>,per_channel_quant=True)?(?P<down>_down)?\.json"
)
RELEASES = (("sglang", "0.5.23"), ("vllm", "0.33.0"))


@dataclass(frozen=True, slots=True)
class Published:
    """One entry of a published file: the winner at one m.

    Attributes:
        kernels: which GEMMs the file was tuned for: both, or one of a pair.
        family: of GPUs, held out whole: `sm_90`, ...
    """

    problem: Problem
    server: str
    file: str
    kernels: tuple[Kernel, ...]
    m: int
    winner: KernelConfig

    @property
    def family(self) -> str:
        """Architecture, A100 apart from the other sm_8x, both Blackwell ones of data centres together."""
        cc = self.problem.gpu.compute_capability
        assert cc is not None
        return {10: "sm_100", 8: "sm_80" if cc == (8, 0) else "sm_89"}.get(cc[0], f"sm_{cc[0]}{cc[1]}")


@lru_cache(maxsize=1)
def _shards() -> dict[tuple[int, int], tuple[int, int]]:
    """`(E, N)` of one rank to `(K, topk)`, for every packaged checkpoint at the usual sizes."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for name in packaged_models():
        try:
            layer = resolve(name, offline=True)
        except MoetuneError:
            continue
        for fused in {0, layer.num_shared_experts}:
            for ep in (1, 2, 4, 8, 16, 32):
                for tp in (1, 2, 4, 8, 16):
                    if layer.num_experts % ep == 0 and layer.intermediate_size % tp == 0:
                        key = (layer.num_experts // ep + fused, layer.intermediate_size // tp)
                        found.setdefault(key, (layer.latent_size or layer.hidden_size, layer.topk + fused))
    return found


def _width_and_topk(E: int, N: int) -> tuple[int, int]:
    shards = _shards()
    if (E, N) in shards:
        return shards[E, N]
    nearest = min(shards, key=lambda key: (abs(np.log2(key[0] / E)) * 4 + abs(np.log2(key[1] / N)), key))
    return shards[nearest]


def read_published(wheels: Sequence[Path]) -> list[Published]:
    """All entries for NVIDIA GPUs of known architecture, bf16 and fp8, in the published wheels.

    Args:
        wheels: of sglang and vllm, in the order of `RELEASES`.
    """
    entries = []
    for (server_name, version), path in zip(RELEASES, wheels, strict=True):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                match = _NAME.fullmatch(name.rpartition("/")[2])
                if match and "/configs/" in name:
                    entries += list(
                        _entries(
                            server_name,
                            version,
                            name,
                            match,
                            json.loads(archive.read(name)),
                            archive.namelist(),
                        )
                    )
    return entries


def _entries(
    server_name: str,
    version: str,
    name: str,
    match: re.Match[str],
    table: dict[str, object],
    names: list[str],
) -> Iterator[Published]:
    if match["dtype"] not in (None, "fp8_w8a8"):
        return
    try:
        gpu = find_gpu(match["device"])
    except MoetuneError:
        return
    if gpu.compute_capability is None:
        return
    E, N = int(match["E"]), int(match["N"])
    K, topk = _width_and_topk(E, N)
    dtype = Dtype.FP8_W8A8 if match["dtype"] else Dtype.BF16
    block = (int(match["bn"]), int(match["bk"])) if match["bn"] else None
    triton = re.search(r"triton_(\d+_\d+_\d+)", name)
    problem = Problem(
        E=E,
        global_experts=E,
        topk=min(topk, E),
        K=K,
        N=N,
        file_n=N,
        gpu=gpu,
        server=server_name,
        server_version=version,
        triton_version=triton[1].replace("_", ".") if triton else "3.6.0",
        quantization=Quantization(
            dtype=dtype,
            block_shape=block,
            per_channel=bool(match["channel"]),
            dynamic_activation=True if match["dtype"] else None,
        ),
    )
    kernels: tuple[Kernel, ...] = ("up", "down")
    if match["down"]:
        kernels = ("down",)
    elif name.replace(".json", "_down.json") in names:
        kernels = ("up",)
    for key, entry in table.items():
        if not key.isdigit() or not isinstance(entry, dict) or entry.get("USE_TMA"):
            continue
        winner = KernelConfig.from_json({key: entry[key] for key in entry if key in CONFIG_KEYS}, name)
        yield Published(problem, server_name, name, kernels, int(key), winner)


@dataclass(frozen=True, slots=True)
class Contest:
    """A winner against other configs that run there.

    Attributes:
        features: `[2, n, F]` of the up and the down kernel; the winner comes first.
        floor_us: `[2]`, 0 for a kernel that the file was not tuned for.
    """

    entry: Published
    features: FloatArray
    floor_us: FloatArray


class Runnable:
    """The grid's configs that run for a problem, as the server would launch them; made once a kind."""

    def __init__(self) -> None:
        self._cache: dict[tuple[object, ...], list[KernelConfig]] = {}

    def configs(self, problem: Problem) -> list[KernelConfig]:
        """All of the grid that run for both kernels."""
        gpu = problem.gpu
        key = (gpu.compute_capability, problem.quantization, problem.server, problem.triton_version)
        if key not in self._cache:
            server = open_server(problem.server, problem.server_version, problem.triton_version)
            triton = parse_release(problem.triton_version)
            self._cache[key] = [
                config
                for config in sglang_grid()
                if (launch := server.launch(problem, "up", config)).config == config
                and can_run(launch, gpu, triton)
            ]
        return self._cache[key]


def contest(entry: Published, others: Sequence[KernelConfig], gpu: FilledGpu) -> Contest:
    """Features of the winner and of the others, for the kernels that the file serves."""
    problem = entry.problem
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    configs = [entry.winner, *others]
    matrices, floors = [], []
    for kernel in ("up", "down"):
        kernel_name: Kernel = "up" if kernel == "up" else "down"
        launches = [server.launch(problem, kernel_name, config) for config in configs]
        assert problem.gpu.compute_capability is not None
        matrix, done = features(
            problem, kernel_name, entry.m, launch_arrays(launches, problem.gpu.compute_capability), gpu
        )
        matrices.append(matrix)
        floors.append(done.floor_us if kernel_name in entry.kernels else 0.0)
    return Contest(entry, np.stack(matrices), np.array(floors))


def contests(entries: Sequence[Published], *, others: int, seed: int) -> list[Contest]:
    """Each winner that runs by our rules against `others` random runnable configs (0: against all)."""
    rng = np.random.default_rng(seed)
    runnable = Runnable()
    found = []
    gpus = {entry.problem.gpu: filled(entry.problem.gpu) for entry in entries}
    for entry in entries:
        configs = runnable.configs(entry.problem)
        server = open_server(entry.problem.server, entry.problem.server_version, entry.problem.triton_version)
        launch = server.launch(entry.problem, "up", entry.winner)
        if not configs or not can_run(launch, entry.problem.gpu, parse_release(entry.problem.triton_version)):
            continue
        entry = replace(entry, winner=launch.config)
        rest = [config for config in configs if config != entry.winner]
        if others:
            rest = [rest[i] for i in rng.choice(len(rest), min(others, len(rest)), replace=False)]
        found.append(contest(entry, rest, gpus[entry.problem.gpu]))
    return found

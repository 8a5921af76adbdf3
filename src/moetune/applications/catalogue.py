"""Which published tuned files could serve a problem: its own, those of sibling GPUs, of neighbouring shapes.

A file of another GPU or shape is never as good as one that was tuned for the problem: each comes with
the reason for its rank and with a confidence. GPUs that are no siblings by the registry, and MIG slices
of other profiles, are left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moetune.applications.environment import published_tree
from moetune.applications.file_meaning import Sizes, gpu_of, meaning_of, quantization_of
from moetune.domain.catalogue import published
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.gpu import Gpu
from moetune.domain.gpu_siblings import Sibling, siblings
from moetune.domain.problem import Kernel, Problem
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moetune.servers.protocol import ConfigTree, Server

FARTHEST_SHAPE = 2.0
"""Neighbouring shapes differ by this many doublings of E and of N together, at most."""

_GPU_COST = {"high": 0.5, "medium": 1.5, "low": 3.0}
_OTHER_SERVER_COST = 0.25
_OTHER_TRITON_COST = 0.05
_CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class Nearby:
    """A tuned file of a sibling GPU or a neighbouring shape.

    Attributes:
        kernel: `up` or `down`.
        path: of the file, in the tree that holds it.
        sibling: the GPU it was tuned for.
    """

    kernel: Kernel
    path: str
    sibling: Sibling


@dataclass(frozen=True, slots=True)
class TunedFile:
    """A published tuned file that could serve a problem.

    Attributes:
        path: where it lies, or would lie in the published wheel.
        server: whose file it is.
        directory: of its Triton version; empty where the server has none.
        name: its name taken apart.
        gpu: that it was tuned for.
        kernel: `up` (or both) or `down`.
        cost: what it is ranked by, 0 for the problem itself.
        confidence: that its configs are near the best: `high`, `medium` or `low`.
        reason: what it shares with the problem, and what differs.
    """

    path: str
    server: str
    directory: str
    name: FileName
    gpu: Gpu
    kernel: Kernel
    cost: float
    confidence: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in documents."""
        return {
            "path": self.path,
            "server": self.server,
            "directory": self.directory,
            "E": self.name.E,
            "N": self.name.N,
            "gpu": self.gpu.torch_name,
            "kernel": self.kernel,
            "confidence": self.confidence,
            "reason": self.reason,
        }


def tuned_files(
    server: Server, problem: Problem, trees: Sequence[ConfigTree], *, other_servers: bool = True
) -> tuple[TunedFile, ...]:
    """Files that could serve a problem, best first.

    Args:
        server: whose trees these are.
        problem: the problem on that server.
        trees: what lies here or in the published wheel.
        other_servers: look into the published files of other servers too.
    """
    kin = {sibling.gpu.torch_name: sibling for sibling in siblings(problem.gpu)}
    found = list(_search(server, server, problem, trees, kin))
    if other_servers:
        for other in _others(server):
            index = published(other.name)
            assert index is not None
            found += _search(server, other, problem, (published_tree(index),), kin)
    return tuple(sorted(found, key=lambda file: (file.cost, file.kernel != "up", file.path)))


def nearby(server: Server, problem: Problem, kernel: Kernel, trees: Sequence[ConfigTree]) -> Iterator[Nearby]:
    """The same for one kernel, each shape and GPU once, without the name that the server looks for."""
    own = server.file_name(problem, kernel)
    seen: set[FileName] = set()
    for file in tuned_files(server, problem, trees):
        plain = replace(file.name, spaced=False)
        if file.kernel != kernel or plain in seen or (str(file.name) == own and file.server == server.name):
            continue
        seen.add(plain)
        yield Nearby(kernel, file.path, Sibling(file.gpu, file.reason, file.confidence))


def _others(server: Server) -> Iterable[Server]:
    return [open_server(name) for name in ("sglang", "vllm") if name != server.name and published(name)]


def _search(
    asked: Server, server: Server, problem: Problem, trees: Iterable[ConfigTree], kin: dict[str, Sibling]
) -> Iterator[TunedFile]:
    running = _numbers(asked.triton_version)
    for tree in trees:
        for directory, names in sorted((tree.directories or {}).items()):
            numbers = _numbers(directory)
            for text in sorted(names):
                rated = _rate(server, problem, text, kin)
                if rated is None:
                    continue
                name, gpu, cost, confidence, reasons = rated
                if server.name != asked.name:
                    cost += _OTHER_SERVER_COST
                    reasons.append(f"a file of {server.name}")
                elif numbers and numbers != running:
                    reasons.append(f"tuned with Triton {'.'.join(map(str, numbers))}")
                    cost += _OTHER_TRITON_COST * (1 - _recency(numbers))
                below = f"configs/{directory}/" if directory else ""
                yield TunedFile(
                    path=f"{tree.root}/{below}{text}",
                    server=server.name,
                    directory=directory,
                    name=name,
                    gpu=gpu,
                    kernel="down" if name.down else "up",
                    cost=cost,
                    confidence=confidence,
                    reason="; ".join(reasons),
                )


def _rate(
    server: Server, problem: Problem, text: str, kin: dict[str, Sibling]
) -> tuple[FileName, Gpu, float, str, list[str]] | None:
    """How near a file lies to a problem; None where it has nothing for it."""
    name = parse_file_name(text)
    if name is None or name.backend or not name.device:
        return None
    quantization, wanted = quantization_of(name), problem.quantization
    if quantization is None or quantization.dtype.value != _like(problem):
        return None
    if quantization.block_shape != wanted.block_shape and not wanted.group_size:
        return None
    if server.name == problem.server and name.per_channel != wanted.per_channel and _says_channel(server):
        return None
    gpu, known = gpu_of(name.device)
    if not known:
        return None
    meaning = meaning_of(server, name, problem.gpu, Sizes())
    if meaning is None:
        return None
    shape, shape_reason = _shape_distance(problem, meaning.problem)
    if shape > FARTHEST_SHAPE:
        return None
    step = math.ceil(shape)
    if gpu.torch_name == problem.gpu.torch_name:
        confidence, cost, reasons = _CONFIDENCES[min(step, 2)], 0.0, ["the same GPU"]
    elif gpu.torch_name in kin:
        sibling = kin[gpu.torch_name]
        worse = min(_CONFIDENCES.index(sibling.confidence) + step, 2)
        confidence, cost, reasons = _CONFIDENCES[worse], _GPU_COST[sibling.confidence], [sibling.reason]
        # Among siblings of one confidence the nearer first, as the registry ranks them.
        cost += list(kin).index(gpu.torch_name) / (4 * len(kin))
    else:
        return None
    return name, gpu, cost + shape, confidence, [*reasons, shape_reason]


def _like(problem: Problem) -> str:
    """The weights' type as names can say it: fp16 and emulated types look like bf16."""
    dtype = problem.quantization.dtype.value
    return "bf16" if dtype in ("fp16", "mxfp4", "bitsandbytes") else dtype


def _says_channel(server: Server) -> bool:
    """Whether names of a server tell scales per channel from scales per tensor."""
    return server.separate_down_file


def _shape_distance(problem: Problem, other: Problem) -> tuple[float, str]:
    """Doublings between two shapes, and the difference in words."""
    pairs = (("E", problem.E, other.E), ("N", problem.N, other.N))
    words = [f"{name} {theirs} instead of {mine}" for name, mine, theirs in pairs if mine != theirs]
    distance = sum(abs(math.log2(theirs / mine)) for _, mine, theirs in pairs)
    return distance, ", ".join(words) or "the same shape"


def _numbers(text: str) -> tuple[int, ...]:
    """`(3, 6, 0)` of `3.6.0` and of `triton_3_6_0`; empty without numbers."""
    return tuple(int(part) for part in re.findall(r"\d{1,6}", text)[:3])


def _recency(numbers: tuple[int, ...]) -> float:
    """Newer Triton versions are a little nearer: between 0 and 1."""
    major, minor = (*numbers, 0, 0)[:2]
    return min(0.99, (major * 10 + minor) / 100)

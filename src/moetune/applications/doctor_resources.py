"""A launch that does not fit: which config asked for that much, the default or an entry of a file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from moetune.applications.doctor_solve import RELEASES, gpu_of, guess_model, quant_name, solve
from moetune.domain.config import KernelConfig
from moetune.domain.errors import MoetuneError
from moetune.domain.gpu import load_registry
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_names import parse_quantization
from moetune.domain.resources import shared_memory_bytes
from moetune.servers.other_kernel import cuda_kernel_until
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moetune.applications.doctor_records import Crash, ServerFacts, Shape
    from moetune.applications.doctor_solve import Known
    from moetune.domain.gpu import Gpu
    from moetune.domain.problem import Kernel
    from moetune.servers.protocol import Server

_ANY_E = 128
_ANY_N = 1024
_ANY_K = 4096
_USUAL = ("fp8", "bf16", "fp8-block")
_ANY_TOPK = 8
_TILES = (16, 32, 64, 128, 256)
_MAX_TILES = 4


@dataclass(frozen=True, slots=True)
class Guilty:
    """What asked for too much.

    Attributes:
        default: the server's default, else an entry of a file.
        text: in words.
        facts: what it rests on.
        shape: the file it is about.
    """

    default: bool
    text: str
    facts: tuple[tuple[str, str], ...]
    shape: Shape | None


def guilty(
    crash: Crash,
    shapes: Sequence[Shape],
    server: Server,
    facts: ServerFacts,
    known: Known,
    config_files: Sequence[tuple[str, str]],
) -> Guilty | None:
    """The config that asked for what the launch required; None when nothing points to this kernel."""
    if crash.resources is None:
        return None
    ups = [shape for shape in shapes if shape.name.kernel == "up"] or list(shapes)
    for shape in ups:
        if shape.outcome in ("found", "stale"):
            continue
        found = _default(crash, shape, server, facts, known)
        if found is not None:
            return found
    for shape in shapes:
        if shape.outcome in ("found", "stale"):
            found = _entry(crash, shape, server, facts, known, config_files)
            if found is not None and (crash.inside or found.text.startswith("the entry")):
                return found
    if not crash.inside:
        return None
    if not shapes:
        text = "a config of the fused-MoE kernel"
        return Guilty(False, text, (("proof", "the traceback passes the fused-MoE code"),), None)
    last = ups[-1]
    file = last.found or last.name
    text = (
        f"the server's default config for E={last.name.E}, N={last.name.N}"
        if last.outcome not in ("found", "stale")
        else f"an entry of {file.file}"
    )
    proof = (("proof", "the traceback passes the fused-MoE code"),)
    return Guilty(last.outcome not in ("found", "stale"), text, proof, last)


def explains(crash: Crash, server: Server, facts: ServerFacts, known: Known) -> bool:
    """Whether this release's default for a shape without a file needs what the launch required."""
    shapes = [shape for shape in facts.shapes.values() if shape.outcome not in ("found", "stale")]
    return any(_default(crash, shape, server, facts, known) is not None for shape in shapes)


def _default(crash: Crash, shape: Shape, server: Server, facts: ServerFacts, known: Known) -> Guilty | None:
    """The server's default at some m, when it needs exactly that much."""
    assert crash.resources is not None
    problem = _problem(shape, server, facts, known)
    if problem is None:
        return None
    until = cuda_kernel_until(server, problem)
    switches = (until, *(switch for switch in server.default_switches(problem) if switch > until))
    for number, first in enumerate(switches):
        m = first + 1
        config = server.default_config(problem, "up", m)
        for kernel in KERNELS:
            if _needs(server, problem, kernel, config) != crash.resources.required:
                continue
            last = f" to {switches[number + 1]}" if number + 1 < len(switches) else " on"
            proof = (
                ("guilty", f"{server.name} {server.version}'s default {config}, for m from {m}{last}"),
                ("file", shape.name.file),
            )
            return Guilty(True, f"{config}", proof, shape)
    return None


def lookalike(crash: Crash, server: Server) -> str:
    """A default of the server that needs exactly what was required, on a GPU with that limit.

    Nothing but the number points to it: for logs that show no lookup and no traceback.
    """
    assert crash.resources is not None  # asked by the caller
    limit = crash.resources.limit
    gpus = (gpu for gpu in load_registry() if gpu.smem_optin_bytes == limit and gpu.compute_capability)
    gpu = next(gpus, None)
    if gpu is None:
        return ""
    for version in reversed(RELEASES[server.name]):
        release = open_server(server.name, version)
        for quant in _USUAL:
            problem = _plain(release, gpu, parse_quantization(quant))
            until = cuda_kernel_until(release, problem)
            switches = [switch for switch in release.default_switches(problem) if switch > until]
            for m in (until + 1, *(switch + 1 for switch in switches)):
                config = release.default_config(problem, "up", m)
                if _needs(release, problem, "up", config) == crash.resources.required:
                    text = f"the default of {server.name} {version} for {quant} experts"
                    return f"{text} ({config}) needs just that"
    return ""


def _plain(server: Server, gpu: Gpu, quantization: Quantization) -> Problem:
    return Problem(
        E=_ANY_E,
        global_experts=_ANY_E,
        topk=_ANY_TOPK,
        K=_ANY_K,
        N=_ANY_N,
        file_n=_ANY_N,
        gpu=gpu,
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
        quantization=quantization,
    )


def _entry(
    crash: Crash,
    shape: Shape,
    server: Server,
    facts: ServerFacts,
    known: Known,
    config_files: Sequence[tuple[str, str]],
) -> Guilty | None:
    """The entries of the file that was read, or what tiles need that much."""
    assert crash.resources is not None
    file = shape.found or shape.name
    path = f"{file.directory}/{file.file}"
    problem = _problem(shape, server, facts, known)
    base = (("file", path), ("lint", f"moetune lint names every such entry of {file.file}"))
    if problem is None:
        return Guilty(False, f"an entry of {file.file}", base, shape)
    for name, text in config_files:
        if name.rpartition("/")[2] != file.file:
            continue
        try:
            table = server.read_table(text, name, problem)
        except MoetuneError:
            continue
        keys = [
            (m, config)
            for m, config in table.entries
            if any(_needs(server, problem, kernel, config) == crash.resources.required for kernel in KERNELS)
        ]
        if keys:
            listed = ", ".join(f"m={m} ({config})" for m, config in keys[:_MAX_TILES])
            return Guilty(False, f"the entry {listed} of {file.file}", (("file", name),), shape)
    tiles = list(_tiles_that_need(crash.resources.required, server, problem))
    if not tiles:
        return Guilty(False, f"an entry of {file.file}", base, shape) if crash.inside else None
    shown = ", ".join(tiles[:_MAX_TILES]) + (
        f" and {len(tiles) - _MAX_TILES} more" if len(tiles) > _MAX_TILES else ""
    )
    return Guilty(
        False, f"an entry of {file.file}", (("guilty", f"an entry with one of {shown}"), *base), shape
    )


def _tiles_that_need(required: int, server: Server, problem: Problem) -> Iterator[str]:
    seen = set()
    for m, n, k, stages in product(_TILES[::-1], _TILES[::-1], _TILES[::-1], range(2, 7)):
        config = KernelConfig(m, n, k, 1, 8 if m * n > 64 * 128 else 4, stages)
        if _needs(server, problem, "up", config) == required:
            text = f"{m}x{n}x{k} and {stages} stages"
            if text not in seen:
                seen.add(text)
                yield text


def _needs(server: Server, problem: Problem, kernel: Kernel, config: KernelConfig) -> int | None:
    capability = problem.gpu.compute_capability
    if capability is None:
        return None
    try:
        return shared_memory_bytes(server.launch(problem, kernel, config), capability)
    except MoetuneError:
        return None


def _problem(shape: Shape, server: Server, facts: ServerFacts, known: Known) -> Problem | None:
    """The problem of a shape: from the model where it is known, else with any K, which needs no memory."""
    gpu, _ = gpu_of(shape.name.device, known)
    if gpu.compute_capability is None:
        return None
    start = shape.start or facts.start
    model = guess_model(start, known)
    if model.layer is not None:
        fits = solve(shape, model.layer, server, gpu, start)
        if fits:
            return fits[0].problem
    try:
        quantization = parse_quantization(quant_name(shape.name) or "bf16")
    except MoetuneError:
        return None
    return _bare(shape, server, gpu, quantization)


def _bare(shape: Shape, server: Server, gpu: Gpu, quantization: Quantization) -> Problem:
    packed = server.name == "sglang" and quantization.dtype is Dtype.INT4_W4A16
    return Problem(
        E=shape.name.E,
        global_experts=shape.name.E,
        topk=min(_ANY_TOPK, shape.name.E),
        K=_ANY_K,
        N=2 * shape.name.N if packed else shape.name.N,
        file_n=shape.name.N,
        gpu=gpu,
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
        quantization=quantization,
    )

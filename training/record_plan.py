"""What `training.record` records: shapes, formats, m, and the configs of each; nothing here needs torch.

Sizes are run-time arguments of moetune's kernel, so shapes that agree on what Triton specialises on share
their binaries; only the kernel for weights with scales by group has them as constants.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest

from benchmarks.h200.common import binary
from benchmarks.h200.pdl import covering

from moetune.domain.compilation import CompileTask
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.landscape import Landscape
from moetune.domain.predict import PerformanceModel
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.space import WIDER_AXES, sglang_grid, worth_trying
from moetune.domain.version import parse_release
from moetune.servers.registry import open_server

SERVER, SERVER_VERSION, TRITON_VERSION, GPU = "sglang", "0.5.23", "3.6.0", "NVIDIA H200"
COVERING, PICKS, RANDOM = 40, 2, 70
"""Configs of a format: of its covering set, the model's first ones at each m, random ones."""
_SHAPES_FOR_PICKS = 3
_EVERYWHERE = 8
"""One config in so many is timed at every m, also where its tile fits the rows badly."""

_FEW, _SOME, _OTHER = (
    (1, 16, 64, 256, 1024, 4096),
    (4, 32, 128, 512, 2048, 8192),
    (2, 24, 96, 384, 1536, 6144),
)
_TOP_2, _TOP_2_OTHER = (2, 16, 64, 256, 1024, 4096), (8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Shape:
    """One expert layer of one rank.

    Attributes:
        E, N, K, topk: as in `Problem`.
        ms: those at which it is recorded; m * topk is a multiple of 16 but for the least, so that few
            binaries serve all.
    """

    E: int
    N: int
    K: int
    topk: int
    ms: tuple[int, ...]


SHAPES: Mapping[str, Shape] = {
    "qwen3-30b-a3b_tp1": Shape(128, 768, 2048, 8, _FEW),
    "mixtral-8x7b_tp2": Shape(8, 7168, 4096, 2, _TOP_2_OTHER),
    "deepseek-v3_tp8": Shape(256, 256, 7168, 8, _SOME),
    "jamba-1.5-mini_tp1": Shape(16, 14336, 4096, 2, _TOP_2),
    "synthetic-e512-n128": Shape(512, 128, 2048, 8, _OTHER),
    "olmoe-1b-7b_tp1": Shape(64, 1024, 2048, 8, _SOME),
    "deepseek-v3_ep8-like": Shape(32, 2048, 7168, 8, _FEW),
    "qwen3-235b-a22b_tp4": Shape(128, 384, 4096, 8, _OTHER),
    "mixtral-8x22b_tp1": Shape(8, 16384, 6144, 2, (8, 64, 256, 1024, 4096)),
    "synthetic-e512-n768": Shape(512, 768, 2048, 8, _SOME),
    "synthetic-e16-n1024": Shape(16, 1024, 4096, 2, _TOP_2),
    "minimax-m2_tp2": Shape(256, 768, 3072, 8, _FEW),
    "glm-4.5-air_tp1": Shape(128, 1408, 4096, 8, _OTHER),
    "kimi-k2_tp8": Shape(384, 256, 7168, 8, _OTHER),
    "llama-4-scout_tp2": Shape(16, 4096, 5120, 1, (16, 64, 256, 1024, 4096)),
    "qwen3-coder-480b_tp8": Shape(160, 320, 6144, 8, _FEW),
}


@dataclass(frozen=True, slots=True)
class Format:
    """A format of the weights and activations.

    Attributes:
        quantization: as a checkpoint has it.
        alike: bits of the dot's operands in recorded landscapes whose good configs are tried here too.
        shapes: names of those that are recorded, the most telling first.
    """

    quantization: Quantization
    alike: int
    shapes: tuple[str, ...]


def _dynamic(dtype: Dtype, method: str, *, per_channel: bool = False, block: int = 0) -> Quantization:
    return Quantization(
        dtype,
        method,
        block_shape=(block, block) if block else None,
        per_channel=per_channel,
        dynamic_activation=True,
    )


FORMATS: Mapping[str, Format] = {
    "fp8-tensor": Format(
        _dynamic(Dtype.FP8_W8A8, "fp8"),
        8,
        (
            *("qwen3-30b-a3b_tp1", "mixtral-8x7b_tp2", "kimi-k2_tp8", "synthetic-e512-n128"),
            *("jamba-1.5-mini_tp1", "minimax-m2_tp2"),
        ),
    ),
    "int4-g128": Format(
        Quantization(Dtype.INT4_W4A16, "gptq", group_size=128),
        16,
        (
            *("qwen3-30b-a3b_tp1", "synthetic-e512-n768", "deepseek-v3_tp8", "kimi-k2_tp8"),
            *("mixtral-8x7b_tp2", "deepseek-v3_ep8-like"),
        ),
    ),
    "int8-channel": Format(
        _dynamic(Dtype.INT8_W8A8, "compressed-tensors", per_channel=True),
        8,
        (
            *("deepseek-v3_tp8", "qwen3-235b-a22b_tp4", "mixtral-8x7b_tp2", "synthetic-e512-n768"),
            *("glm-4.5-air_tp1", "jamba-1.5-mini_tp1"),
        ),
    ),
    "int8-w8a16": Format(
        Quantization(Dtype.INT8_W8A16, "experts_int8", per_channel=True),
        16,
        (
            *("qwen3-235b-a22b_tp4", "synthetic-e16-n1024", "minimax-m2_tp2", "olmoe-1b-7b_tp1"),
            *("deepseek-v3_ep8-like", "mixtral-8x7b_tp2"),
        ),
    ),
    "fp8-block": Format(
        _dynamic(Dtype.FP8_W8A8, "fp8", block=128),
        8,
        (
            *("jamba-1.5-mini_tp1", "olmoe-1b-7b_tp1", "kimi-k2_tp8", "mixtral-8x22b_tp1"),
            *("glm-4.5-air_tp1", "synthetic-e512-n768"),
        ),
    ),
    "fp8-channel": Format(
        _dynamic(Dtype.FP8_W8A8, "compressed-tensors", per_channel=True),
        8,
        (
            *("olmoe-1b-7b_tp1", "deepseek-v3_tp8", "llama-4-scout_tp2", "qwen3-coder-480b_tp8"),
            *("deepseek-v3_ep8-like", "synthetic-e16-n1024"),
        ),
    ),
    "int4-g128-zeros": Format(
        Quantization(Dtype.INT4_W4A16, "awq", group_size=128, zero_point=True),
        16,
        ("deepseek-v3_tp8", "qwen3-235b-a22b_tp4", "synthetic-e16-n1024", "kimi-k2_tp8"),
    ),
    "bf16": Format(
        Quantization(),
        16,
        (
            *("glm-4.5-air_tp1", "jamba-1.5-mini_tp1", "kimi-k2_tp8", "synthetic-e16-n1024"),
            *("synthetic-e512-n768", "qwen3-coder-480b_tp8"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One shape in one format."""

    shape: str
    format: str

    @property
    def name(self) -> str:
        """As the landscape is called."""
        return f"{self.shape}_{self.format}"


def jobs() -> list[Job]:
    """One of each format, then the next of each: a run that is cut short has some of all."""
    rounds = zip_longest(*([Job(shape, name) for shape in kind.shapes] for name, kind in FORMATS.items()))
    return [job for found in rounds for job in found if job is not None]


@cache
def problem_of(job: Job) -> Problem:
    """The problem that a job records."""
    shape = SHAPES[job.shape]
    return Problem(
        E=shape.E,
        global_experts=shape.E,
        topk=shape.topk,
        K=shape.K,
        N=shape.N,
        file_n=shape.N,
        gpu=find_gpu(GPU),
        server=SERVER,
        server_version=SERVER_VERSION,
        triton_version=TRITON_VERSION,
        quantization=FORMATS[job.format].quantization,
    )


def fits_rows(config: KernelConfig, rows_per_expert: float) -> bool:
    """Whether BLOCK_SIZE_M is of the size of an expert's rows.

    In the 26 landscapes of 2026-12-01 a tile outside of this was over 1.3 times the best but for 128 rows
    in bf16, over 1.1 times.
    """
    most = 64 if rows_per_expert < 8 else 128 if rows_per_expert < 64 else 256
    least = 16 if rows_per_expert < 64 else 32 if rows_per_expert < 256 else 64
    return least <= config.block_size_m <= most or zlib.crc32(str(config).encode()) % _EVERYWHERE == 0


def _runs(problem: Problem, config: KernelConfig) -> bool:
    server = open_server(problem.server, problem.server_version, problem.triton_version)
    launch = server.launch(problem, "up", config)
    return launch.config == config and worth_trying(launch, problem.gpu, parse_release(server.triton_version))


def configs_of(name: str, landscapes: Sequence[Landscape], seed: int = 0) -> list[KernelConfig]:
    """What is tried of a format: the server's defaults, good ones of like formats, the model's picks, random.

    Args:
        name: of the format.
        landscapes: recorded before.
        seed: of the random ones, an equal share of each BLOCK_SIZE_M.
    """
    kind = FORMATS[name]
    problems = [problem_of(Job(shape, name)) for shape in kind.shapes]
    server = open_server(SERVER, SERVER_VERSION, TRITON_VERSION)
    chosen = [
        server.default_config(problem, "up", m) for problem in problems for m in SHAPES[kind.shapes[0]].ms
    ]
    known = [
        landscape
        for landscape in landscapes
        if landscape.problem.quantization.dtype.activation_bits == kind.alike
    ]
    if known:
        chosen += covering(known, COVERING)
    grid = [config for config in sglang_grid() if _runs(problems[0], config)]
    model = PerformanceModel.load()
    for problem, shape in zip(problems[:_SHAPES_FOR_PICKS], kind.shapes, strict=False):
        for kernel in KERNELS:
            launches = [server.launch(problem, kernel, config) for config in grid]
            for m in SHAPES[shape].ms:
                order = model.predict(problem, kernel, m, launches).score.argsort()
                chosen += [grid[place] for place in order[:PICKS].tolist()]
    rng = random.Random(f"{name} {seed}")
    wider = [config for config in WIDER_AXES.grid() if _runs(problems[0], config)]
    for size in WIDER_AXES.block_size_m:
        alike = [config for config in wider if config.block_size_m == size]
        chosen += rng.sample(alike, min(RANDOM // len(WIDER_AXES.block_size_m), len(alike)))
    return [config for config in dict.fromkeys(chosen) if _runs(problems[0], config)]


Where = tuple[Job, Kernel, int]
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """All configs of one kernel of a job at one m, in one pass.

    Attributes:
        number: of the pass; each has routings of its own.
        tasks: config to the binary that the server would launch.
    """

    job: Job
    number: int
    kernel: Kernel
    m: int
    tasks: Mapping[KernelConfig, CompileTask]

    @property
    def where(self) -> Where:
        """The same in each pass."""
        return self.job, self.kernel, self.m


def units_of(job: Job, configs: Sequence[KernelConfig], passes: int) -> list[Unit]:
    """The units of a job, one pass after the other."""
    problem = problem_of(job)
    wanted: dict[tuple[Kernel, int], list[KernelConfig]] = {}
    for m in SHAPES[job.shape].ms:
        rows_per_expert = max(1.0, m * problem.topk / problem.E)
        fitting = [config for config in configs if fits_rows(config, rows_per_expert)]
        wanted |= dict.fromkeys(((kernel, m) for kernel in KERNELS), fitting)
    return named_units(job, wanted, passes)


def named_units(
    job: Job, wanted: Mapping[tuple[Kernel, int], Sequence[KernelConfig]], passes: int
) -> list[Unit]:
    """The units of a job whose configs are named."""
    problem = problem_of(job)
    first = [
        Unit(job, 1, kernel, m, {config: binary(problem, kernel, m, config) for config in configs})
        for (kernel, m), configs in wanted.items()
    ]
    return [replace(unit, number=number) for number in range(1, passes + 1) for unit in first]


def with_what_shares(plan: Mapping[Job, Sequence[Unit]], few: int = 80) -> list[Job]:
    """The jobs in their order, behind each those that need few binaries more: the GPU need not wait then."""
    keys = {
        job: {binary_key(task) for unit in units for task in unit.tasks.values()}
        for job, units in plan.items()
    }
    order: list[Job] = []
    compiled: set[Key] = set()
    for job in plan:
        if job in order:
            continue
        order.append(job)
        compiled |= keys[job]
        for other in plan:
            if other not in order and len(keys[other] - compiled) < few:
                order.append(other)
                compiled |= keys[other]
    return order


def binary_key(task: CompileTask) -> Key:
    """The same for all tasks that Triton compiles into one binary: sizes stand for their classes.

    Triton 3.6.0 specialises integers on being 1 or a multiple of 16 (backends/compiler.py). The kernel for
    weights with scales by group has its sizes as constants.
    """
    if task.grouped:
        return (task,)
    block_k, block_n = task.launch.block_k, task.block_n
    groups = -(-task.k // block_k) if block_k else 0
    blocks = -(-task.n // block_n) if block_n else 0
    classes = [(size == 1, size % 16 == 0) for size in (task.n, task.k, groups, groups * blocks)]
    return replace(task, n=0, k=0), task.k % task.launch.config.block_size_k == 0, *classes

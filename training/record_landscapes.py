"""Record landscapes of many shapes on one GPU, for training the performance model.

    python -m training.record_landscapes --kernel-file fused_moe_triton_kernels.py --dtype bf16 \
        --budget 530 --out OUT

Times SGLang's own `fused_moe_kernel`, read from the kernel file of a published wheel that the user
names (nothing of it is kept here). Sizes are run-time arguments of the kernel, so one set of configs
is compiled once and timed on every shape. Writes `NAME.csv.gz` and `NAME.json` a shape, in the format
that `moetune replay` reads. Needs torch with CUDA, and Triton; not moetune's own dependencies.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = time.monotonic()
SMEM_LIMIT_BYTES = 232448
L2_REUSE = 3
"""Bytes touched between two uses of the same weights, over the L2."""

KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
COLUMNS = (
    *(key.lower() for key in KEYS),
    *(
        "kernel",
        "m",
        "median_us",
        "hot_l2_us",
        "shared_bytes",
        "registers",
        "spilled_registers",
        "compile_s",
        "error",
    ),
)
MS = ((2, 16, 64, 256, 1024, 4096), (1, 8, 32, 128, 512, 2048, 8192), (4, 24, 96, 384, 1536, 6144))
"""Three sets of m, taken in turn by the shapes."""

Config = tuple[int, int, int, int, int, int]
"""Values of `KEYS`."""
Job = tuple[str, str, int, bool, Config]
"""kernel, dtype, topk as the kernel's constexpr, whether BLOCK_SIZE_K divides K, config."""


@dataclass(frozen=True)
class Shape:
    """One expert layer: E experts, N intermediate columns of one rank, K columns in, topk."""

    name: str
    E: int
    N: int
    K: int
    topk: int

    def gemm(self, kernel: str) -> tuple[int, int]:
        """Columns out and in."""
        return (2 * self.N, self.K) if kernel == "up" else (self.K, self.N)


SHAPES = {
    "bf16": [
        Shape("qwen3-30b-a3b_tp1", 128, 768, 2048, 8),
        Shape("mixtral-8x7b_tp2", 8, 7168, 4096, 2),
        Shape("deepseek-v3_tp8", 256, 256, 7168, 8),
        Shape("qwen3-235b-a22b_tp8", 128, 192, 4096, 8),
        Shape("olmoe-1b-7b_tp1", 64, 1024, 2048, 8),
        Shape("phi-3.5-moe_tp2", 16, 3200, 4096, 2),
        Shape("synthetic-e512_tp8", 512, 128, 4096, 8),
        Shape("qwen3-coder-480b_tp4", 160, 640, 6144, 8),
        Shape("mixtral-8x22b_tp8", 8, 2048, 6144, 2),
        Shape("qwen3.5-122b-a10b_tp1", 256, 1024, 3072, 8),
        Shape("qwen3-235b-a22b_tp4", 128, 384, 4096, 8),
        Shape("synthetic-e32_tp1", 32, 1536, 4096, 8),
    ],
    "fp8": [
        Shape("qwen3-30b-a3b_tp1", 128, 768, 2048, 8),
        Shape("deepseek-v3_tp8", 256, 256, 7168, 8),
        Shape("qwen3.5-35b-a3b_tp1_down", 256, 512, 2048, 8),
        Shape("qwen3-coder-480b_tp4", 160, 640, 6144, 8),
        Shape("qwen3-235b-a22b_tp4", 128, 384, 4096, 8),
        Shape("synthetic-e512_tp8", 512, 128, 4096, 8),
        Shape("synthetic-e32_tp1", 32, 1536, 4096, 8),
        Shape("synthetic-e8_tp4", 8, 3584, 4096, 2),
        Shape("minimax-m2_tp4", 256, 384, 3072, 8),
        Shape("deepseek-v3_ep8-like", 32, 2048, 7168, 8),
    ],
}


def plausible(config: Config, dtype: str) -> bool:
    """Not over the shared memory with one stage less, nor over the registers, nor a compiler failure."""
    m, n, k, _, warps, stages = config
    item_bytes = 1 if dtype == "fp8" else 2
    pipeline = max(stages - 1, 1) * (m + n) * k * item_bytes
    whole_scales = dtype != "fp8" or k <= 128
    return (
        pipeline <= SMEM_LIMIT_BYTES
        and m * n <= 256 * warps * 32
        and whole_scales
        and config[:3] != (256, 64, 64)
    )


def grid(dtype: str) -> list[Config]:
    """SGLang's grid less what is not plausible."""
    axes = ((16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256), (1, 16, 32, 64), (4, 8), (2, 3, 4, 5))
    return [config for config in itertools.product(*axes) if plausible(config, dtype)]


def quality(folder: Path) -> dict[Config, float]:
    """For each config of the landscapes in a folder the best share of a best time that it reached."""
    best_share: dict[Config, float] = {}
    for path in sorted(folder.glob("*h200.csv.gz")):
        with gzip.open(path, "rt") as stream:
            rows = [row for row in csv.DictReader(stream) if row["median_us"]]
        best: dict[tuple[str, str], float] = {}
        for row in rows:
            key = (row["kernel"], row["m"])
            best[key] = min(best.get(key, math.inf), float(row["median_us"]))
        for row in rows:
            m, n, k, group, warps, stages = (int(row[key.lower()]) for key in KEYS)
            share = best[row["kernel"], row["m"]] / float(row["median_us"])
            config = (m, n, k, group, warps, stages)
            best_share[config] = max(best_share.get(config, 0.0), share)
    return best_share


def sample(dtype: str, known: Path, seed: int) -> list[Config]:
    """What to compile: the default, once good configs, wide tiles, random ones, and ones outside the grid."""
    rng = random.Random(seed)
    inside = grid(dtype)
    good = quality(known)
    chosen = sorted(inside, key=lambda config: -good.get(config, 0.0))[:300]
    wide = [config for config in inside if config[0] >= 64 and config[1] >= 128]
    chosen += rng.sample(wide, min(150, len(wide))) + rng.sample(inside, 150)
    while len(chosen) < 720:
        config = (
            rng.choice((16, 32, 64, 128, 256)),
            rng.choice((16, 32, 64, 128, 256, 512)),
            rng.choice((32, 64, 128, 128, 256)),
            rng.choice((1, 2, 4, 8, 16, 32)),
            rng.choice((2, 4, 8, 8, 16)),
            rng.choice((2, 3, 4, 5, 6, 7)),
        )
        if plausible(config, dtype):
            chosen.append(config)
    default: dict[str, list[Config]] = {
        "bf16": [(64, 64, 32, 8, 4, 3), (16, 32, 64, 1, 4, 3)],
        "fp8": [(64, 128, 128, 32, 4, 3)],
    }
    return list(dict.fromkeys(default[dtype] + chosen))


def load_kernel(path: str) -> Any:
    """Execute the wheel's kernel file with stubs for what it imports beside torch and Triton."""

    def stub(name: str, **members: object) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(members)

    def no(*_: object) -> bool:
        return False

    def yes(*_: object) -> bool:
        return True

    kernels = "sglang.kernels"
    fp8 = ("per_token_group_quant_fp8", "scaled_fp8_quant", "sglang_per_token_group_quant_fp8")
    int8 = ("per_token_group_quant_int8", "per_token_quant_int8", "sglang_per_token_group_quant_int8")
    stub(f"{kernels}.jit.utils", is_arch_support_pdl=no)
    stub(f"{kernels}.ops.quantization.fp8_kernel", **dict.fromkeys(fp8))
    stub(f"{kernels}.ops.quantization.int8_kernel", **dict.fromkeys(int8))
    stub("sglang.srt.batch_invariant_ops", is_batch_invariant_mode_enabled=no)
    stub("sglang.srt.environ", envs=types.SimpleNamespace(SGLANG_USE_AITER=types.SimpleNamespace(get=no)))
    stub("sglang.srt.layers.moe.utils", get_moe_padding_size=lambda *_: 0)
    stub("sglang.srt.utils", cpu_has_amx_support=no, is_cpu=no, is_cuda=yes, is_hip=no, is_sm90_supported=yes)
    spec = importlib.util.spec_from_file_location("recorded_kernels", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["recorded_kernels"] = loaded
    spec.loader.exec_module(loaded)
    return loaded.fused_moe_kernel


def scale_columns(k: int) -> int:
    """Columns allocated for the scales of `k`: a multiple of 16, so that one binary serves every shape."""
    return (k // 128 + 15) // 16 * 16


def launch_arguments(
    job: Job, gemm: tuple[int, int], valid: int, given: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of one launch.

    Args:
        job: what is launched.
        gemm: columns out and in.
        valid: rows, rounded up to a multiple of 16.
        given: tensors (or, to compile only, their types) by name, and the padded length.
    """
    import triton.language as tl

    kernel, dtype, topk, even, config = job
    n, k = gemm
    fp8 = dtype == "fp8"
    groups = scale_columns(k)
    tensors = [given["a"], None, given["b"], None, None, given["c"]]
    tensors += [given["a_scale"] if fp8 else None, given["b_scale"] if fp8 else None]
    tensors += [given["weights"], given["ids"], given["experts"], given["padded"], None]
    strides = [k, 1, n * k, 1, k, 0, 0, n, 1]
    scale_strides = [groups, 1, (n // 128) * groups, 1, groups] if fp8 else [0] * 5
    block = 128 if fp8 else 0
    positional = [*tensors, n, k, given["length"], valid, *strides, *scale_strides, block, block]
    off = (
        "use_int8_w8a8",
        "use_int8_w8a16",
        "per_channel_quant",
        "c_sorted",
        "FUSE_ADD_TO_OUTPUT",
        "MASK_OUTPUT",
        "FUSE_SUM_ALL_REDUCE",
    )
    keywords = dict.fromkeys(off, False) | {
        "MUL_ROUTED_WEIGHT": kernel == "down",
        "top_k": topk,
        "compute_type": tl.bfloat16,
        "use_fp8_w8a8": fp8,
        "even_Ks": even,
        "swap_ab": fp8 and config[0] < 64 <= config[1],
        "ROUTER_TOPK": 1,
    }
    return positional, keywords | dict(zip(KEYS, config, strict=True))


_KERNEL: Any = None


def start_compiler(path: str) -> None:
    """Make a worker of the compile pool ready."""
    global _KERNEL
    import torch

    torch.cuda.init()
    _KERNEL = load_kernel(path)


def compile_job(job: Job) -> tuple[Job, int, float, str]:
    """Compile one binary into the cache: the job, its shared memory, seconds, and what went wrong."""
    import torch

    weight = torch.float8_e4m3fn if job[1] == "fp8" else torch.bfloat16
    given: dict[str, Any] = {"a": weight, "b": weight, "c": torch.bfloat16, "length": 4096}
    given |= dict.fromkeys(("a_scale", "b_scale", "weights"), torch.float32)
    given |= dict.fromkeys(("ids", "experts", "padded"), torch.int32)
    begun = time.monotonic()
    try:
        positional, keywords = launch_arguments(job, (4096, 4096), 16, given)
        shared = int(_KERNEL.warmup(*positional, grid=(1,), **keywords).metadata.shared)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything; the job is named
        return job, -1, time.monotonic() - begun, type(error).__name__
    return job, shared, time.monotonic() - begun, "OutOfResources" if shared > SMEM_LIMIT_BYTES else ""


Compiled = dict[Job, tuple[int, float, str]]


def compile_all(
    configs: list[Config], shapes: list[Shape], dtype: str, kernel_file: str, workers: int, limit_s: float
) -> Compiled:
    """Compile every binary that the shapes need, longest first, in a pool of processes."""
    jobs: set[Job] = set()
    for config, shape in itertools.product(configs, shapes):
        jobs.add(("up", dtype, shape.topk, shape.K % config[2] == 0, config))
        jobs.add(("down", dtype, 1, shape.N % config[2] == 0, config))
    ordered = sorted(jobs, key=lambda job: (-math.prod(job[4][:3]), job))
    print(f"{len(configs)} configs, {len(ordered)} binaries", flush=True)
    compiled: Compiled = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=start_compiler, initargs=(kernel_file,)) as pool:
        for job, shared, seconds, error in pool.imap_unordered(compile_job, ordered, chunksize=2):
            compiled[job] = (shared, seconds, error)
            if time.monotonic() - START > limit_s:
                print("compile deadline", flush=True)
                break
    core_seconds = sum(seconds for _, seconds, _ in compiled.values())
    print(
        f"compiled {len(compiled)} in {time.monotonic() - START:.0f} s, {core_seconds:.0f} core seconds",
        flush=True,
    )
    return compiled


def align(chosen: Any, block_m: int, num_experts: int, length: int, fill: int) -> tuple[Any, Any, Any]:
    """Row ids sorted by expert and padded to blocks, the expert of each block, the padded number of rows."""
    import torch

    device = chosen.device
    flat = chosen.flatten()
    count = torch.bincount(flat, minlength=num_experts)
    padded = (count + block_m - 1) // block_m * block_m
    start = torch.cumsum(padded, 0) - padded
    order = torch.argsort(flat, stable=True)
    first = torch.cumsum(count, 0) - count
    position = start[flat[order]] + torch.arange(flat.numel(), device=device) - first[flat[order]]
    ids = torch.full((length,), fill, dtype=torch.int32, device=device)
    ids[position] = order.to(torch.int32)
    experts = torch.zeros((length + block_m - 1) // block_m, dtype=torch.int32, device=device)
    owner = torch.repeat_interleave(torch.arange(num_experts, device=device), padded // block_m)
    experts[: owner.numel()] = owner.to(torch.int32)
    return ids, experts, padded.sum().to(torch.int32).reshape(1)


class Bench:
    """One kernel of one shape at one m, on as many routings as keep the weights out of the L2."""

    def __init__(
        self, kernel: Any, kind: str, dtype: str, shape: Shape, m: int, weights: tuple[Any, Any]
    ) -> None:
        import torch

        self.kernel, self.kind, self.dtype, self.shape, self.m = kernel, kind, dtype, shape, m
        self.gemm = shape.gemm(kind)
        n, k = self.gemm
        device = torch.device("cuda")
        rows = m if kind == "up" else m * shape.topk
        self.valid = (m * shape.topk + 15) // 16 * 16
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        touched = min(shape.E, m * shape.topk) * n * k * (1 if dtype == "fp8" else 2)
        self.routings: int = max(8 if m < 512 else 3, min(24, math.ceil(L2_REUSE * l2 / touched)))
        self.given = {
            "a": normal(dtype, rows, k),
            "a_scale": torch.rand(rows, scale_columns(k), device=device) if dtype == "fp8" else None,
            "b": weights[0],
            "b_scale": weights[1],
            "c": torch.empty(m * shape.topk + 16, n, dtype=torch.bfloat16, device=device),
            "weights": torch.rand(m * shape.topk + 16, device=device),
        }
        self.chosen = [
            torch.rand(m, shape.E, device=device).topk(shape.topk, 1).indices for _ in range(self.routings)
        ]
        self.aligned: dict[int, list[tuple[Any, Any, Any]]] = {}

    def padded_length(self, block_m: int) -> int:
        """The server's upper bound, rounded up to a multiple of 16."""
        rows, experts = self.m * self.shape.topk, self.shape.E
        full = rows * block_m if rows < experts + 1 else rows + (experts + 1) * (block_m - 1)
        return (full + 15) // 16 * 16

    def job(self, config: Config) -> Job:
        """The binary that a config needs here."""
        topk = self.shape.topk if self.kind == "up" else 1
        return self.kind, self.dtype, topk, self.gemm[1] % config[2] == 0, config

    def launcher(self, config: Config) -> Callable[[int], None]:
        """A function that launches a config on one of the routings."""
        block_m, length = config[0], self.padded_length(config[0])
        if block_m not in self.aligned:
            self.aligned[block_m] = [
                align(chosen, block_m, self.shape.E, length, self.valid) for chosen in self.chosen
            ]
        size = (-(-length // block_m) * -(-self.gemm[0] // config[1]),)

        def launch(routing: int) -> None:
            ids, experts, padded = self.aligned[block_m][routing]
            given = self.given | {"ids": ids, "experts": experts, "padded": padded, "length": length}
            positional, keywords = launch_arguments(self.job(config), self.gemm, self.valid, given)
            self.kernel[size](*positional, **keywords)

        return launch

    def time_us(self, config: Config, best_us: float) -> float:
        """Median time of one launch: 7 replays near the best, 3 when over 1.15 of it, 1 when over 1.6."""
        import torch

        launch = self.launcher(config)
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for routing in range(self.routings):
                launch(routing)

        def replay_us() -> float:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            elapsed_ms: float = first.elapsed_time(last)
            return elapsed_ms * 1000 / self.routings

        times = [replay_us()]
        if times[0] < 1.6 * best_us:
            times = [replay_us() for _ in range(3)]
            if statistics.median(times) < 1.15 * best_us:
                times += [replay_us() for _ in range(4)]
        return float(statistics.median(times))


def normal(dtype: str, *size: int) -> Any:
    """Random values, normal with a deviation of 0.05."""
    import torch

    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    return torch.empty(*size, dtype=torch.bfloat16, device="cuda").normal_(0, 0.05).to(kind)


def time_problem(
    bench: Bench, configs: list[Config], compiled: Compiled, rng: random.Random, limit_s: float
) -> Iterator[list[Any]]:
    """Rows of one (kernel, m), until the time is up: random order, hopeless padding last."""
    begun, best_us, timed = time.monotonic(), math.inf, 0
    order = rng.sample(configs, len(configs))
    rows_per_expert = max(1, bench.m * bench.shape.topk // bench.shape.E)
    order.sort(key=lambda config: config[0] > 16 * rows_per_expert)
    for config in order:
        if time.monotonic() - begun > limit_s:
            break
        if (found := compiled.get(bench.job(config))) is None:
            continue
        shared, seconds, error = found
        time_us: float | None = None
        if not error:
            try:
                time_us = bench.time_us(config, best_us)
            except Exception as failure:  # noqa: BLE001 - the row names it; a poisoned context shows in all later rows
                error = type(failure).__name__
        if time_us is not None:
            best_us, timed = min(best_us, time_us), timed + 1
        shown = "" if time_us is None else round(time_us, 3)
        yield [*config, bench.kind, bench.m, shown, "", shared, "", "", round(seconds, 3), error]
    spent = time.monotonic() - begun
    problem = f"{bench.shape.name} {bench.kind} m={bench.m}"
    print(f"{problem} best {best_us:.1f} us of {timed}, {bench.routings} routings, {spent:.1f} s", flush=True)


def write(out: Path, shape: Shape, dtype: str, rows: list[list[Any]], space: str) -> None:
    """Write one landscape."""
    import torch
    import triton

    stem = f"{shape.name}_{'fp8-block' if dtype == 'fp8' else 'bf16'}_h200"
    text = "\n".join(",".join(map(str, row)) for row in [list(COLUMNS), *rows]) + "\n"
    with gzip.GzipFile(out / f"{stem}.csv.gz", "wb", mtime=0) as stream:
        stream.write(text.encode())
    facts = {
        "device": torch.cuda.get_device_name(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "kernel_source": "SGLang 0.5.23 fused_moe_kernel",
        "measured": time.strftime("%Y-%m-%d"),
        "protocol": (
            "CUDA graph of at least 8 launches (3 from m=512), one per independent uniform random routing, "
            "as many as touch three times the L2; median of 7 replays (3 when over 1.15x, 1 when over 1.6x "
            "the best so far); random order; weights normal(0,0.05); lengths rounded up to a multiple of 16 "
            "so that one specialisation serves every m"
        ),
        "space": space,
        "model": shape.name,
        "num_experts": shape.E,
        "topk": shape.topk,
        "hidden_size": shape.K,
        "intermediate_per_rank": shape.N,
        "ep": 1,
        "dtype": "fp8_w8a8" if dtype == "fp8" else "bf16",
        "block_shape": [128, 128] if dtype == "fp8" else None,
    }
    (out / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel-file", required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--known", type=Path, default=Path(__file__).parent / "landscapes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dtype, deadline, shapes = args.dtype, START + args.budget, SHAPES[args.dtype]
    configs = sample(dtype, args.known, args.seed)
    compiled = compile_all(configs, shapes, dtype, args.kernel_file, args.workers, 0.45 * args.budget)

    import torch

    kernel = load_kernel(args.kernel_file)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    space = (
        f"a sample of {len(configs)} configs: 300 that were good in other landscapes, wide tiles, "
        f"random ones of the 1920 grid, and random ones outside it (seed {args.seed})"
    )
    for index, shape in enumerate(shapes):
        shape_end = time.monotonic() + (deadline - time.monotonic()) / (len(shapes) - index)
        rows: list[list[Any]] = []
        problems = list(itertools.product(("up", "down"), MS[index % len(MS)]))
        weights: tuple[Any, Any] = (None, None)
        for number, (kind, m) in enumerate(problems):
            if not number or problems[number - 1][0] != kind:
                n, k = shape.gemm(kind)
                scales = (
                    torch.rand(shape.E, n // 128, scale_columns(k), device="cuda") if dtype == "fp8" else None
                )
                weights = (normal(dtype, shape.E, n, k), scales)
            limit_s = (shape_end - time.monotonic()) / (len(problems) - number)
            bench = Bench(kernel, kind, dtype, shape, m, weights)
            rows += list(time_problem(bench, configs, compiled, rng, limit_s))
        write(args.out, shape, dtype, rows, space)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "moetune" / "record-triton"))
    main()

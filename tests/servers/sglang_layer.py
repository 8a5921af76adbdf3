"""A whole expert layer of a published SGLang wheel, on CPU tensors, up to the launch of its kernels.

Everything of SGLang's own Python runs: the lookup, the alignment's sizes, the TMA switches, the
quantization branch and `invoke_fused_moe_kernel`. Only what would need a GPU is a stub: the CUDA
helpers, and the two Triton kernels, whose launches are bound by Triton's own binder for a named GPU
and recorded instead of run.
"""

from __future__ import annotations

import builtins
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from moetune.servers.sglang.releases import rules_of
from tests.servers.sglang_loader import Logger, Stub, World, importer, load_lookup
from tests.wheels import members, read_member

_STUBBED = frozenset({"sglang", "sgl_kernel", "vllm", "aiter"})
_HELPERS = (
    "act_and_mul_triton",
    "moe_combine_topk",
    "moe_sum_reduce",
    "moe_sum_reduce_torch_compile",
    "moe_sum_reduce_triton",
    "silu_and_mul",
)
_KERNELS = ("fused_moe_kernel", "fused_moe_kernel_gptq_awq")


@dataclass(frozen=True)
class Launched:
    """One launch as Triton bound it.

    Attributes:
        kernel: the kernel's name.
        arguments: name to value.
        specialised: name to Triton's class of the value (`D`: divisible by 16).
        options: compile options (`num_warps`, `launch_pdl`, ...).
    """

    kernel: str
    arguments: dict[str, Any]
    specialised: dict[str, Any]
    options: Any


@dataclass
class Recorder:
    """Stands in for a Triton kernel: binds a launch the way `JITFunction.run` does, and keeps it."""

    jit: JITFunction[Any]
    capability: int
    launches: list[Launched] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Any:
        backend = make_backend(GPUTarget("cuda", self.capability, 32))
        bind = create_function_from_signature(self.jit.signature, self.jit.params, backend)

        def launch(*arguments: object, **options: object) -> None:
            options = {"debug": False, "instrumentation_mode": "", **options}
            bound, specialization, given = bind(*arguments, **options)
            packed = self.jit._pack_args(backend, options, bound, specialization, given)[0]
            grid(bound)
            classes = dict(zip(bound, specialization, strict=True))
            self.launches.append(Launched(self.jit.__name__, dict(bound), classes, packed))

        return launch


@dataclass(frozen=True)
class Layer:
    """A loaded layer: call it, and read what was launched."""

    namespace: dict[str, Any]
    launches: list[Launched]
    logger: Logger

    def __call__(self, *, m: int, topk: int, weights: Weights) -> list[Launched]:
        """Run m tokens; the launches of the up and of the down kernel."""
        self.launches.clear()
        hidden = torch.ones((m, weights.K), dtype=torch.bfloat16)
        self.namespace["fused_experts_impl"](
            hidden,
            weights.w1,
            weights.w2,
            torch.zeros((m, topk)),
            torch.zeros((m, topk), dtype=torch.int32),
            inplace=True,
            **weights.options,
        )
        return list(self.launches)


@dataclass(frozen=True)
class Weights:
    """Weights of a layer and the arguments that say how they are quantized."""

    K: int
    w1: torch.Tensor
    w2: torch.Tensor
    options: dict[str, Any]


def weights(kind: str, E: int, N: int, K: int) -> Weights:
    """Zeros in the shapes and types that each quantization gives the kernels."""
    bf16, fp8, packed = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
    scale = functools.partial(torch.zeros, dtype=torch.float32)
    if kind == "bf16":
        return _weights(E, N, K, K, N, bf16)
    if kind == "fp8":
        return _weights(E, N, K, K, N, fp8, use_fp8_w8a8=True, w1_scale=scale(E), w2_scale=scale(E))
    if kind == "fp8 block":
        s1, s2 = scale((E, 2 * N // 128, K // 128)), scale((E, K // 128, N // 128))
        block = {"block_shape": [128, 128]}
        return _weights(E, N, K, K, N, fp8, use_fp8_w8a8=True, w1_scale=s1, w2_scale=s2, **block)
    if kind == "int4":
        s1, s2 = scale((E, 2 * N, K // 32)), scale((E, K, N // 32))
        block = {"block_shape": [0, 32]}
        return _weights(
            E, N, K, K // 2, N // 2, packed, use_int4_w4a16=True, w1_scale=s1, w2_scale=s2, **block
        )
    raise ValueError(kind)


def _weights(E: int, N: int, K: int, k1: int, k2: int, dtype: torch.dtype, **options: Any) -> Weights:
    return Weights(
        K, torch.zeros((E, 2 * N, k1), dtype=dtype), torch.zeros((E, K, k2), dtype=dtype), dict(options)
    )


def load_layer(version: str, world: World, capability: tuple[int, int], folder: Path) -> Layer:
    """Execute a wheel's modules from the lookup to the launch.

    Args:
        version: of the wheel.
        world: what the stubs say; its folder holds the config files.
        capability: compute capability of the GPU that the launches are bound for.
        folder: where the kernels' source is put, which Triton wants as a file.
    """
    logger = Logger()
    lookup = load_lookup(version, world, torch)
    lookup.functions["_get_cuda_shared_memory_per_block_optin"] = lambda: world.smem_optin_bytes
    lookup.functions["logger"] = logger
    answers = _answers(world, capability)
    rules = rules_of(version)
    if rules.at_least((0, 5, 2)):
        for name in ("get_config_dtype_str", "try_get_optimal_moe_config"):
            answers[name] = lookup.functions[name]
        align = f"{rules.home}/moe_align_block_size.py"
        answers["moe_align_block_size"] = _execute(version, align, answers, folder)["moe_align_block_size"]
        kernels = _execute(version, _kernels_path(version), answers, folder)
        run = _execute(version, f"{rules.home}/fused_moe.py", answers | kernels, folder)
    else:
        kernels = run = _execute(version, rules.module, answers, folder)
        for name in ("get_moe_configs", "get_default_config", "try_get_optimal_moe_config"):
            run[name] = lookup.functions[name]
    launches: list[Launched] = []
    for name in _KERNELS:
        kernels[name] = Recorder(kernels[name], capability[0] * 10 + capability[1], launches)
    for name in _HELPERS:
        run[name] = lambda *_, **__: None
    run["logger"] = logger
    return Layer(run, launches, logger)


def _answers(world: World, capability: tuple[int, int]) -> dict[str, Any]:
    def quantized(rows: torch.Tensor, block_k: int, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.to(torch.float8_e4m3fn), torch.zeros((rows.shape[0], -(-rows.shape[1] // block_k)))

    def scaled(rows: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.to(torch.float8_e4m3fn), torch.zeros(1)

    sums = Stub(enable_fused_moe_sum_all_reduce=world.fused_sum)
    arguments = Stub(enable_deterministic_inference=world.deterministic, **vars(sums))
    return {
        "is_cuda": lambda: not world.hip,
        "is_hip": lambda: world.hip,
        "is_sm90_supported": lambda: capability[0] == 9,
        "is_arch_support_pdl": lambda: capability[0] >= 9,
        "is_batch_invariant_mode_enabled": lambda: world.deterministic,
        "get_moe_padding_size": lambda _: 0,
        "get_global_server_args": lambda: arguments,
        "get_server_args": lambda: arguments,
        "get_exec": lambda: Stub(moe=sums, deterministic=arguments),
        "sglang_per_token_group_quant_fp8": quantized,
        "per_token_group_quant_fp8": quantized,
        "per_token_group_quant": lambda rows, group_size, **_: quantized(rows, group_size),
        "SMALL_NUMEL_LIMIT": 64,
        "scaled_fp8_quant": scaled,
        "sgl_scaled_fp8_quant": scaled,
    }


def _execute(version: str, path: str, answers: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Triton reads a kernel's source from its file.
    place = folder / version / Path(path).name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(read_member("sglang", version, path), encoding="utf-8")
    namespace: dict[str, Any] = {
        "__name__": path.removesuffix(".py").replace("/", "."),
        "__file__": str(place),
        "__builtins__": {**vars(builtins), "__import__": importer(answers, _STUBBED)},
    }
    exec(_compiled(str(place)), namespace)
    return namespace


@functools.cache
def _compiled(place: str) -> Any:
    return compile(Path(place).read_text(encoding="utf-8"), place, "exec")


@functools.cache
def _kernels_path(version: str) -> str:
    return next(name for name in members("sglang", version) if name.endswith("/fused_moe_triton_kernels.py"))

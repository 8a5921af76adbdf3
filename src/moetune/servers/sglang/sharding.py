"""How SGLang cuts an expert layer: E, N, and what stands for N in the file name.

Source: sglang 0.5.23 wheel. E is `w1.shape[0]`: routed experts of the rank (redundant ones among
them) and fused shared ones (layers/moe/fused_moe_triton/layer.py:FusedMoE.__init__). N is
`w2.shape[2]`: packed two to a byte for int4 (quantization/moe_wna16.py:create_weights).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError, ShardingError
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype
from moetune.servers.sglang.defaults import DETERMINISTIC_FLAG
from moetune.servers.sglang.fusion import fused_shared_experts
from moetune.servers.sglang.names import dtype_tag
from moetune.servers.sglang.releases import Feature, Rules

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.servers.protocol import ServerOptions

# All-to-all backends for which the server sets the expert-parallel size to the tensor-parallel one.
# Source: 0.5.23 wheel, sglang/srt/arg_groups/overrides.py:_A2A_EP_SPANNING_BACKENDS.
_SPANNING_BACKENDS = frozenset(
    {
        "megamoe",
        "deepep",
        "deepep_v2",
        "mooncake",
        "nixl",
        "ascend_fuseep",
        "flashinfer",
        "flashinfer_megamoe",
        "mori",
        "pplx",
    }
)
_PADDING_VARIABLE = "SGLANG_MOE_PADDING"
_FUSED_SWIGLU_VARIABLE = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
_TRUE = frozenset({"1", "true"})
_LARGEST_OFFERED_TP = 64
_LORA_FLAG = "lora"
FUSED_SWIGLU_FLAG = "fuse_swiglu"
FUSED_SUM_FLAG = "fused_sum"
_FUSED_SUM_OPTION = "--enable-fused-moe-sum-all-reduce"
_LEAST_SUMMED = 3  # experts a token: two are added by torch.add in any case
_NOT_SUMMED = frozenset({Dtype.INT8_W8A16, Dtype.INT4_W4A16})


def make_problem(
    rules: Rules,
    triton_version: str,
    layer: ExpertLayer,
    parallelism: Parallelism,
    gpu: Gpu,
    options: ServerOptions,
) -> Problem:
    """Shard an expert layer.

    `dp` changes nothing: with data-parallel attention the experts are still cut by `tp`, and
    without it each replica has them all (moe_tp = tp / ep: distributed/parallel_state.py).

    Raises:
        ShardingError: when a size does not divide.
        ServerError: for a dtype that has no name here.
    """
    parallelism = _effective(parallelism, options)
    dtype_tag(layer.quantization.dtype, layer.activation_dtype)
    routed = layer.num_experts + parallelism.redundant_experts
    _check(layer, parallelism, routed)
    moe_tp = parallelism.tp // parallelism.ep
    N = layer.intermediate_size // moe_tp
    fused = fused_shared_experts(rules.release, layer, parallelism, gpu, options)
    topk = layer.topk + fused
    return Problem(
        E=routed // parallelism.ep + fused,
        global_experts=routed,
        topk=topk,
        K=layer.latent_size or layer.hidden_size,
        N=N,
        file_n=_file_n(layer, N, gpu, options),
        gpu=gpu,
        server="sglang",
        server_version=rules.version,
        triton_version=triton_version,
        fused_shared_experts=fused,
        gated=layer.gated,
        bias=layer.bias,
        ep=parallelism.ep,
        activation_dtype=layer.activation_dtype,
        quantization=layer.quantization,
        flags=_flags(rules, options, _sums(rules, options, parallelism.ep, topk, layer.quantization.dtype)),
    )


def _effective(parallelism: Parallelism, options: ServerOptions) -> Parallelism:
    for name in ("tp", "ep", "dp"):
        if getattr(parallelism, name) < 1:
            raise ShardingError(f"{name} is {getattr(parallelism, name)}; it must be 1 or more")
    if parallelism.redundant_experts < 0:
        raise ShardingError("the number of redundant experts cannot be negative")
    if options.moe_a2a_backend in _SPANNING_BACKENDS:
        return replace(parallelism, ep=parallelism.tp)
    return parallelism


def _check(layer: ExpertLayer, parallelism: Parallelism, routed: int) -> None:
    tp, ep = parallelism.tp, parallelism.ep
    if tp % ep:
        fitting = [size for size in range(1, tp + 1) if tp % size == 0]
        raise ShardingError(
            f"ep {ep} does not divide tp {tp}: SGLang spreads the experts inside one tensor-parallel group",
            f"use --ep {_listed(fitting)}",
        )
    if routed % ep:
        fitting = [size for size in range(1, tp + 1) if tp % size == 0 and routed % size == 0]
        raise ShardingError(
            f"{routed} experts cannot be spread evenly over ep {ep} ranks",
            f"use --ep {_listed(fitting)}, or --redundant-experts to fill up",
        )
    reason = _unfit(layer, tp // ep)
    if reason is not None:
        fitting = [
            size * ep for size in range(1, _LARGEST_OFFERED_TP // ep + 1) if _unfit(layer, size) is None
        ]
        if not fitting:
            raise ShardingError(f"{reason} (tp {tp}, ep {ep}); no tp fits", "use another --ep")
        raise ShardingError(
            f"{reason} (tp {tp}, ep {ep}); tp values that fit with ep {ep}: {_listed(fitting)}",
            f"use --tp with one of: {_listed(fitting)}",
        )


def _unfit(layer: ExpertLayer, moe_tp: int) -> str | None:
    """Why a layer cannot be cut into that many slices, None when it can."""
    size = layer.intermediate_size
    if size % moe_tp:
        return f"intermediate size {size} cannot be cut into {moe_tp} equal slices"
    N = size // moe_tp
    quantization = layer.quantization
    if quantization.dtype is Dtype.INT4_W4A16 and N % 2:
        return f"slices of {N} columns cannot be packed two to a byte"
    # 0.5.23 wheel, quantization/fp8.py and blockwise_int8.py:create_weights: ValueError at start-up.
    # block_k is asked for only where there is more than one rank.
    if quantization.block_shape is None or quantization.dtype not in (Dtype.FP8_W8A8, Dtype.INT8_W8A8):
        return None
    block_n, block_k = quantization.block_shape
    for edge, asked in ((block_n, True), (block_k, moe_tp > 1)):
        if asked and edge and N % edge:
            return f"slices of {N} columns are no multiple of the quantization block {edge}"
    return None


def _file_n(layer: ExpertLayer, N: int, gpu: Gpu, options: ServerOptions) -> int:
    """N as it stands in the file name."""
    quantization = layer.quantization
    if quantization.dtype is Dtype.INT4_W4A16:
        return N // 2
    padded = _is_padded(options) and quantization.block_shape is None
    if padded and quantization.dtype in (Dtype.FP8_W8A8, Dtype.INT8_W8A8):
        # The lookup takes 128 off w2.shape[2]; only ROCm's fp8 weights were given the 128 before
        # (quantization/fp8.py:process_weights_hip_scale_padding), so that N comes out unchanged.
        # Elsewhere fused_experts_impl fails its own check of the hidden size.
        if gpu.vendor == "AMD" and quantization.dtype is Dtype.FP8_W8A8:
            return N
        raise ServerError(
            f"{_PADDING_VARIABLE}=1 stops SGLang with AssertionError (Hidden size mismatch) for "
            f"{quantization.dtype.value} experts on {gpu.torch_name}",
            f"unset {_PADDING_VARIABLE}",
        )
    return N


def _is_padded(options: ServerOptions) -> bool:
    value = options.environment.get(_PADDING_VARIABLE, "0")
    try:
        return bool(int(value))  # as the server reads it, at import
    except ValueError:
        raise ServerError(
            f"{_PADDING_VARIABLE} is no number; SGLang dies with ValueError",
            f"set {_PADDING_VARIABLE} to 0 or 1",
        ) from None


def _flags(rules: Rules, options: ServerOptions, sums: bool) -> tuple[str, ...]:
    fuses_swiglu = options.environment.get(_FUSED_SWIGLU_VARIABLE, "").strip().lower() in _TRUE
    flags = {
        DETERMINISTIC_FLAG: options.deterministic and rules.has(Feature.DETERMINISTIC),
        FUSED_SUM_FLAG: sums,
        FUSED_SWIGLU_FLAG: fuses_swiglu and rules.at_least((0, 5, 18)),
        _LORA_FLAG: options.enable_lora,
    }
    return tuple(sorted(name for name, on in flags.items() if on))


def _sums(rules: Rules, options: ServerOptions, ep: int, topk: int, dtype: Dtype) -> bool:
    """Whether the down kernel adds up the topk results of a token.

    Source: `use_fused_moe_sum_all_reduce` of `fused_moe.py` in the 0.5.10 and 0.5.23 wheels. Where it does
    not apply, the flag is taken in silence.

    Raises:
        ServerError: for a release without the flag, and for one that computes wrong sums.
    """
    if not options.fused_moe_sum:
        return False
    if not rules.has(Feature.FUSED_SUM):
        raise ServerError(
            f"SGLang {rules.version} has no {_FUSED_SUM_OPTION}", "it came with SGLang 0.5.10: leave it out"
        )
    if topk < _LEAST_SUMMED or dtype in _NOT_SUMMED:
        return False
    if ep > 1 and not rules.has(Feature.ELSEWHERE_UNTOUCHED):
        raise ServerError(
            f"with {_FUSED_SUM_OPTION} and ep {ep} SGLang {rules.version} writes outside the output of its "
            "down kernel",
            "leave the flag out, or use --ep 1, or SGLang 0.5.23",
        )
    return True


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "1"

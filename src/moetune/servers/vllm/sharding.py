"""How vLLM shards an expert layer: E and N of one rank, and the block shape that remains.

Sources: `config.py:FusedMoEParallelConfig.make`, `expert_map_manager.py:determine_expert_map` (before:
`layer.py`), `oracle/fp8.py:refine_fp8_moe_block_shape` and `pad_tp_shard_to_weight_blocks`,
`vllm/model_executor/layers/quantization/fp8.py:Fp8MoEMethod`, `.../moe_wna16.py:MoeWNA16Method`,
`vllm/model_executor/models/nemotron_h.py` (paths as in rules.py).

There is no fusion of shared experts on NVIDIA: only the AITER kernels of ROCm have it. Experts behind a
latent projection see the latent columns: the layer is built with `moe_latent_size`, whatever vLLM's own
tuning script reads from the config.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError, ShardingError
from moetune.domain.problem import Parallelism, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.version import release_text
from moetune.servers.vllm.lookup import is_batch_invariant
from moetune.servers.vllm.names import dtype_tag
from moetune.servers.vllm.rules import BATCH_INVARIANT_VARIABLE, Change, has

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.domain.version import Release
    from moetune.servers.protocol import ServerOptions

_MAX_SUGGESTED_RANKS = 64
_SMALLEST_BLOCK = 32  # of fp8 scales after refinement, and of groups after halving
# Methods whose layer halves the group until it divides both sizes.
_HALVES_GROUPS = frozenset({"awq", "gptq", "awq_marlin", "gptq_marlin", "moe_wna16"})
# Methods whose fp8 layer refines the block scales; compressed-tensors and quark refuse instead.
_REFINES_BLOCKS = frozenset({"fp8"})


def shard(
    release: Release,
    layer: ExpertLayer,
    parallelism: Parallelism,
    gpu: Gpu,
    options: ServerOptions,
    *,
    version: str,
    triton_version: str,
) -> Problem:
    """Shard an expert layer by the rules of a release.

    Raises:
        ShardingError: when a size does not divide; names the sizes that do.
        ServerError: for a dtype that has no tuned file, and for a flag of SGLang.
    """
    dtype_tag(release, layer.quantization, layer.activation_dtype)
    _check_sizes(layer, parallelism)
    ep = parallelism.tp * parallelism.dp if parallelism.ep > 1 else 1
    if options.fused_moe_sum:
        raise ServerError("vLLM has no --enable-fused-moe-sum-all-reduce", "it is SGLang's: leave it out")
    E = _local_experts(layer, parallelism, ep)
    part = _split(release, layer, parallelism, options)
    if isinstance(part, str):
        fits = _fitting_tp(release, layer, parallelism, options)
        none = f"no --tp up to {_MAX_SUGGESTED_RANKS} fits: check the sizes, or try another --server-version"
        raise ShardingError(part, f"values of --tp that fit: {_listed(fits)}" if fits else none)
    N, quantization = part
    packed = quantization.dtype is Dtype.MXFP4 and not has(release, Change.OCP_MX_UNPACKED)
    return Problem(
        E=E,
        global_experts=layer.num_experts + parallelism.redundant_experts,
        topk=layer.topk,
        K=_columns(layer),
        N=N,
        # The last size of w2, which is doubled back for int4 only.
        file_n=N // 2 if packed else N,
        gpu=gpu,
        server="vllm",
        server_version=version,
        triton_version=triton_version,
        gated=layer.gated,
        bias=layer.bias,
        ep=ep,
        activation_dtype=layer.activation_dtype,
        quantization=quantization,
        flags=(BATCH_INVARIANT_VARIABLE,) if is_batch_invariant(release, options) else (),
    )


def _columns(layer: ExpertLayer) -> int:
    return layer.latent_size or layer.hidden_size


def _check_sizes(layer: ExpertLayer, parallelism: Parallelism) -> None:
    at_least_one = {
        "--tp": parallelism.tp,
        "--ep": parallelism.ep,
        "--dp": parallelism.dp,
        "the number of experts": layer.num_experts,
        "topk": layer.topk,
        "the hidden size": _columns(layer),
        "the intermediate size": layer.intermediate_size,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ShardingError(f"{name} must be at least 1, not {value}")
    if parallelism.redundant_experts < 0:
        raise ShardingError(f"--redundant-experts must be 0 or more, not {parallelism.redundant_experts}")
    if layer.topk > layer.num_experts:
        raise ShardingError(f"topk {layer.topk} is more than the {layer.num_experts} experts")


def _local_experts(layer: ExpertLayer, parallelism: Parallelism, ep: int) -> int:
    total = layer.num_experts + parallelism.redundant_experts
    if ep == 1:
        if parallelism.redundant_experts:
            raise ShardingError(
                "vLLM holds redundant experts only with expert parallelism over more than one rank",
                "add --ep 2 (any value above 1 is --enable-expert-parallel), and --tp or --dp above 1",
            )
        return total
    if total % ep:
        base = total // ep
        fits = [ranks for ranks in range(2, _MAX_SUGGESTED_RANKS + 1) if total % ranks == 0]
        raise ShardingError(
            f"{total} experts over {ep} ranks (tp times dp) are uneven: some ranks would hold {base + 1} and "
            f"read one file, the others {base} and read another",
            f"values of tp times dp that divide {total}: {_listed(fits)}; or plan each kind of rank by "
            f"itself with --experts {base + 1} and --experts {base}",
        )
    return total // ep


def _split(
    release: Release, layer: ExpertLayer, parallelism: Parallelism, options: ServerOptions
) -> tuple[int, Quantization] | str:
    """N of one rank and the quantization after the scales were made to fit it; or why it cannot be."""
    tp = 1 if parallelism.ep > 1 else parallelism.tp * parallelism.dp
    if layer.intermediate_size % tp:
        ranks = f"--tp {parallelism.tp}" + (f" times --dp {parallelism.dp}" if parallelism.dp > 1 else "")
        return f"{ranks} does not divide the intermediate size {layer.intermediate_size}"
    N, quantization = layer.intermediate_size // tp, layer.quantization
    if quantization.dtype is Dtype.FP8_W8A8 and quantization.block_shape is not None:
        return _fit_blocks(release, layer, parallelism, options, tp)
    if quantization.dtype is Dtype.INT4_W4A16 and N % 2:
        return f"an odd intermediate size of {N} on one rank cannot hold int4 weights, two to a byte"
    if quantization.group_size and quantization.method in _HALVES_GROUPS:
        return _fit_groups(quantization, N, _columns(layer))
    return N, quantization


def _fit_groups(quantization: Quantization, N: int, K: int) -> tuple[int, Quantization] | str:
    group = quantization.group_size or 0
    while group >= _SMALLEST_BLOCK and (N % group or K % group):
        group //= 2
    if group < _SMALLEST_BLOCK:
        return (
            f"no group of {quantization.group_size} weights, halved down to {_SMALLEST_BLOCK}, divides both "
            f"the hidden size {K} and {N}, the intermediate size of one rank"
        )
    return N, replace(quantization, group_size=group)


def _fit_blocks(
    release: Release, layer: ExpertLayer, parallelism: Parallelism, options: ServerOptions, tp: int
) -> tuple[int, Quantization] | str:
    N, K, quantization = layer.intermediate_size // tp, _columns(layer), layer.quantization
    block_n, block_k = quantization.block_shape or (0, 0)
    if not (block_n and block_k):
        return N, quantization

    def exact(ranks: int) -> bool:
        return N % block_n == 0 and (ranks == 1 or N % block_k == 0)

    # The refinement looks at the ranks that split one expert, the refusal after it at --tp itself.
    refines = has(release, Change.FP8_BLOCK_REFINED) and quantization.method in _REFINES_BLOCKS
    if refines and not exact(tp):
        finest = math.gcd(block_n, block_k, N, K)
        if finest >= _SMALLEST_BLOCK:
            return N, replace(quantization, block_shape=(finest, finest))
        asked = has(release, Change.FP8_SHARD_PADDED) and options.moe_runner_backend != "auto"
        whole = block_n == block_k and layer.intermediate_size % block_n == 0 and K % block_n == 0
        if asked and whole and tp > 1 and not (layer.bias or options.enable_lora):
            return -(-N // block_n) * block_n, quantization
    if exact(parallelism.tp):
        return N, quantization
    return (
        f"the intermediate size of one rank, {N}, is no multiple of the fp8 block {block_n}x{block_k}: "
        f"vLLM {release_text(release)} stops with a ValueError while it loads the weights"
    )


def _fitting_tp(
    release: Release, layer: ExpertLayer, parallelism: Parallelism, options: ServerOptions
) -> list[int]:
    sizes = range(1, _MAX_SUGGESTED_RANKS + 1)
    return [
        tp
        for tp in sizes
        if not isinstance(_split(release, layer, replace(parallelism, tp=tp), options), str)
    ]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"

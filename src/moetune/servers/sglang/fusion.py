"""Which models run their shared expert as one more routed expert, by release: E and topk grow by it.

A table, not a chain: each rule was read in the model's own file of the sglang wheels, from the gate
that decides before the layers are built (`shared_experts_fusion_disable_reason` from 0.5.18,
`determine_num_fused_shared_experts` before).

What is not here does not fuse on an NVIDIA GPU by default: Qwen3.5 (only with AITER), Llama 4 (a
separate MLP), DeepSeek-V3.2 and Mistral Large 3 (their architecture is not the one that the gate
names), DeepSeek-V4 (only with --enforce-shared-experts-fusion), Step, Ling-1T, LLaDA2 (set to 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.quantization import Dtype

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Parallelism
    from moetune.domain.version import Release
    from moetune.servers.protocol import ServerOptions

# `is_deepep_class_backend` of 0.5.23 layers/moe/utils.py; before 0.5.11 `deepep` and `mori` alone,
# which changes nothing: each of them spreads the experts over all ranks, which ends fusion as well.
_DEEPEP_CLASS = frozenset({"deepep", "deepep_v2", "mooncake", "mori", "pplx"})
_MINIMUM_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class FusionRule:
    """When one architecture fuses its shared expert.

    Attributes:
        architectures: first entry of the checkpoint's `architectures`.
        since: first release with the rule.
        source: where it was read.
        until: first release without it, None while it holds.
        routed: the numbers of routed experts that are allowed, None for any.
        shared: the number of shared experts that is required, None for any.
        methods: the quantization methods that are required, None for any.
        refused: weights of the routed experts that the shared one does not have, each with the first
            release whose gate asks.
        with_expert_parallelism: also when the experts are spread over ranks.
        equal_size: only when the shared expert is as large as a routed one.
        refused_backends: all-to-all backends that end it; None: any at all.
        block_divides: block-wise scales must divide the sharded size, or it does not fuse.
        rocm_since: first release in which it also holds on MI300 (gfx942) and newer.
    """

    architectures: tuple[str, ...]
    since: Release
    source: str
    until: Release | None = None
    routed: tuple[int, ...] | None = None
    shared: int | None = 1
    methods: tuple[str, ...] | None = None
    refused: tuple[tuple[Dtype, Release], ...] = ()
    with_expert_parallelism: bool = False
    equal_size: bool = False
    refused_backends: frozenset[str] | None = _DEEPEP_CLASS
    block_divides: bool = False
    rocm_since: Release | None = None


_DEEPSEEK = "0.5.23 wheel, sglang/srt/models/deepseek_v2.py:shared_experts_fusion_disable_reason"
_DEEPSEEK_REFUSES = ((Dtype.INT4_W4AFP8, (0, 5, 2)), (Dtype.INT4_W4A16, (0, 5, 16)))
_GLM4 = "0.5.23 wheel, sglang/srt/models/glm4_moe.py:shared_experts_fusion_disable_reason"

RULES: tuple[FusionRule, ...] = (
    FusionRule(
        ("DeepseekV3ForCausalLM",),
        (0, 4, 9),
        _DEEPSEEK,
        routed=(256,),
        refused=_DEEPSEEK_REFUSES,
        rocm_since=(0, 5, 6),
    ),
    FusionRule(
        # Kimi-K2 and K2.5 (whose text config names DeepseekV3ForCausalLM), as Quark quantized it; the
        # gate that GLM-5 inherits allows the same.
        ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "GlmMoeDsaForCausalLM"),
        (0, 5, 13),
        _DEEPSEEK,
        routed=(384,),
        methods=("quark",),
        rocm_since=(0, 5, 13),
    ),
    FusionRule(
        ("GlmMoeDsaForCausalLM",),
        (0, 5, 9),
        "0.5.23 wheel, sglang/srt/models/glm4_moe.py:GlmMoeDsaForCausalLM.fused_shared_experts_architecture",
        routed=(256,),
        refused=_DEEPSEEK_REFUSES,
        rocm_since=(0, 5, 9),
    ),
    FusionRule(
        ("Glm4MoeForCausalLM",),
        (0, 5, 1),
        "0.5.1 to 0.5.4 wheels, sglang/srt/models/glm4_moe.py:determine_num_fused_shared_experts",
        until=(0, 5, 5),  # 0.5.5 has no fusion in that file
    ),
    FusionRule(
        ("Glm4MoeForCausalLM",),
        (0, 5, 6),
        _GLM4,
        refused=((Dtype.INT4_W4AFP8, (0, 5, 10)),),
        refused_backends=frozenset({"deepep", "mori"}),
        rocm_since=(0, 5, 10),
    ),
    FusionRule(
        # 0.5.2 to 0.5.4 ask for Glm4MoeForCausalLM here and so never fuse.
        ("Glm4vMoeForConditionalGeneration",),
        (0, 5, 6),
        "0.5.23 wheel, sglang/srt/models/glm4v_moe.py:shared_experts_fusion_disable_reason",
        refused_backends=frozenset({"deepep"}),
    ),
    FusionRule(
        ("Glm4MoeLiteForCausalLM",),
        (0, 5, 8),
        "0.5.23 wheel, sglang/srt/models/glm4_moe_lite.py:shared_experts_fusion_disable_reason",
        refused_backends=frozenset(),
    ),
    FusionRule(
        # MiniMaxM3ForCausalLM: how some copies of the checkpoint's config spell it.
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3ForCausalLM"),
        (0, 5, 16),
        "0.5.23 wheel, sglang/srt/models/minimax_m3.py:shared_experts_fusion_disable_reason",
        refused=((Dtype.NVFP4, (0, 5, 16)),),
        refused_backends=frozenset({"deepep"}),
    ),
    FusionRule(
        ("Qwen3NextForCausalLM",),
        (0, 5, 14),
        "0.5.23 wheel, sglang/srt/models/qwen2_moe.py:can_fuse_shared_expert, qwen3_next.py",
        shared=None,
        with_expert_parallelism=True,
        equal_size=True,
    ),
    FusionRule(
        ("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        (0, 5, 19),
        "0.5.23 wheel, sglang/srt/models/bailing_moe_v3.py:shared_experts_fusion_disable_reason",
        refused=((Dtype.INT4_W4AFP8, (0, 5, 19)),),
        with_expert_parallelism=True,
        equal_size=True,
        refused_backends=None,
        block_divides=True,
        rocm_since=(0, 5, 19),
    ),
    FusionRule(
        ("Glm5NextForConditionalGeneration",),
        (0, 5, 20),
        "0.5.23 wheel, sglang/srt/models/glm5_next.py:shared_experts_fusion_disable_reason",
        refused_backends=frozenset({"deepep"}),
    ),
    FusionRule(
        ("Dots3NoteForCausalLM",),
        (0, 5, 19),
        "0.5.23 wheel, sglang/srt/models/dots3_common/modeling.py:shared_experts_fusion_disable_reason",
        routed=(256,),
        refused=((Dtype.INT4_W4AFP8, (0, 5, 19)),),
        refused_backends=frozenset(),
    ),
)


def fused_shared_experts(
    release: Release, layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
) -> int:
    """How many shared experts become routed ones.

    Args:
        release: of the server.
        layer: the expert layer.
        parallelism: with the expert-parallel size that the server ends up with.
        gpu: the GPU.
        options: the server's flags.
    """
    shared = _shared_count(layer)
    if options.disable_shared_experts_fusion or not shared:
        return 0
    fuses = any(_holds(rule, release, layer, parallelism, gpu, options) for rule in RULES)
    return shared if fuses else 0


def _holds(
    rule: FusionRule,
    release: Release,
    layer: ExpertLayer,
    parallelism: Parallelism,
    gpu: Gpu,
    options: ServerOptions,
) -> bool:
    quantization = layer.quantization
    backend = options.moe_a2a_backend
    checks = (
        layer.architecture in rule.architectures,
        rule.since <= release and (rule.until is None or release < rule.until),
        _gpu_is_allowed(rule, release, gpu),
        rule.routed is None or layer.num_experts in rule.routed,
        rule.shared is None or _shared_count(layer) == rule.shared,
        rule.methods is None or quantization.method in rule.methods,
        not _is_refused(rule, release, quantization.dtype),
        rule.with_expert_parallelism or parallelism.ep == 1,
        not rule.equal_size or _shared_size(layer) == layer.intermediate_size,
        backend == "none" or (rule.refused_backends is not None and backend not in rule.refused_backends),
        not rule.block_divides or _block_divides(layer, parallelism),
    )
    return all(checks)


def _gpu_is_allowed(rule: FusionRule, release: Release, gpu: Gpu) -> bool:
    if gpu.vendor == "NVIDIA":
        return gpu.compute_capability is None or gpu.compute_capability >= _MINIMUM_CAPABILITY
    if gpu.vendor == "AMD" and rule.rocm_since is not None:
        # gfx942 is what torch calls capability 9.4.
        return release >= rule.rocm_since and (gpu.gfx or "") >= "gfx942"
    return False


def _is_refused(rule: FusionRule, release: Release, dtype: Dtype) -> bool:
    return any(dtype is refused and release >= since for refused, since in rule.refused)


def _shared_count(layer: ExpertLayer) -> int:
    """Count the shared experts; some checkpoints give the size of their one and no count.

    Source: 0.5.23 wheel, sglang/srt/models/qwen2_moe.py:get_num_shared_experts.
    """
    return layer.num_shared_experts or int(bool(layer.shared_intermediate_size))


def _shared_size(layer: ExpertLayer) -> int:
    return layer.shared_intermediate_size or layer.intermediate_size * _shared_count(layer)


def _block_divides(layer: ExpertLayer, parallelism: Parallelism) -> bool:
    block = layer.quantization.block_shape
    if block is None:
        return True
    size = layer.intermediate_size // max(1, parallelism.tp // parallelism.ep)
    return all(size % edge == 0 for edge in block if edge)

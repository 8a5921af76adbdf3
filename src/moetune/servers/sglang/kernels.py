"""Where each release of SGLang keeps its fused-MoE kernels, and what those alone take as parameters.

Source: the sglang wheels 0.4.9, 0.5.1 to 0.5.6, 0.5.9 to 0.5.16, 0.5.18, 0.5.20, 0.5.23: the module that
defines `fused_moe_kernel`, and `invoke_fused_moe_kernel` in it, which launches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.servers.kernel_values import Descriptor, Part, Value, bias_values, divides

if TYPE_CHECKING:
    from moetune.domain.compilation import CompileTask
    from moetune.domain.version import Release
    from moetune.servers.sglang.releases import Rules

# Below site-packages, newest first.
_FILES: tuple[tuple[Release, str], ...] = (
    ((0, 5, 16), "sglang/kernels/ops/moe/fused_moe_triton_kernels.py"),
    ((0, 5, 11), "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_kernels.py"),
    ((0, 5, 2), "sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py"),
    ((0, 0), "sglang/srt/layers/moe/fused_moe_triton/fused_moe.py"),
)


def kernel_files(rules: Rules) -> tuple[str, ...]:
    """Paths below site-packages: that of the release, then those of others, which it may have come from."""
    mine = next(path for since, path in _FILES if rules.at_least(since))
    return (mine, *(path for _, path in _FILES if path != mine))


def own_values(task: CompileTask) -> dict[str, Value]:
    """The parameters that vLLM's kernels do not have; off is what plain serving leaves off.

    `filter_expert` is False where all experts are on the rank (`fused_moe.py`, `moe_runner/triton.py`).
    LoRA's parameters (`add_mask_ptr`, `FUSE_ADD_TO_OUTPUT`, `MASK_OUTPUT`, `LORA_PRESERVE_BASE`,
    `A_OUTPUT_*`) and `FUSE_SWIGLU`, for weights that were interleaved when they were loaded, are off.
    """
    return {
        **bias_values(task, "bias_ptr", "stride_bias_e", "stride_bias_n"),
        **_descriptors(task),
        "add_mask_ptr": None,
        "even_Ks": divides(task),
        "swap_ab": task.launch.swap_ab,
        "c_sorted": task.launch.sorted_output,
        "filter_expert": task.elsewhere,
        "FUSE_SUM_ALL_REDUCE": task.launch.sum_topk > 0,
        "ROUTER_TOPK": task.launch.sum_topk or 1,
        "USE_GDC": task.launch.pdl,
        "GDC_EARLY": task.launch.pdl and task.pdl_early,
        "FUSE_ADD_TO_OUTPUT": False,
        "MASK_OUTPUT": False,
        "LORA_PRESERVE_BASE": False,
        "FUSE_SWIGLU": False,
        "A_OUTPUT_SLICES": 1,
        "A_OUTPUT_SLICE_WIDTH": 0,
        "A_OUTPUT_SLICE_K": 0,
    }


def _descriptors(task: CompileTask) -> dict[str, Value]:
    """Those of a config with USE_TMA; the weights' tile is of one expert."""
    launch, config = task.launch, task.launch.config
    m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
    weights = Descriptor(Part.WEIGHTS, task.weight_type or task.operand_type, (1, n, k))
    return {
        "a_desc": Descriptor(Part.ACTIVATIONS, task.operand_type, (m, k)) if launch.sorted_input else None,
        "b_desc": weights if launch.weights_by_tma else None,
    }

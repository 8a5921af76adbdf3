"""Where vLLM keeps its fused-MoE kernels, and what those alone take as parameters.

Source: the vllm wheels 0.10.2, 0.11.0, 0.11.1, 0.12.0, 0.13.0, 0.20.0, 0.27.1 and 0.33.0: `fused_moe.py`
holds the kernels and what launches them (`invoke_fused_moe_triton_kernel`,
`invoke_fused_moe_wna16_triton_kernel`; before 0.14 `invoke_fused_moe_kernel`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.domain.kernel_format import Scales
from moetune.servers.kernel_values import Value, bias_values, divides

if TYPE_CHECKING:
    from moetune.domain.compilation import CompileTask
    from moetune.domain.version import Release

FILES = ("vllm/model_executor/layers/fused_moe/fused_moe.py",)
"""Below site-packages, the same in all releases."""


_EXPERT_STRIDE_OF_ONE_DIMENSION: Release = (0, 28, 0)
"""0.27.1 gives 0 as the stride of scales that have one dimension, 0.33.0 what it is."""


def own_values(release: Release, task: CompileTask) -> dict[str, Value]:
    """The parameters that SGLang's kernels do not have.

    Where each slot is a block of its own there are no sorted ids. `USE_TD` is on with
    `VLLM_TRITON_USE_TD=1` only (`utils.py:resolve_moe_use_td`).
    """
    replaced: dict[str, Value] = {"sorted_token_ids_ptr": None} if task.slots_alone else {}
    if task.scales is Scales.TENSOR and release >= _EXPERT_STRIDE_OF_ONE_DIMENSION:
        replaced["stride_bse"] = 1
    return {
        **bias_values(task, "b_bias_ptr", "stride_bbe", "stride_bbn"),
        **replaced,
        "naive_block_assignment": task.slots_alone,
        "block_k_diviable": divides(task),
        "SPLIT_K": 1,
        "HAS_BIAS": task.bias,
        "SWAP_AB": task.launch.swap_ab,
        "USE_TD": False,
    }

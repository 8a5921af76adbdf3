"""What changed in vLLM's fused-MoE Triton path, and in which release.

Read in the published wheels of every release named in `_SINCE` and of its predecessor. Paths in the
sources are below `vllm/model_executor/layers/fused_moe/` unless they begin with `vllm/`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError
from moetune.domain.version import Release, parse_release

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST = "0.10.2"
NEWEST = "0.33.0"
DIRECTORY_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"


class Change(Enum):
    """A change of behaviour; the value is only its name."""

    TRITON_VERSION_KEY = "the loader drops a triton_version key"
    H200_FOLDED = "a device name with the word H200 becomes NVIDIA_H200"
    SPLIT_K = "the kernels take SPLIT_K, and the plain one overwrites it with 1"
    BATCH_INVARIANT = "batch-invariant mode opens no file"
    OCP_MX_UNTAGGED = "emulated OCP-MX weights have no dtype tag"
    ALIGNED_LENGTH_CAPPED = "the padded length is capped when there are fewer rows than experts"
    CANDIDATES_JOINED = "the warning joins the paths with a comma"
    WNA16_K_DIVIDES = "the heuristic of the grouped int4 kernel keeps BLOCK_SIZE_K a divisor of K"
    FP8_W8A16_TAG = "weight-only fp8 has a dtype tag"
    NAIVE_FUNCTIONAL = "fused_experts() skips the alignment of few rows"
    DEFAULTS_SCALE_WITH_M = "the default configs scale with m"
    NAIVE_MODULAR = "TritonExperts skips the alignment of few rows"
    OCP_MX_UNPACKED = "emulated OCP-MX weights are unpacked before the lookup"
    MXFP8_EMULATED = "MXFP8 weights are emulated on the Triton kernel"
    SWAP_AB = "fp8 on compute capability 9.0 computes small tiles transposed"
    NARROW_FP8_BLOCK_DEFAULT = "the block-fp8 default is 64 columns wide for few rows"
    DEVICE_NAME_REGEX = "runs of white space and slashes in a device name become one underscore"
    WNA16_POWER_OF_TWO = "the default BLOCK_SIZE_M of the grouped int4 kernel is a power of two"
    WNA16_TRITON_ONLY = "grouped int4 and int8 weights always use the Triton kernel"
    TENSOR_DESCRIPTORS = "the kernel has a USE_TD parameter"
    FP8_BLOCK_REFINED = "fp8 block scales are refined when the shard does not divide"
    FP8_SHARD_PADDED = "with --moe-backend the fp8 shard is padded when it cannot be refined"


_SINCE: Mapping[Change, tuple[Release, str]] = {
    Change.TRITON_VERSION_KEY: ((0, 11, 0), "fused_moe.py:get_moe_configs"),
    Change.H200_FOLDED: ((0, 11, 1), "fused_moe.py:get_config_file_name"),
    Change.SPLIT_K: ((0, 11, 1), "fused_moe.py:invoke_fused_moe_kernel"),
    Change.BATCH_INVARIANT: ((0, 11, 1), "fused_moe.py:get_moe_configs"),
    Change.OCP_MX_UNTAGGED: ((0, 11, 1), "config.py:_get_config_dtype_str"),
    Change.ALIGNED_LENGTH_CAPPED: ((0, 13, 0), "moe_align_block_size.py:moe_align_block_size"),
    Change.CANDIDATES_JOINED: ((0, 13, 0), "fused_moe.py:get_moe_configs"),
    Change.WNA16_K_DIVIDES: ((0, 13, 0), "fused_moe.py:get_moe_wna16_block_config"),
    Change.FP8_W8A16_TAG: ((0, 14, 0), "config.py:_get_config_dtype_str"),
    Change.NAIVE_FUNCTIONAL: ((0, 14, 0), "fused_moe.py:fused_experts_impl"),
    Change.DEFAULTS_SCALE_WITH_M: ((0, 17, 0), "fused_moe.py:get_default_config"),
    Change.NAIVE_MODULAR: ((0, 20, 0), "fused_moe.py:TritonExperts.apply"),
    Change.OCP_MX_UNPACKED: ((0, 20, 0), "experts/ocp_mx_emulation_moe.py"),
    Change.MXFP8_EMULATED: ((0, 24, 0), "experts/mxfp8_emulation_moe.py"),
    Change.SWAP_AB: ((0, 25, 0), "utils.py:enable_swap_ab"),
    Change.NARROW_FP8_BLOCK_DEFAULT: ((0, 25, 0), "fused_moe.py:get_default_config"),
    Change.DEVICE_NAME_REGEX: ((0, 26, 0), "vllm/utils/platform_utils.py:get_device_name_as_file_name"),
    Change.WNA16_POWER_OF_TWO: ((0, 27, 0), "fused_moe.py:get_default_config"),
    Change.WNA16_TRITON_ONLY: ((0, 27, 0), "oracle/int_wna16.py"),
    Change.TENSOR_DESCRIPTORS: ((0, 27, 0), "fused_moe.py:fused_moe_kernel"),
    Change.FP8_BLOCK_REFINED: ((0, 29, 0), "oracle/fp8.py:refine_fp8_moe_block_shape"),
    Change.FP8_SHARD_PADDED: ((0, 31, 0), "oracle/fp8.py:pad_tp_shard_to_weight_blocks"),
}

# torch that a release pins (METADATA of its wheel) and the Triton that this torch pins (its own
# METADATA; 2.8.0, 2.9.0 and 2.10.0 from the releases' notes).
_TRITON: tuple[tuple[Release, str], ...] = (
    ((0, 33, 0), "3.8.0"),
    ((0, 27, 0), "3.7.1"),
    ((0, 20, 0), "3.6.0"),
    ((0, 14, 0), "3.5.1"),
    ((0, 11, 1), "3.5.0"),
    ((0, 10, 2), "3.4.0"),
)


def has(release: Release, change: Change) -> bool:
    """Whether a release has a change."""
    return release >= _SINCE[change][0]


def rule_source(change: Change) -> str:
    """Where a rule was read, and since which release it holds."""
    since, path = _SINCE[change]
    return f"vllm {'.'.join(map(str, since))} wheel, {path}"


def resolve(version: str | None) -> tuple[Release, bool]:
    """The release whose rules hold for a version.

    Returns:
        The release, and whether it is assumed: newer than all whose rules were read.

    Raises:
        ServerError: for a version older than all whose rules were read, or no version at all.
    """
    newest = parse_release(NEWEST)
    if version is None:
        return newest, False
    release = (*parse_release(version), 0, 0)[:3]
    if release < parse_release(OLDEST):
        raise ServerError(
            f"vLLM {version.strip()[:40]} is older than {OLDEST}, the first whose rules are known here",
            f"upgrade vLLM, or say --server-version {OLDEST} to plan for that release",
        )
    return (newest, True) if release > newest else (release, False)


def default_triton(release: Release) -> str:
    """The Triton that comes with a release when nothing else is said."""
    return next(version for since, version in _TRITON if release >= since)

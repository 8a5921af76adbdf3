"""File names of tuned configs as vLLM spells them.

Sources: `fused_moe.py:get_config_file_name`, `config.py:_get_config_dtype_str`,
`vllm/utils/platform_utils.py:get_device_name_as_file_name` (paths as in rules.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moetune.domain.errors import ServerError
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.text import printable
from moetune.servers.vllm.rules import Change, has

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.gpu import Gpu
    from moetune.domain.problem import Problem
    from moetune.domain.version import Release

# The tag of the file name for each weight type that this kernel runs; None: it has none.
_TAGS: Mapping[Dtype, str | None] = {
    Dtype.BF16: None,
    Dtype.FP16: None,
    Dtype.FP32: "float32",
    Dtype.FP8_W8A8: "fp8_w8a8",
    Dtype.FP8_W8A16: "fp8_w8a16",
    Dtype.INT8_W8A8: None,
    Dtype.INT8_W8A16: "int8_w8a16",
    Dtype.INT4_W4A16: "int4_w4a16",
    Dtype.MXFP4: None,
    Dtype.MXFP8: None,
}
_TAGGED_SINCE: Mapping[Dtype, Change] = {
    Dtype.FP8_W8A16: Change.FP8_W8A16_TAG,
    Dtype.MXFP8: Change.MXFP8_EMULATED,
}
_PLAIN = frozenset({Dtype.BF16, Dtype.FP16, Dtype.FP32})
# Weight types whose block scales reach the lookup; grouped w*a16 hands it [0, group], which is left out.
_BLOCK_SCALED = frozenset({Dtype.FP8_W8A8, Dtype.FP8_W8A16, Dtype.INT8_W8A8})

_DEVICE = re.compile(r"[\w()\[\].+@#&'-]{1,128}", re.ASCII)
_FILE = re.compile(
    r"E=(?P<E>\d{1,9}),N=(?P<N>\d{1,9}),device_name=(?P<device>[^,/\\\n]{1,200})"
    r"(?P<dtype>,dtype=[^,\n]{0,64})?(?P<block>,block_shape=\[[^\]\n]{0,64}\])?(?P<rest>[^\n]{0,200})\.json"
)
_BLOCK = re.compile(r"\[([1-9]\d{0,8}),([1-9]\d{0,8})\]")


def spell_device(release: Release, torch_name: str) -> str:
    """A GPU's name as this release writes it into file names."""
    if has(release, Change.DEVICE_NAME_REGEX):
        name = re.sub(r"[\s/]+", "_", torch_name)
    else:
        name = torch_name.replace(" ", "_")
    if has(release, Change.H200_FOLDED) and "H200" in name.split("_"):
        return "NVIDIA_H200"
    return name


def device_name(release: Release, gpu: Gpu) -> str:
    """A GPU's name in the file names of this release.

    On NVIDIA vLLM asks NVML for the device with the physical index (`vllm/platforms/cuda.py`): a MIG slice
    has the whole GPU's name there, without the profile that torch appends. (Inferred, not run on a slice.)
    """
    name = gpu.torch_name
    if gpu.vendor == "NVIDIA" and gpu.mig_slice:
        name = name.removesuffix(f" MIG {gpu.mig_slice}")
    return spell_device(release, name)


def dtype_tag(release: Release, quantization: Quantization, activation: Dtype) -> str | None:
    """The dtype tag of the file name; None where this release writes none.

    Raises:
        ServerError: for a weight type that never reaches this kernel.
    """
    dtype = quantization.dtype
    if dtype in _PLAIN:
        return _TAGS[Dtype.FP32 if Dtype.FP32 in (dtype, activation) else dtype]
    if dtype is Dtype.MXFP4 and not has(release, Change.OCP_MX_UNTAGGED):
        return "mxfp4_w4a4"
    since = _TAGGED_SINCE.get(dtype)
    if dtype not in _TAGS or (since is not None and not has(release, since)):
        raise ServerError(
            f"vLLM {'.'.join(map(str, release))} has no name for a tuned file of {dtype.value} experts: "
            "other kernels run them",
            "see what runs them with: moetune plan MODEL --server vllm",
        )
    return _TAGS[dtype]


def named_block_shape(quantization: Quantization) -> tuple[int, int] | None:
    """The block shape that stands in the file name, None without."""
    block = quantization.block_shape
    if quantization.dtype not in _BLOCK_SCALED or block is None or not all(block):
        return None
    return block


def build_file_name(E: int, N: int, device: str, tag: str | None, block: tuple[int, int] | None) -> str:
    """Put a file name together.

    Raises:
        ServerError: when a field cannot stand in the name of one file.
    """
    if not _DEVICE.fullmatch(device):
        raise ServerError(
            f"the device name {printable(device)!r} cannot stand in a file name",
            "give the GPU's name as torch.cuda.get_device_name() returns it",
        )
    if E < 1 or N < 1:
        raise ServerError(f"E={E} and N={N} must both be at least 1 in a file name")
    dtype = f",dtype={tag}" if tag else ""
    shape = f",block_shape=[{block[0]},{block[1]}]" if block else ""
    return f"E={E},N={N},device_name={device}{dtype}{shape}.json"


def file_name(release: Release, problem: Problem) -> str:
    """Name of the one file that this release looks for, for both kernels."""
    return build_file_name(
        problem.E,
        problem.file_n,
        device_name(release, problem.gpu),
        dtype_tag(release, problem.quantization, problem.activation_dtype),
        named_block_shape(problem.quantization),
    )


def why_never_read(release: Release, name: str) -> str | None:
    """Why this release can never look for a file of that name; None when it can.

    Args:
        release: the release.
        name: the bare file name.
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return "vLLM's names have the form E=..,N=..,device_name=..[,dtype=..][,block_shape=[n,k]].json"
    return next((reason for reason in _reasons(release, match) if reason is not None), None)


def _reasons(release: Release, match: re.Match[str]) -> tuple[str | None, ...]:
    device, dtype, block, rest = match["device"], match["dtype"], match["block"], match["rest"]
    return (
        _leading_zero(match["E"]) or _leading_zero(match["N"]),
        _odd_device(release, device),
        _odd_tag(release, dtype),
        _odd_block(block),
        _odd_rest(rest),
    )


def _leading_zero(digits: str) -> str | None:
    return "vLLM writes whole numbers above 0, without leading zeros" if digits.startswith("0") else None


def _odd_device(release: Release, device: str) -> str | None:
    spelled = spell_device(release, device)
    if spelled != device:
        return f"this release of vLLM spells that device {printable(spelled)}"
    if not _DEVICE.fullmatch(device):
        return "no device that vLLM knows has such a name"
    return None


def _odd_tag(release: Release, part: str | None) -> str | None:
    if part is None:
        return None
    tags = sorted(_known_tags(release))
    if part.removeprefix(",dtype=") in tags:
        return None
    return f"this release of vLLM never writes {printable(part[1:])}; its tags are {', '.join(tags)}, or none"


def _known_tags(release: Release) -> set[str]:
    tags: set[str] = set()
    for dtype in _TAGS:
        try:
            tag = dtype_tag(release, Quantization(dtype), Dtype.BF16)
        except ServerError:
            continue
        if tag is not None:
            tags.add(tag)
    return tags


def _odd_block(part: str | None) -> str | None:
    if part is None:
        return None
    shape = part.removeprefix(",block_shape=")
    if " " in shape and _BLOCK.fullmatch(shape.replace(" ", "")):
        return f"vLLM writes block_shape without a space: {printable(shape.replace(' ', ''))}"
    if not _BLOCK.fullmatch(shape):
        return "vLLM writes block_shape as two whole numbers above 0, or leaves it out"
    return None


def _odd_rest(rest: str) -> str | None:
    if not rest:
        return None
    if rest == "_down":
        return "vLLM reads one file for both kernels, never a _down file"
    if "per_channel_quant" in rest:
        return "vLLM writes no per_channel_quant part"
    if rest == ",backend=flydsl":
        return "only the FlyDSL kernel of ROCm reads it, never the Triton kernel"
    return f"vLLM never writes {printable(rest)!r}"

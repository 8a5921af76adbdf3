"""vLLM's config files as JSON: what its loader and its launch take, and what they die of.

Sources: `fused_moe.py:get_moe_configs`, `invoke_fused_moe_triton_kernel`, `fused_moe_kernel`,
`fused_moe_kernel_gptq_awq` (paths as in rules.py); the options of Triton's backends
(`triton/backends/*/compiler.py`, wheels 3.4.0 to 3.8.0); `tl.arange` and `tl.dot` of the same.

An entry of the grouped int4 and int8 kernels may leave BLOCK_SIZE_N and BLOCK_SIZE_K to vLLM, which then
fills in what it does without a file (`get_moe_wna16_block_config`). It is read as the config of the up
kernel, and written so where vLLM's CUDA kernel runs and is to do what it does without a file.

Refused although the server would take them: what no tuned file holds and what hostile files would
(megabytes, deep nesting, Triton options that name files or change numbers).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.domain.quantization import Dtype
from moetune.domain.safe_json import JsonLimits, read_json_object
from moetune.domain.text import printable
from moetune.domain.version import Release, parse_release, release_text
from moetune.servers.vllm.defaults import (
    cuda_kernel_entry,
    cuda_kernel_until,
    filled_tile,
    is_grouped,
    needs_split_k,
)
from moetune.servers.vllm.rules import Change, has

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.problem import Problem

_LIMITS = JsonLimits(max_bytes=1 << 20, max_depth=8, max_digits=32)
_REQUIRED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
_FILLED = ("BLOCK_SIZE_N", "BLOCK_SIZE_K")
# What the launch raises for a number that is none (tl.arange, CUDAOptions).
_POWERS_OF_TWO = {
    "BLOCK_SIZE_M": "CompilationError",
    "BLOCK_SIZE_N": "CompilationError",
    "BLOCK_SIZE_K": "CompilationError",
    "num_warps": "AssertionError",
}
_EIGHT_BITS = frozenset({Dtype.FP8_W8A8, Dtype.INT8_W8A8})
_MAX_WARPS = 32  # 1,024 threads
# Triton whose tl.dot pads tiles of fewer than 16 rows or columns (nvidia/compiler.py:min_dot_size).
_SMALL_TILES_SINCE: Release = (3, 5)


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of Triton's backends that a config may set.

    Attributes:
        kind: the type of its value.
        vendors: the GPUs whose backend knows it.
        least: smallest value of a number.
    """

    kind: type
    vendors: frozenset[str]
    least: int = 0


_ALL = frozenset({"NVIDIA", "AMD", "Intel"})
_AMD, _NVIDIA, _INTEL = frozenset({"AMD"}), frozenset({"NVIDIA"}), frozenset({"Intel"})
_OPTIONS: Mapping[str, _Option] = {
    "num_warps": _Option(int, _ALL, 1),
    "num_stages": _Option(int, _ALL),
    "num_ctas": _Option(int, _ALL, 1),
    "maxnreg": _Option(int, _NVIDIA, 1),
    "enable_fp_fusion": _Option(bool, _NVIDIA | _AMD),
    "launch_cooperative_grid": _Option(bool, _NVIDIA | _AMD),
    "launch_pdl": _Option(bool, _NVIDIA),
    "waves_per_eu": _Option(int, _AMD),
    "matrix_instr_nonkdim": _Option(int, _AMD),
    "kpack": _Option(int, _AMD, 1),
    "grf_mode": _Option(str, _INTEL),
}
# Further options that a launch would take; some name files, some change numbers, no tuned file has them.
_REFUSED = (
    "arch allow_flush_denorm allowed_dot_input_precisions backend_name cluster_dims debug "
    "default_dot_input_precision deprecated_fp8_dot_operand_dtypes enable_reflect_ftz extern_libs "
    "instrumentation_mode ir_override llvm_fn_attrs max_num_imprecise_acc_default ptx_options ptx_version "
    "sanitize_overflow schedule_hint supported_fp8_dtypes warp_size"
)
_REFUSED_OPTIONS = frozenset(_REFUSED.split())
# Parameters of the kernels that the launch fills itself: a second value is a TypeError, not a KeyError.
_POINTERS = "a b c b_bias a_scale b_scale topk_weights sorted_token_ids expert_ids num_tokens_post_padded"
_STRIDES = "am ak be bk bn cm cn asm ask bse bsk bsn bbe bbn"
_SIZES = "N K EM num_valid_tokens group_n group_k top_k"
_FLAGS = "use_fp8_w8a8 use_int8_w8a8 use_int8_w8a16 per_channel_quant HAS_BIAS MUL_ROUTED_WEIGHT compute_type"
_ARGUMENTS: Mapping[str, Change | None] = {
    **dict.fromkeys(f"{name}_ptr" for name in _POINTERS.split()),
    **dict.fromkeys(f"stride_{name}" for name in _STRIDES.split()),
    **dict.fromkeys([*_SIZES.split(), *_FLAGS.split(), "grid", "warmup"]),
    "naive_block_assignment": Change.NAIVE_FUNCTIONAL,
    "SWAP_AB": Change.SWAP_AB,
    "USE_TD": Change.TENSOR_DESCRIPTORS,
}


# What is written of such an entry: down's tile is another one than up's, and each launch fills in its own.
_LEFT_TO_VLLM = ("BLOCK_SIZE_M", "GROUP_SIZE_M", "SPLIT_K")


def allowed_keys(release: Release, problem: Problem) -> frozenset[str]:
    """JSON keys of an entry that a release accepts on the problem's GPU."""
    options = {name for name, option in _OPTIONS.items() if problem.gpu.vendor in option.vendors}
    return frozenset({*_REQUIRED, *options, *(("SPLIT_K",) if has(release, Change.SPLIT_K) else ())})


def read_table(
    release: Release, triton: Release, text: str, source: str, problem: Problem | None = None
) -> ConfigTable:
    """Read a config file as a release would.

    Args:
        release: the release.
        triton: the Triton that it runs with.
        text: the file's text.
        source: the file's name, for the message.
        problem: when given, also what depends on it: the GPU's own keys and the kernel's SPLIT_K.

    Raises:
        ConfigFileError: where the loader or a launch would fail, with the server's exception.
    """
    reader = _Reader(release, triton, printable(source, 400), problem)
    try:
        document = read_json_object(text, source, _LIMITS, ConfigFileError).value
    except ConfigFileError as error:
        raise reader.failure(error.message, _loader_exception(release, text), error.hint) from None
    if has(release, Change.TRITON_VERSION_KEY):
        document.pop("triton_version", None)
    entries: dict[int, KernelConfig] = {}
    for key, entry in document.items():
        m = reader.m(key)
        entries[m] = reader.entry(m, key, entry)
    return ConfigTable(tuple(entries.items()))


def render_table(release: Release, triton_version: str, problem: Problem, table: ConfigTable) -> str:
    """The JSON text of a table, in the shape of vLLM's own tuning script.

    Raises:
        ConfigFileError: when the release would die of what the table holds.
    """
    split_k = needs_split_k(release, problem)
    allowed = allowed_keys(release, problem)
    until = cuda_kernel_until(release, problem)
    document: dict[str, object] = {}
    if has(release, Change.TRITON_VERSION_KEY):
        document["triton_version"] = triton_version
    for m, config in sorted(table.entries):
        entry = _entry_of(config, split_k=split_k)
        if 1 <= m <= until and config == cuda_kernel_entry(release, problem, m):
            entry = {key: entry[key] for key in _LEFT_TO_VLLM if key in entry}
        refused = sorted(set(entry) - allowed)
        if config.use_tma or refused:
            keys = ", ".join([*(["USE_TMA"] if config.use_tma else []), *map(printable, refused)])
            raise ConfigFileError(
                f"the config for m={m} sets {keys}, which vLLM {release_text(release)} refuses with a "
                f"KeyError on {printable(problem.gpu.torch_name)}",
                "leave it out: the file is one for another server or another vendor's GPU",
            )
        document[str(m)] = entry
    text = json.dumps(document, indent=4) + "\n"
    # What would kill the server is not written, wherever it came from.
    read_table(release, parse_release(triton_version), text, "the table to write", problem)
    return text


def _entry_of(config: KernelConfig, *, split_k: bool) -> dict[str, int | bool | str]:
    extra = {key: value for key, value in config.extra if key != "SPLIT_K"}
    entry: dict[str, int | bool | str] = {
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
    }
    if split_k:
        entry["SPLIT_K"] = 1
    return (
        entry | {"num_warps": config.num_warps, "num_stages": config.num_stages} | dict(sorted(extra.items()))
    )


def _loader_exception(release: Release, text: str) -> str | None:
    """What `json.load` and the loader's next step raise; None when only our limits refuse the text."""
    if len(text) > _LIMITS.max_bytes:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return "JSONDecodeError"
    except (ValueError, RecursionError) as error:
        return type(error).__name__
    if isinstance(value, dict):
        return None
    # list.pop("triton_version", None) has one argument too many; other types have no such method.
    pops_a_list = isinstance(value, list) and has(release, Change.TRITON_VERSION_KEY)
    return "TypeError" if pops_a_list else "AttributeError"


class _Reader:
    """The rules of one file: all messages name it, the key and the server's exception."""

    def __init__(self, release: Release, triton: Release, source: str, problem: Problem | None) -> None:
        self._release = release
        self._triton = triton
        self._source = source
        self._problem = problem
        self._until = 0 if problem is None else cuda_kernel_until(release, problem)

    def failure(self, message: str, exception: str | None, hint: str | None = None) -> ConfigFileError:
        server = f" (vLLM {release_text(self._release)}: {exception})" if exception else ""
        return ConfigFileError(f"{message}{server}", hint)

    def m(self, key: str) -> int:
        try:
            return int(key)
        except ValueError:
            hint = None
            if key == "triton_version":
                hint = "this release reads no such key: remove it, or upgrade to vLLM 0.11.0"
            raise self._error(
                f"the key {printable(key, 40)!r} is no whole number", "ValueError", hint
            ) from None

    def entry(self, m: int, key: str, entry: object) -> KernelConfig:
        where = f"the entry {printable(key, 40)!r}"
        if not isinstance(entry, dict):
            raise self._error(f"{where} is no object", "TypeError")
        self._check_keys(where, entry)
        for name, value in entry.items():
            self._check_value(where, m, name, value)
        options = {name: value for name, value in entry.items() if name not in _REQUIRED}
        block_n, block_k = self._tile(m, entry)
        return KernelConfig(
            block_size_m=entry["BLOCK_SIZE_M"],
            block_size_n=block_n,
            block_size_k=block_k,
            group_size_m=entry["GROUP_SIZE_M"],
            num_warps=options.pop("num_warps", 4),
            num_stages=options.pop("num_stages", 3),
            extra=tuple(sorted((name, value) for name, value in options.items() if value is not None)),
        )

    def _fills(self) -> bool:
        """Whether the launch fills in a tile that an entry lacks."""
        return self._problem is not None and is_grouped(self._problem)

    def _tile(self, m: int, entry: Mapping[str, int]) -> tuple[int, int]:
        if self._problem is None or not self._fills() or all(name in entry for name in _FILLED):
            return entry["BLOCK_SIZE_N"], entry["BLOCK_SIZE_K"]
        return filled_tile(self._release, self._problem, max(m, 1), entry["BLOCK_SIZE_M"])

    def _error(self, message: str, exception: str, hint: str | None = None) -> ConfigFileError:
        return self.failure(f"{self._source}: {message}", exception, hint)

    def _check_keys(self, where: str, entry: Mapping[str, object]) -> None:
        for name in _REQUIRED:
            if name not in entry and not (name in _FILLED and self._fills()):
                # The launch reads M and K itself; the others are parameters that nothing fills.
                exception = "KeyError" if name in ("BLOCK_SIZE_M", "BLOCK_SIZE_K") else "TypeError"
                raise self._error(f"{where} lacks {name}", exception)
        if (
            self._problem is not None
            and needs_split_k(self._release, self._problem)
            and "SPLIT_K" not in entry
        ):
            raise self._error(
                f"{where} lacks SPLIT_K, which the grouped int4 and int8 kernel requires",
                "TypeError",
                'add "SPLIT_K": 1 to every entry',
            )
        for name in entry:
            if not self._accepts(name):
                raise self._unknown(where, name)

    def _unknown(self, where: str, name: str) -> ConfigFileError:
        shown = printable(name, 40)
        if name in _REFUSED_OPTIONS:
            message = f"{self._source}: {where} sets {shown}, an option of Triton that no tuned file may set"
            return self.failure(message, None)
        since = _ARGUMENTS.get(name)
        filled = name in _ARGUMENTS and (since is None or has(self._release, since))
        exception = "TypeError" if filled else "KeyError"
        return self._error(f"{where} has the key {shown!r}, which the kernel does not take", exception)

    def _accepts(self, name: str) -> bool:
        if self._problem is not None:
            return name in allowed_keys(self._release, self._problem)
        return (
            name in _REQUIRED
            or name in _OPTIONS
            or (name == "SPLIT_K" and has(self._release, Change.SPLIT_K))
        )

    def _check_value(self, where: str, m: int, name: str, value: object) -> None:
        option = _OPTIONS.get(name)
        if name == "maxnreg" and value is None:
            return
        kind = option.kind if option else int
        # bool is a subclass of int: true is no tile size.
        if type(value) is not kind:
            raise self._error(
                f"{where} has {name} = {printable(repr(value), 40)}, which is not of type {kind.__name__}",
                "TypeError",
            )
        if isinstance(value, int) and kind is int:
            self._check_number(f"{where} has {name} = {value}", m, name, value)

    def _check_number(self, what: str, m: int, name: str, value: int) -> None:
        # Which entry Triton's kernel meets between the keys is a question to the whole table.
        compiled = name in _POWERS_OF_TWO and not 1 <= m <= self._until
        if compiled and (value < 1 or value & (value - 1)):
            raise self._error(f"{what}, which is no power of two", _POWERS_OF_TWO[name])
        least = self._least(name) if compiled or name not in _POWERS_OF_TWO else 1
        if value < least:
            exception = "CompilationError" if name in _POWERS_OF_TWO else "RuntimeError"
            raise self._error(f"{what}, which is below {least}, the least that can run", exception)
        if name == "num_ctas" and value > 1 and not self._has_clusters():
            raise self._error(f"{what}, and this GPU has no clusters of blocks", "ValueError")
        if name == "num_warps" and value > _MAX_WARPS:
            raise self._error(f"{what}, which is more than the {_MAX_WARPS} of a block", "RuntimeError")

    def _has_clusters(self) -> bool:
        # Triton's backends ask for compute capability 9.0, and refuse all AMD GPUs named here.
        if self._problem is None or self._problem.gpu.vendor == "Intel":
            return True
        capability = self._problem.gpu.compute_capability
        return self._problem.gpu.vendor == "NVIDIA" and (capability is None or capability >= (9, 0))

    def _least(self, name: str) -> int:
        if name in ("BLOCK_SIZE_M", "BLOCK_SIZE_N"):
            return 1 if self._triton >= _SMALL_TILES_SINCE else 16
        if name == "BLOCK_SIZE_K":
            eight_bits = self._problem is not None and self._problem.quantization.dtype in _EIGHT_BITS
            return 32 if eight_bits else 16
        return _OPTIONS[name].least if name in _OPTIONS else 1

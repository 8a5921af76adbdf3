"""The JSON of SGLang's config files: what its loader and its launch accept, and our canonical text.

Source: sglang wheels, `get_moe_configs` (each key goes through `int`), `invoke_fused_moe_kernel`
(the entry becomes keyword arguments of the kernel) and triton 3.6.0, runtime/jit.py:JITFunction
(`dynamic_func` for what is missing, `_pack_args` for what is unknown).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune.domain.config import CONFIG_KEYS, ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.domain.safe_json import JsonLimits, read_json_object
from moetune.domain.text import printable
from moetune.servers.sglang.releases import Feature, Rules

if TYPE_CHECKING:
    from moetune.domain.problem import Kernel

_BLOCK_KEYS = CONFIG_KEYS[:3]
_REQUIRED = CONFIG_KEYS[:4]
_TMA = "USE_TMA"
_LIMITS = JsonLimits(max_bytes=1 << 20)
# Launch options of Triton that a table can sensibly set, by vendor.
# Source: triton 3.6.0, backends/nvidia/compiler.py:CUDAOptions, backends/amd/compiler.py:HIPOptions.
# Intel's: files of its GPUs carry no more than these; grf_mode is an option of its own backend.
VENDOR_KEYS: dict[str, frozenset[str]] = {
    "NVIDIA": frozenset({"num_ctas", "maxnreg"}),
    "AMD": frozenset({"num_ctas", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}),
    "Intel": frozenset({"num_ctas", "grf_mode"}),
}
# Further fields of those options: a launch takes them, though no table has them.
_OTHER_OPTIONS = frozenset(
    {
        "warp_size",
        "ptx_version",
        "ptx_options",
        "ir_override",
        "enable_fp_fusion",
        "enable_reflect_ftz",
        "launch_cooperative_grid",
        "default_dot_input_precision",
        "max_num_imprecise_acc_default",
        "sanitize_overflow",
        "arch",
        "allow_flush_denorm",
        "schedule_hint",
    }
)
_READABLE = frozenset(CONFIG_KEYS) | {_TMA} | _OTHER_OPTIONS | frozenset().union(*VENDOR_KEYS.values())


@dataclass(frozen=True, slots=True)
class Reading:
    """A config file as the server takes it.

    Attributes:
        table: the entries in the order of the file.
        notes: what the server does not complain of, and a person should know.
    """

    table: ConfigTable
    notes: tuple[str, ...] = ()


def kernel_of(source: str) -> Kernel:
    """The kernel that a file is for, by its name."""
    return "down" if source.endswith("_down.json") else "up"


def accepted_keys(rules: Rules, vendor: str, kernel: Kernel | None) -> frozenset[str]:
    """Keys that an entry may have on a vendor's GPUs.

    Args:
        rules: the release.
        vendor: of the GPU.
        kernel: whose file; None: keys that both files may have.
    """
    keys = frozenset(CONFIG_KEYS) | VENDOR_KEYS.get(vendor, frozenset())
    return keys | {_TMA} if _takes_tma(rules, kernel) else keys


def read(rules: Rules, text: str, source: str) -> Reading:
    """Read a file as this release's loader and launch would.

    Args:
        rules: the release.
        text: the file.
        source: its path; the name's ending says for which kernel it is.

    Raises:
        ConfigFileError: where the server would die, with the exception that it dies with.
    """
    try:
        document = read_json_object(text, source, _LIMITS, ConfigFileError)
    except ConfigFileError as refused:
        raise _with_exception(refused, _load_exception(text)) from None
    where = printable(source, 400)
    for key, entry in document.value.items():
        _check_key(key, where)
        _check_entry(rules, entry, f"{where}: entry {printable(key, 40)!r}", kernel_of(source))
    table = ConfigTable.from_json(document.value, source)
    return Reading(table, _notes(document.value, document.duplicate_keys, len(table)))


def render(rules: Rules, table: ConfigTable, vendor: str, kernel: Kernel) -> str:
    """The canonical text: ascending m, four spaces, num_warps and num_stages always written.

    Raises:
        ConfigFileError: for an entry with a key that this release does not accept there.
    """
    accepted = accepted_keys(rules, vendor, kernel)
    for m, config in table.entries:
        keys = [key for key, _ in config.extra] + ([_TMA] if config.use_tma else [])
        unknown = sorted(set(keys) - accepted)
        if unknown:
            raise ConfigFileError(
                f"entry {m} of the {kernel} table has {', '.join(unknown)}, of which SGLang {rules.version} "
                f"would die (KeyError) on {vendor} GPUs",
                "moetune borrow makes a table safe for a server",
            )
    return table.render()


def check_vendor(rules: Rules, table: ConfigTable, vendor: str, source: str) -> None:
    """Refuse launch options that only the backend of another vendor's GPUs has."""
    foreign = frozenset().union(*VENDOR_KEYS.values()) - VENDOR_KEYS.get(vendor, frozenset())
    for m, config in table.entries:
        for key, _ in config.extra:
            if key in foreign:
                raise ConfigFileError(
                    f"{printable(source, 400)}: entry '{m}' has {key}; SGLang {rules.version} dies with "
                    f"KeyError: Triton has no such option on {vendor} GPUs",
                    f"remove {key}",
                )


def check_tma(rules: Rules, kernel: Kernel, config: KernelConfig) -> None:
    """Refuse USE_TMA where the release passes it on to the kernel, which has no such argument."""
    if config.use_tma and not _takes_tma(rules, kernel):
        raise ConfigFileError(
            f"SGLang {rules.version} dies with KeyError: it does not read USE_TMA from the {kernel} file",
            "remove USE_TMA",
        )


def _takes_tma(rules: Rules, kernel: Kernel | None) -> bool:
    return rules.has(Feature.UP_TMA) or (kernel == "down" and rules.has(Feature.DOWN_FILE))


def _load_exception(text: str) -> str:
    """What `json.load(f).items()` raises for a text that we refused, empty when it would not."""
    if len(text) > _LIMITS.max_bytes:
        return ""
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as death:
        return type(death).__name__
    return "" if isinstance(value, dict) else "AttributeError"


def _with_exception(error: ConfigFileError, exception: str) -> ConfigFileError:
    message = f"{error.message}; SGLang dies with {exception}" if exception else error.message
    return ConfigFileError(message, error.hint)


def _check_key(key: str, where: str) -> None:
    try:
        int(key)
    except ValueError:
        vllm_hint = "remove it: vLLM writes it, and only vLLM reads it"
        raise ConfigFileError(
            f"{where}: the key {printable(key, 40)!r} is no whole number of tokens; "
            "SGLang dies with ValueError",
            vllm_hint if key == "triton_version" else "remove the entry",
        ) from None


def _check_entry(rules: Rules, entry: object, where: str, kernel: Kernel) -> None:
    if not isinstance(entry, dict):
        raise ConfigFileError(f"{where} is no object; SGLang dies with TypeError")
    for key in _REQUIRED:
        if key not in entry:
            raise ConfigFileError(f"{where} lacks {key}; SGLang dies with {_MISSING[key]}")
    accepted = _READABLE if _takes_tma(rules, kernel) else _READABLE - {_TMA}
    for key in entry:
        if key not in accepted:
            raise ConfigFileError(
                f"{where} has {printable(key, 40)}; SGLang {rules.version} dies with KeyError: "
                "the kernel has no such argument",
                f"remove {printable(key, 40)}",
            )
    for key in (*_BLOCK_KEYS, "num_warps"):
        value = entry.get(key, 4)
        if isinstance(value, int) and not isinstance(value, bool) and (value < 1 or value & (value - 1)):
            death = "AssertionError" if key == "num_warps" else "CompilationError"
            raise ConfigFileError(f"{where}: {key} is {value}, no power of two; SGLang dies with {death}")


# `config["BLOCK_SIZE_M"]` and `config["BLOCK_SIZE_K"]` are read before the launch; the others are
# missed by the launch itself (for fp8, BLOCK_SIZE_N by should_enable_swap_ab: KeyError).
_MISSING = {
    "BLOCK_SIZE_M": "KeyError",
    "BLOCK_SIZE_K": "KeyError",
    "BLOCK_SIZE_N": "TypeError (KeyError for fp8)",
    "GROUP_SIZE_M": "TypeError",
}


def _notes(value: dict[str, Any], duplicates: tuple[str, ...], entries: int) -> tuple[str, ...]:
    notes = [f"the key {printable(key, 40)!r} is there twice; the last one counts" for key in duplicates]
    if not value:
        notes.append("the file is empty: SGLang says that it uses it, and takes its default config")
    elif entries != len(value):
        notes.append("two keys are the same number; the last one counts")
    return tuple(notes)

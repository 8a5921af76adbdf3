"""SGLang's log lines, by release: the only place where their texts stand.

Sources: the sglang wheels 0.5.1 to 0.5.23. Lookups: `get_moe_configs`, `try_get_optimal_moe_config`
of `fused_moe_triton_config.py`. Dense GEMMs: `quantization/fp8_kernel.py`, `int8_kernel.py`. Starts:
`server_args.py`, `arg_groups/model_overrides.py`, `managers/scheduler.py`,
`model_executor/model_runner.py`, `model_executor/runner/`, `mem_cache/memory_pool.py`,
`layers/flashinfer_comm_fusion.py`. The lines without a rule for a release are the same in all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moetune.domain.text import printable
from moetune.servers import log_events as say
from moetune.servers.log_events import Rule, apply_rules, argument_patterns, numbers, values_of
from moetune.servers.sglang.names import parse_file_name
from moetune.servers.sglang.releases import NEWEST

if TYPE_CHECKING:
    from collections.abc import Iterator

_SGLANG: say.ServerName = "sglang"
_PATH = r"(\S.{0,2000}?\.json)"
_TRITON = re.compile(r"triton_(\d{1,4}(?:_\d{1,4}){1,3})$", re.ASCII)
_ARGUMENTS = (
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
    "ep_size",
    "pp_size",
    "moe_dp_size",
    "enable_dp_attention",
    "ep_num_redundant_experts",
    "moe_runner_backend",
    "moe_a2a_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "speculative_moe_runner_backend",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "context_length",
    "cuda_graph_bs",
    "cuda_graph_max_bs",
    "disable_cuda_graph",
    "disable_piecewise_cuda_graph",
    "enable_piecewise_cuda_graph",
    "piecewise_cuda_graph_tokens",
    "cuda_graph_backend_prefill",
    "cuda_graph_backend_decode",
    "enable_deterministic_inference",
    "disable_shared_experts_fusion",
    "enable_flashinfer_allreduce_fusion",
    "flashinfer_allreduce_fusion_backend",
    "enforce_disable_flashinfer_allreduce_fusion",
    "enable_fused_moe_sum_all_reduce",
    "enable_lora",
    "attention_backend",
    "device",
    "nnodes",
    "random_seed",
)
_PATTERNS = argument_patterns(_ARGUMENTS)

# Before 0.5.12 no other directories were tried (sglang wheels, `get_moe_configs`).
FIXED_FALLBACKS = frozenset({"3.4.0", "3.3.1", "3.2.0", "3.1.0"})
_HOMES = (
    ("sglang/srt/layers/moe/moe_runner/triton_utils/configs/", say.Release(_SGLANG, since=(0, 5, 11))),
    ("sglang/srt/layers/moe/fused_moe_triton/configs/", say.Release(_SGLANG, until=(0, 5, 10))),
)

# A runner's name inside a line to whether it is the Triton kernel that reads files.
_READS = frozenset({"triton", "auto"})
_INT4 = ("int4_w4a16", "int8_w8a16")


def read_name(path: str) -> say.ConfigName | None:
    """Take the path of a config file apart; None for what is no name of SGLang's grammar."""
    directory, _, file = path.rpartition("/")
    name = parse_file_name(file)
    if name is None:
        return None
    triton = _TRITON.search(directory)
    return say.ConfigName(
        file=file,
        directory=printable(directory, 1024),
        E=name.E,
        N=name.N,
        device=name.device,
        dtype=name.dtype,
        block_shape=name.block_shape,
        per_channel=name.per_channel,
        kernel="down" if name.down else "up",
        triton=triton[1].replace("_", ".") if triton else "",
    )


def _home(name: say.ConfigName) -> Iterator[say.Event]:
    """The package's own folder moved with 0.5.11."""
    for folder, bounds in _HOMES:
        if folder in f"{name.directory}/":
            yield bounds


def _found(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigFound(_SGLANG, name)
        yield from _home(name)


def _stale(match: re.Match[str]) -> Iterator[say.Event]:
    wanted, found = read_name(match[1]), read_name(match[3])
    if wanted is not None and found is not None:
        yield say.ConfigStale(_SGLANG, wanted, found)
        yield from _home(wanted)
        if found.triton not in FIXED_FALLBACKS:
            yield say.Release(_SGLANG, since=(0, 5, 12))


def _default(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigMissing(_SGLANG, (name,))
        yield from _home(name)


def _old_default(match: re.Match[str]) -> Iterator[say.Event]:
    """The words of vLLM, from which 0.4 took the code: the path tells."""
    if "sglang/" in match[1]:
        yield from _default(match)
        yield say.Release(_SGLANG, until=(0, 5, 1))


def _down_false(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigMissing(_SGLANG, (name,), down_only=True)
        yield say.Release(_SGLANG, since=(0, 5, 6), until=(0, 5, 15))


def _down_reused(match: re.Match[str]) -> Iterator[say.Event]:
    if (name := read_name(match[1])) is not None:
        yield say.ConfigMissing(_SGLANG, (name,), reused_up=True, down_only=True)
        yield say.Release(_SGLANG, since=(0, 5, 16))


def _dense(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.DenseConfigMissing(None, printable(match[1].rpartition("/")[2], 300))


def _deterministic(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.FilesIgnored(_SGLANG, "deterministic inference")
    yield say.Release(_SGLANG, since=(0, 5, 5))


def _override(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.PairOverridden(_SGLANG, int(match[1]), int(match[2]), int(match[3]))
    yield say.Release(_SGLANG, since=(0, 5, 13))


def _tma(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.TmaEnabled(_SGLANG, "up" if match[1] == "Up" else "down")
    yield say.Release(_SGLANG, since=(0, 5, 18))


def _arguments(match: re.Match[str]) -> Iterator[say.Event]:
    values = values_of(match.string[match.start() :], _PATTERNS)
    yield say.Arguments(_SGLANG, values)
    yield from _told(dict(values))
    # The dataclass was printed up to 0.5.18, its resolved dictionary from 0.5.20.
    if match[1] == "{":
        yield say.Release(_SGLANG, since=(0, 5, 19))
    else:
        yield say.Release(_SGLANG, until=(0, 5, 19))


def _told(values: dict[str, str]) -> Iterator[say.Event]:
    """What arguments say about the runner and the files."""
    runner = values.get("moe_runner_backend", "auto").lower()
    if runner not in _READS:
        yield say.RunnerChosen(_SGLANG, runner, False, (), f"moe_runner_backend={runner}")
    if values.get("enable_deterministic_inference") == "True":
        yield say.FilesIgnored(_SGLANG, "deterministic inference")
    if values.get("disable_cuda_graph") == "True":
        yield say.GraphsOff(_SGLANG, "decode", "disable_cuda_graph=True")


def _limits(match: re.Match[str]) -> Iterator[say.Event]:
    names = ("kv_tokens", "prefill_chunk", "max_running_requests", "context_length")
    for name, value in zip(names, match.groups(), strict=True):
        if value.lstrip("-").isdigit():
            yield say.Limit(_SGLANG, name, int(value))
    yield say.Seen(_SGLANG)


def _kv(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Limit(_SGLANG, "kv_allocated_tokens", int(match[1]))


def _decode_sizes(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphSizes(_SGLANG, "decode", numbers(match[1]))


def _prefill_sizes(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphSizes(_SGLANG, "prefill", numbers(match[1]))


_DETAIL = re.compile(
    r"(backend|num_tokens_per_bs|num_tokens_per_req|bs|num_tokens)=(\[[\d, ]{0,8192}\]|\w{1,64})", re.A
)


def _capture(match: re.Match[str]) -> Iterator[say.Event]:
    """`Capture target decode CUDA graph begin. backend=full, ...`: 0.5.15 and later."""
    details = dict(_DETAIL.findall(match[3]))
    phase = "prefill" if match[1] == "prefill" else "decode"
    sizes = numbers(details.get("bs", "") or details.get("num_tokens", ""))
    each = details.get("num_tokens_per_bs") or details.get("num_tokens_per_req") or ""
    yield say.GraphSizes(
        _SGLANG, phase, sizes, int(each) if each.isdigit() else 0, details.get("backend", "")
    )
    yield say.Release(_SGLANG, since=(0, 5, 13))


def _graph_off(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphsOff(_SGLANG, "prefill", printable(match[1].strip(" ."), 200))


def _fusion(state: str) -> say.Build:
    def build(match: re.Match[str]) -> Iterator[say.Event]:
        yield say.AllReduceFusion(_SGLANG, state, printable(match[0].strip(), 200))

    return build


def _runner(match: re.Match[str]) -> Iterator[say.Event]:
    runner = match[1].strip("'\"").lower()
    yield say.RunnerChosen(_SGLANG, runner, runner in _READS, (), printable(match[0], 200))


def _gpt_oss(match: re.Match[str]) -> Iterator[say.Event]:
    word = match[1].lower()
    runner = "triton" if word == "triton" else word
    yield say.RunnerChosen(_SGLANG, runner, word == "triton", (), printable(match[0], 200))


def _marlin(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.RunnerChosen(None, "marlin", False, _INT4, printable(match[0], 200))


def _wna16(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.RunnerChosen(None, "triton (moe_wna16)", True, _INT4, printable(match[0], 200))


def _architecture(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Architecture(_SGLANG, match[1])


def _seen(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.Seen(_SGLANG)


def _ready(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.Ready(_SGLANG)


def _frame(match: re.Match[str]) -> Iterator[say.Event]:
    loader = match[2] in ("get_moe_configs", "try_get_optimal_moe_config", "get_optimal_moe_config")
    yield say.Frame(_SGLANG, "loader" if loader else "kernel", match[2])


RULES: tuple[Rule, ...] = (
    Rule("Using MoE kernel config from", re.compile(rf"Using MoE kernel config from {_PATH}"), _found),
    Rule(
        "Fallback to triton version",
        re.compile(
            rf"Config file not found at {_PATH}\. ?Fallback to triton version ([\d.]{{1,20}}) and use "
            rf"MoE kernel config from {_PATH}"
        ),
        _stale,
    ),
    Rule(
        "Using default MoE kernel config",
        re.compile(
            r"Using default MoE kernel config\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _default,
    ),
    Rule(
        "Using default MoE config.",
        re.compile(
            r"Using default MoE config\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _old_default,
    ),
    Rule(
        "down_moe=False",
        re.compile(
            r"Using MoE kernel config with down_moe=False\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _down_false,
    ),
    Rule(
        "Down MoE config file not found",
        re.compile(rf"Down MoE config file not found at {_PATH}; ?reusing"),
        _down_reused,
    ),
    Rule(
        "kernel config. Performance might be",
        re.compile(
            r"Using default W8A8 Block (?:FP8|INT8) kernel config\. ?Performance might be sub-optimal! ?"
            rf"Config file not found at {_PATH}"
        ),
        _dense,
    ),
    Rule(
        "Deterministic inference is enabled, using default MoE",
        re.compile(r"Deterministic inference is enabled, using default MoE kernel config"),
        _deterministic,
    ),
    Rule(
        "down_moe config BLOCK_SIZE_M",
        re.compile(
            r"down_moe config BLOCK_SIZE_M=(\d{1,6}) does not match up config BLOCK_SIZE_M=(\d{1,6}) "
            r"at M=(\d{1,9})"
        ),
        _override,
    ),
    Rule("MoE TMA is enabled", re.compile(r"\b(Up|Down) MoE TMA is enabled"), _tma),
    Rule("server_args=", re.compile(r"\bserver_args=(?:ServerArgs\(|(\{))"), _arguments),
    Rule(
        "max_total_num_tokens=",
        re.compile(
            r"max_total_num_tokens=(\d{1,12}), chunked_prefill_size=(-?\d{1,9}|None), "
            r"max_prefill_tokens=(?:-?\d{1,9}|None), max_running_requests=(\d{1,9}), context_len=(\d{1,9})"
        ),
        _limits,
    ),
    Rule("KV Cache is allocated", re.compile(r"KV Cache is allocated\.[^#\n]{0,80}#tokens: (\d{1,12})"), _kv),
    # up to 0.5.12
    Rule("Capture cuda graph bs", re.compile(r"Capture cuda graph bs (\[[\d, ]{0,8192}\])"), _decode_sizes),
    Rule(
        "Capture cuda graph num tokens",
        re.compile(r"Capture cuda graph num tokens (\[[\d, ]{0,8192}\])"),
        _prefill_sizes,
    ),
    Rule("[BCG] Capture", re.compile(r"\[BCG\] Capture num tokens: (\[[\d, ]{0,8192}\])"), _prefill_sizes),
    # 0.5.13 and later
    Rule(
        "CUDA graph",
        re.compile(r"Capture target (decode|verify|prefill) CUDA graph (begin|end)\.(.{0,16384})", re.A),
        _capture,
    ),
    Rule(
        "isabl",
        re.compile(r"(Disable (?:piecewise|prefill) CUDA graph because .{0,300})"),
        _graph_off,
    ),
    Rule(
        "Breakable CUDA graph is",
        re.compile(r"(Breakable CUDA graph is incompatible with .{0,200})"),
        _graph_off,
    ),
    Rule(
        "Piecewise cuda graph is", re.compile(r"(Piecewise cuda graph is disabled for .{0,200})"), _graph_off
    ),
    Rule("Disabling prefill CUDA", re.compile(r"(Disabling prefill CUDA graph .{0,200})"), _graph_off),
    Rule("Auto-enabling", re.compile(r"Auto-enabling FlashInfer AllReduce Fusion.{0,80}"), _fusion("asked")),
    Rule(
        "FlashInfer",
        re.compile(
            r"FlashInfer workspace initialized for rank \d.{0,80}|"
            r"FlashInfer AllReduce Fusion enabled and workspace initialized.{0,80}"
        ),
        _fusion("on"),
    ),
    Rule(
        "lash",
        re.compile(
            r"Failed to initialize FlashInfer workspace.{0,200}|"
            r"FlashInfer workspace preflight: .{0,200}|"
            r"FlashInfer allreduce fusion disabled globally.{0,100}|"
            r"FlashInfer AllReduce fusion disabled: .{0,160}|"
            r"FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs"
        ),
        _fusion("refused"),
    ),
    Rule(
        "lash",
        re.compile(
            r"FlashInfer allreduce fusion is forcibly disabled via \S{1,80}|"
            r"Disable --(?:enable-flashinfer-allreduce-fusion|flashinfer-allreduce-fusion-backend) "
            r"because .{0,80}"
        ),
        _fusion("off"),
    ),
    Rule("as MoE runner backend", re.compile(r"Use ([\w'\"]{1,60}) as MoE runner backend", re.A), _runner),
    Rule("using triton MoE runner", re.compile(r"using (triton) MoE runner"), _runner),
    Rule(
        "MOE kernel",
        re.compile(r"(?:enabling|using) (FlashInfer|triton_kernels?|triton|aiter)(?: MXFP4)? MOE kernel"),
        _gpt_oss,
    ),
    Rule(
        "arlin",
        re.compile(
            r"convertible to (?:awq|gptq)_marlin during runtime|Using CompressedTensorsWNA16MarlinMoEMethod"
        ),
        _marlin,
    ),
    Rule("WNA16", re.compile(r"Falling back to Moe WNA16 kernels"), _wna16),
    Rule("Load weight end", re.compile(r"Load weight end\..{0,80}?\btype=(\w{1,100})", re.A), _architecture),
    Rule("Load weight begin", re.compile(r"Load weight begin\. avail mem="), _seen),
    Rule("Received sigquit from", re.compile(r"Received sigquit from a child process"), _seen),
    Rule("The server is fired up", re.compile(r"The server is fired up and ready to roll"), _ready),
    Rule(
        "sglang/",
        re.compile(
            r"File \"[^\"\n]{0,400}sglang/(?:srt/layers/moe|kernels/ops/moe)/[^\"\n]{0,200}\", line \d{1,6}, "
            r"in (\b)(\w{1,100})",
            re.A,
        ),
        _frame,
    ),
)


class SGLangLogGrammar:
    """SGLang's lines, those of 0.5.1 to 0.5.23."""

    newest = NEWEST
    needles: tuple[bytes, ...] = (
        b"MoE",
        b"MOE kernel",
        b"_moe",
        b"W8A8 Block",
        b"Config file not",
        b"_args=",
        b"_total_num_tokens=",
        b"KV Cache is",
        b"Capture ",
        b"Disabl",
        b"Breakable CUDA",
        b"Piecewise cuda",
        b"FlashInfer ",
        b"Auto-enabling",
        b"Deterministic inf",
        b"Marlin",
        b"_marlin",
        b"WNA16",
        b"Load weight",
        b"The server is fired",
        b"Received sigquit",
        b"/layers/moe/",
    )
    openers: tuple[str, ...] = (
        "MoE kernel config",
        "Config file not found at",
        "Down MoE config",
        "Using default MoE",
        "Performance might be",
        "server_args=",
        "max_total_num_tokens=",
        "Capture cuda graph",
        "Capture target",
        "down_moe config",
    )

    def read(self, text: str) -> tuple[say.Event, ...]:
        """What a line says."""
        return apply_rules(RULES, text)

"""SGLang's log lines of a start: arguments, limits, graphs, runners, and where a traceback passes.

Sources: the sglang wheels 0.5.1 to 0.5.23: `server_args.py`, `arg_groups/model_overrides.py`,
`managers/scheduler.py`, `model_executor/model_runner.py`, `model_executor/runner/`,
`mem_cache/memory_pool.py`, `layers/flashinfer_comm_fusion.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moetune.domain.text import printable
from moetune.servers import log_events as say
from moetune.servers.log_events import Rule, argument_patterns, numbers, values_of
from moetune.servers.sglang.log_lookups import SGLANG

if TYPE_CHECKING:
    from collections.abc import Iterator

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

# A runner's name inside a line to whether it is the Triton kernel that reads files.
_READS = frozenset({"triton", "auto"})
_INT4 = ("int4_w4a16", "int8_w8a16")


def _arguments(match: re.Match[str]) -> Iterator[say.Event]:
    values = values_of(match.string[match.start() :], _PATTERNS)
    yield say.Arguments(SGLANG, values)
    yield from _told(dict(values))
    # The dataclass was printed up to 0.5.18, its resolved dictionary from 0.5.20.
    if match[1] == "{":
        yield say.Release(SGLANG, since=(0, 5, 19))
    else:
        yield say.Release(SGLANG, until=(0, 5, 19))


def _told(values: dict[str, str]) -> Iterator[say.Event]:
    """What arguments say about the runner and the files."""
    runner = values.get("moe_runner_backend", "auto").lower()
    if runner not in _READS:
        yield say.RunnerChosen(SGLANG, runner, False, (), f"moe_runner_backend={runner}")
    if values.get("enable_deterministic_inference") == "True":
        yield say.FilesIgnored(SGLANG, "deterministic inference")
    if values.get("disable_cuda_graph") == "True":
        yield say.GraphsOff(SGLANG, "decode", "disable_cuda_graph=True")


def _limits(match: re.Match[str]) -> Iterator[say.Event]:
    names = ("kv_tokens", "prefill_chunk", "max_running_requests", "context_length")
    for name, value in zip(names, match.groups(), strict=True):
        if value.lstrip("-").isdigit():
            yield say.Limit(SGLANG, name, int(value))
    yield say.Seen(SGLANG)


def _kv(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Limit(SGLANG, "kv_allocated_tokens", int(match[1]))


def _decode_sizes(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphSizes(SGLANG, "decode", numbers(match[1]))


def _prefill_sizes(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphSizes(SGLANG, "prefill", numbers(match[1]))


_DETAIL = re.compile(
    r"(backend|num_tokens_per_bs|num_tokens_per_req|bs|num_tokens)=(\[[\d, ]{0,8192}\]|\w{1,64})", re.A
)


def _capture(match: re.Match[str]) -> Iterator[say.Event]:
    """`Capture target decode CUDA graph begin. backend=full, ...`: 0.5.15 and later."""
    details = dict(_DETAIL.findall(match[3]))
    phase = "prefill" if match[1] == "prefill" else "decode"
    sizes = numbers(details.get("bs", "") or details.get("num_tokens", ""))
    each = details.get("num_tokens_per_bs") or details.get("num_tokens_per_req") or ""
    yield say.GraphSizes(SGLANG, phase, sizes, int(each) if each.isdigit() else 0, details.get("backend", ""))
    yield say.Release(SGLANG, since=(0, 5, 13))


def _graph_off(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphsOff(SGLANG, "prefill", printable(match[1].strip(" ."), 200))


def _fusion(state: str) -> say.Build:
    def build(match: re.Match[str]) -> Iterator[say.Event]:
        yield say.AllReduceFusion(SGLANG, state, printable(match[0].strip(), 200))

    return build


def _runner(match: re.Match[str]) -> Iterator[say.Event]:
    runner = match[1].strip("'\"").lower()
    yield say.RunnerChosen(SGLANG, runner, runner in _READS, (), printable(match[0], 200))


def _gpt_oss(match: re.Match[str]) -> Iterator[say.Event]:
    word = match[1].lower()
    runner = "triton" if word == "triton" else word
    yield say.RunnerChosen(SGLANG, runner, word == "triton", (), printable(match[0], 200))


def _marlin(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.RunnerChosen(None, "marlin", False, _INT4, printable(match[0], 200))


def _wna16(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.RunnerChosen(None, "triton (moe_wna16)", True, _INT4, printable(match[0], 200))


def _architecture(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Architecture(SGLANG, match[1])


def _seen(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.Seen(SGLANG)


def _ready(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.Ready(SGLANG)


def _frame(match: re.Match[str]) -> Iterator[say.Event]:
    loader = match[2] in ("get_moe_configs", "try_get_optimal_moe_config", "get_optimal_moe_config")
    yield say.Frame(SGLANG, "loader" if loader else "kernel", match[2])


START_RULES: tuple[Rule, ...] = (
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

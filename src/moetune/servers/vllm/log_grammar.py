"""vLLM's log lines, by release: the only place where their texts stand.

Sources: the vllm wheels 0.10.2 to 0.33.0. Lookups: `model_executor/layers/fused_moe/fused_moe.py`
(`get_moe_configs`; the warning prints a list of paths up to 0.12, and paths with commas from 0.13).
Runners: `fused_moe/oracle/*.py` (0.20 and later), `quantization/*.py` before. Starts:
`v1/engine/core.py`, `config/vllm.py:VllmConfig.__str__`, `v1/core/kv_cache_utils.py`,
`config/scheduler.py`, `entrypoints/`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from moetune.domain.text import printable
from moetune.servers import log_events as say
from moetune.servers.log_events import Rule, apply_rules, argument_patterns, numbers, values_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_VLLM: say.ServerName = "vllm"
_ARGUMENTS = (
    "model",
    "model_tag",
    "tokenizer",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "all2all_backend",
    "moe_backend",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "max_seq_len",
    "enforce_eager",
    "speculative_config",
    "enable_lora",
    "cudagraph_capture_sizes",
    "cudagraph_mode",
)
_PATTERNS = argument_patterns(_ARGUMENTS)
_FILE = re.compile(
    r"E=(\d{1,6}),N=(\d{1,8}),device_name=([^,/\\\s]{0,128})(?:,dtype=(\w{1,32}))?"
    r"(?:,block_shape=\[(\d{1,6}), ?(\d{1,6})\])?\.json",
    re.A,
)

# The kinds of experts in the words of the oracles to the dtype tags that they can look up.
_KINDS: dict[str, tuple[str, ...]] = {
    "unquantized": ("", "float32"),
    "fp8": ("fp8_w8a8", "fp8_w8a16"),
    "int8": ("",),
    "wna16": ("int4_w4a16", "int8_w8a16"),
    "mxfp4": ("",),
    "mxfp8": ("fp8_w8a8", ""),
    "nvfp4": ("",),
}
# Backends that launch the kernel that reads the file. For mxfp4 the word stands for triton_kernels.
_READS = frozenset({"triton", "batched_triton", "emulation"})


def read_names(text: str) -> tuple[say.ConfigName, ...]:
    """The config files that a list of paths names, in its order; file names hold commas themselves."""
    names = []
    last = 0
    for match in _FILE.finditer(text):
        before = text[last : match.start()].strip(" ,['\"")
        block = (int(match[5]), int(match[6])) if match[5] else None
        names.append(
            say.ConfigName(
                file=match[0],
                directory=printable(before.rstrip("/"), 1024),
                E=int(match[1]),
                N=int(match[2]),
                device=match[3],
                dtype=match[4] or "",
                block_shape=block,
            )
        )
        last = match.end()
    return tuple(names)


def _found(match: re.Match[str]) -> Iterator[say.Event]:
    for name in read_names(match[1])[:1]:
        yield say.ConfigFound(_VLLM, name)


def _default(match: re.Match[str]) -> Iterator[say.Event]:
    text = match[1]
    if "/sglang/" in text:
        return  # SGLang 0.4 took over the words with the code
    if text.startswith("[") and "]" not in text.rpartition(".json")[2]:
        return  # the list goes on in the next line
    names = read_names(text)
    if names:
        yield say.ConfigMissing(_VLLM, names)
        # One path alone looks the same before and after.
        if text.startswith("["):
            yield say.Release(_VLLM, until=(0, 12, 99))
        elif len(names) > 1:
            yield say.Release(_VLLM, since=(0, 13, 0))


def _dense(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.DenseConfigMissing(None, printable(match[1].rpartition("/")[2], 300))


def _batch_invariant(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.FilesIgnored(_VLLM, "batch-invariant mode")
    del match


def _oracle(match: re.Match[str]) -> Iterator[say.Event]:
    """`Using TRITON Unquantized MoE backend out of potential backends: [...]`."""
    backend, kind = match[1].strip("'"), match[2].lower()
    reads = backend.lower() in _READS and kind not in ("mxfp4", "nvfp4")
    yield say.RunnerChosen(_VLLM, backend, reads, _KINDS[kind], printable(match[0], 200))


def _named(runner: str, *kinds: str) -> say.Build:
    dtypes = tuple(dict.fromkeys(tag for kind in kinds for tag in _KINDS[kind]))

    def build(match: re.Match[str]) -> Iterator[say.Event]:
        yield say.RunnerChosen(_VLLM, runner, runner.startswith("TRITON"), dtypes, printable(match[0], 200))

    return build


def _marlin(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.RunnerChosen(None, "marlin", False, _KINDS["wna16"], printable(match[0], 200))


def _wna16(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.RunnerChosen(None, "TRITON (moe_wna16)", True, _KINDS["wna16"], printable(match[0], 200))


def _engine(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Release(_VLLM, exact=match[1])
    values = values_of(match.string[match.end() :], _PATTERNS)
    yield say.Arguments(_VLLM, values)
    sizes = dict(values).get("cudagraph_capture_sizes", "")
    if sizes.startswith("["):
        yield say.GraphSizes(_VLLM, "decode", numbers(sizes))
    if dict(values).get("enforce_eager") == "True":
        yield say.GraphsOff(_VLLM, "decode", "enforce_eager=True")


def _arguments(match: re.Match[str]) -> Iterator[say.Event]:
    values = values_of(match.string[match.end() :], _PATTERNS)
    yield say.Arguments(_VLLM, values)
    runner = dict(values).get("moe_backend", "auto")
    if runner.lower() not in ("auto", *_READS):
        yield say.RunnerChosen(_VLLM, runner, False, (), f"moe_backend={runner}")


def _version(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Release(_VLLM, exact=match[1])


def _architecture(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Architecture(_VLLM, match[1])


def _chunk(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Limit(_VLLM, "prefill_chunk", int(match[1]))


def _kv(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Limit(_VLLM, "kv_tokens", int(match[1].replace(",", "")))


def _expert_parallel(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Arguments(
        _VLLM,
        (("ep_ranks", match[1]), ("local_experts", match[2]), ("global_experts", match[3])),
        starts=False,
    )


def _graphs_done(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.Seen(_VLLM)
    del match


def _downgrade(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.GraphsOff(_VLLM, "decode", printable(match[0].strip(), 200))


def _fusion(match: re.Match[str]) -> Iterator[say.Event]:
    yield say.AllReduceFusion(_VLLM, "refused", printable(match[0].strip(), 200))


def _ready(_: re.Match[str]) -> Iterator[say.Event]:
    yield say.Ready(_VLLM)


def _frame(match: re.Match[str]) -> Iterator[say.Event]:
    loader = match[1] in ("get_moe_configs", "try_get_optimal_moe_config")
    yield say.Frame(_VLLM, "loader" if loader else "kernel", match[1])


RULES: tuple[Rule, ...] = (
    Rule("for MoE layer", re.compile(r"Using configuration from (.{1,2000}?\.json) for MoE layer"), _found),
    Rule(
        "Using default MoE config.",
        re.compile(
            r"Using default MoE config\. ?Performance might be sub-optimal! ?"
            r"Config file not found at (.{1,8192})"
        ),
        _default,
    ),
    Rule(
        "kernel config. Performance might",
        re.compile(
            r"Using default W8A8 Block (?:FP8|INT8) kernel config\. ?Performance might be sub-optimal! ?"
            r"Config file not found at \[?'?(.{1,2000}?\.json)"
        ),
        _dense,
    ),
    Rule(
        "BATCH_INVARIANT",
        re.compile(r"\bVLLM_BATCH_INVARIANT['\"]?(?:=|: ?)['\"]?(?:1|[Tt]rue)\b"),
        _batch_invariant,
    ),
    # 0.20 and later
    Rule(
        " MoE backend",
        re.compile(
            r"Using ('?[A-Za-z_][\w ]{0,40}?'?) (Unquantized|Fp8|Int8|WNA16|Mxfp4|MxFp8|NvFp4) MoE backend",
            re.A,
        ),
        _oracle,
    ),
    # 0.11 and 0.12
    Rule("Fp8MoEMethod", re.compile(r"Using DeepGemm kernels for Fp8MoEMethod"), _named("DEEPGEMM", "fp8")),
    Rule(
        "Fp8MoEMethod",
        re.compile(r"Using CutlassBlockScaledGroupedGemm kernels for Fp8MoEMethod"),
        _named("VLLM_CUTLASS", "fp8"),
    ),
    Rule(
        "FlashInfer", re.compile(r"Using FlashInfer \S{1,40} kernels"), _named("FLASHINFER", "fp8", "nvfp4")
    ),
    Rule("FP8 MoE", re.compile(r"Using Marlin backend for FP8 MoE"), _named("MARLIN", "fp8")),
    Rule("FP8 MoE", re.compile(r"Using DeepGEMM backend for FP8 MoE"), _named("DEEPGEMM", "fp8")),
    Rule(
        "FP8 MoE",
        re.compile(r"Using Cutlass BlockScaled GroupedGemm backend for FP8 MoE"),
        _named("VLLM_CUTLASS", "fp8"),
    ),
    Rule("FP8 MoE", re.compile(r"Using FlashInfer FP8 MoE \w{1,20} backend"), _named("FLASHINFER", "fp8")),
    Rule("FP8 MoE", re.compile(r"Using Triton backend for FP8 MoE"), _named("TRITON", "fp8")),
    Rule(
        "FlashInfer CUTLASS MoE for",
        re.compile(r"Enabling FlashInfer CUTLASS MoE for UnquantizedFusedMoEMethod"),
        _named("FLASHINFER_CUTLASS", "unquantized"),
    ),
    Rule(
        "arlin",
        re.compile(
            r"convertible to (?:awq|gptq)_marlin during runtime|Using CompressedTensorsWNA16MarlinMoEMethod"
        ),
        _marlin,
    ),
    Rule("WNA16", re.compile(r"Falling back to Moe WNA16 kernels"), _wna16),
    Rule(
        "LLM engine (v",
        re.compile(r"Initializing an? (?:V1 )?LLM engine \(v(\d[\w.+]{0,60})\) with config: ", re.A),
        _engine,
    ),
    Rule("non-default args", re.compile(r"non-default args: "), _arguments),
    Rule("version", re.compile(r"vLLM (?:API )?server version (\d[\w.+]{0,60})", re.A), _version),
    Rule("version", re.compile(r"█\s{1,4}version\s(\d[\w.+]{0,60})"), _version),  # under the logo
    Rule("Resolved architecture", re.compile(r"Resolved architecture: (\w{1,100})", re.A), _architecture),
    Rule(
        "Chunked prefill is enabled",
        re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,9})"),
        _chunk,
    ),
    Rule("KV cache size", re.compile(r"KV cache size: ([\d,]{1,20}) tokens"), _kv),
    Rule(
        "Expert parallelism is enabled",
        re.compile(
            r"\[EP Rank \d{1,4}/(\d{1,4})\] Expert parallelism is enabled\..{0,200}?"
            r"number of experts: (\d{1,6})/(\d{1,6})"
        ),
        _expert_parallel,
    ),
    Rule("Graph capturing finished", re.compile(r"Graph capturing finished in"), _graphs_done),
    Rule(
        "CUDAGraphMode",
        re.compile(r"CUDAGraphMode\.\w{1,40} is not supported with .{0,120}", re.A),
        _downgrade,
    ),
    Rule("Overriding cudagraph_mode", re.compile(r"Overriding cudagraph_mode from .{0,80}"), _downgrade),
    Rule(
        "lashinfer allreduce",
        re.compile(
            r"Flashinfer allreduce fusion is not supported for .{0,80}|"
            r"Failed to initialize Flashinfer allreduce workspace.{0,100}"
        ),
        _fusion,
    ),
    Rule("Application startup complete", re.compile(r"Application startup complete"), _ready),
    Rule(
        "vllm/",
        re.compile(
            r"File \"[^\"\n]{0,400}vllm/model_executor/layers/fused_moe/[^\"\n]{0,200}\", line \d{1,6}, "
            r"in (\w{1,100})",
            re.A,
        ),
        _frame,
    ),
)


class VllmLogGrammar:
    """vLLM's lines, those of 0.10.2 to 0.33.0."""

    needles: tuple[bytes, ...] = (
        b"MoE",
        b"_moe",
        b"W8A8 Block",
        b"Config file not",
        b"BATCH_INVARIANT",
        b"Using FlashInfer",
        b"Marlin",
        b"_marlin",
        b"WNA16",
        b"LLM ",
        b"version ",
        b"-default args",
        b"Resolved arch",
        b"Chunked prefill is",
        b"KV cache size",
        b"Expert parallelism is",
        b"Graph captur",
        b"CUDAGraphMode",
        b"Overriding cuda",
        b"Flashinfer allr",
        b"Application startup",
    )
    openers: tuple[str, ...] = (
        "Using default MoE config",
        "Using configuration from",
        "Config file not found at",
        "Performance might be",
        "LLM engine (v",
        "non-default args",
    )

    def read(self, text: str) -> tuple[say.Event, ...]:
        """What a line says."""
        return apply_rules(RULES, text)

"""vLLM's log lines, against what the wheels' own rules print and against the wheels' own text."""

from __future__ import annotations

import pytest

from moetune.domain.gpu import find_gpu
from moetune.domain.model import read_expert_layer
from moetune.domain.packaged_models import packaged_models
from moetune.domain.problem import Parallelism
from moetune.servers import log_events as say
from moetune.servers.protocol import ConfigTree, ServerOptions
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.log_grammar import VllmLogGrammar, read_names
from tests.wheels import members, read_member

GRAMMAR = VllmLogGrammar()
VERSIONS = ("0.10.2", "0.11.0", "0.12.0", "0.13.0", "0.20.0", "0.27.1", "0.33.0")
FILE = "E=128,N=384,device_name=NVIDIA_L40S,dtype=fp8_w8a8,block_shape=[128,128].json"


def lines(version: str, *trees: ConfigTree) -> list[str]:
    server = open_vllm(version)
    model = packaged_models()["Qwen/Qwen3-30B-A3B-FP8"]
    layer = read_expert_layer(model.config, name="m", source="test")
    problem = server.problem(layer, Parallelism(tp=2), find_gpu("NVIDIA L40S"), ServerOptions())
    lookup = server.lookup(problem, "up", trees, ServerOptions())
    return [text for _, text in lookup.log_lines]


@pytest.mark.parametrize("version", VERSIONS)
def test_case_2_one_missing_config_with_two_candidate_places(version: str) -> None:
    mine, shipped = (
        ConfigTree("/etc/my configs", {"": frozenset()}),
        ConfigTree("/pkg/configs", {"": frozenset()}),
    )
    (text,) = lines(version, mine, shipped)
    events = GRAMMAR.read(text)
    (missing,) = [event for event in events if isinstance(event, say.ConfigMissing)]
    assert [name.file for name in missing.names] == [FILE, FILE]
    assert [name.directory for name in missing.names] == ["/etc/my configs", "/pkg/configs"]
    assert missing.names[0].block_shape == (128, 128)
    (release,) = [event for event in events if isinstance(event, say.Release)]
    # A list is printed up to 0.12, paths with commas from 0.13.
    assert bool(release.until) == (version in VERSIONS[:3])
    assert bool(release.since) == (version not in VERSIONS[:3])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_that_is_read(version: str) -> None:
    (text,) = lines(version, ConfigTree("/pkg/configs", {"": frozenset({FILE})}))
    (found,) = [event for event in GRAMMAR.read(text) if isinstance(event, say.ConfigFound)]
    assert (found.name.file, found.name.E, found.name.dtype) == (FILE, 128, "fp8_w8a8")


def test_names_hold_commas_themselves() -> None:
    names = read_names(f"['/a/{FILE}', '/b/E=8,N=7168,device_name=NVIDIA_H100_80GB_HBM3.json']")
    assert [(name.directory, name.E) for name in names] == [("/a", 128), ("/b", 8)]


def test_a_list_that_goes_on_in_the_next_line_says_nothing_yet() -> None:
    head = "Using default MoE config. Performance might be sub-optimal! Config file not found at "
    assert not GRAMMAR.read(f"{head}['/a/{FILE}',")
    assert GRAMMAR.read(f"{head}['/a/{FILE}', '/b/{FILE}']")


def test_case_3_the_dense_gemm_is_another_kernel() -> None:
    text = (
        "Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file not "
        "found at ['/a/N=576,K=7168,device_name=NVIDIA_H800,dtype=fp8_w8a8,block_shape=[128,128].json']"
    )
    (event,) = GRAMMAR.read(text)
    assert isinstance(event, say.DenseConfigMissing)
    assert event.file.startswith("N=576,K=7168")


RUNNERS = {
    "Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].": ("TRITON", True, ""),
    "Using BATCHED_TRITON Fp8 MoE backend out of potential backends: [].": (
        "BATCHED_TRITON",
        True,
        "fp8_w8a8",
    ),
    "Using FlashInfer CUTLASS Unquantized MoE backend out of potential": ("FlashInfer CUTLASS", False, ""),
    "Using DEEPGEMM Fp8 MoE backend out of potential backends: [].": ("DEEPGEMM", False, "fp8_w8a8"),
    "Using 'MARLIN' WNA16 MoE backend.": ("MARLIN", False, "int4_w4a16"),
    "Using 'TRITON' WNA16 MoE backend.": ("TRITON", True, "int4_w4a16"),
    "Using 'TRITON' Mxfp4 MoE backend.": ("TRITON", False, ""),  # triton_kernels: no JSON
    "Using DeepGemm kernels for Fp8MoEMethod.": ("DEEPGEMM", False, "fp8_w8a8"),
    "Using Marlin backend for FP8 MoE": ("MARLIN", False, "fp8_w8a8"),
    "Using Triton backend for FP8 MoE": ("TRITON", True, "fp8_w8a8"),
    "non-default args: {'moe_backend': 'deep_gemm'}": ("deep_gemm", False, "fp8_w8a8"),
    "The model is convertible to gptq_marlin during runtime. Using gptq_marlin kernel.": (
        "marlin",
        False,
        "int4_w4a16",
    ),
}


@pytest.mark.parametrize(("text", "expected"), RUNNERS.items(), ids=range(len(RUNNERS)))
def test_case_4_runners_of_all_releases(text: str, expected: tuple[str, bool, str]) -> None:
    (runner,) = [event for event in GRAMMAR.read(text) if isinstance(event, say.RunnerChosen)]
    assert (runner.runner, runner.reads_file) == expected[:2]
    assert not runner.dtypes or expected[2] in runner.dtypes


def test_starts() -> None:
    text = (
        "Initializing a V1 LLM engine (v0.20.0) with config: model='org/m', speculative_config=None, "
        "tensor_parallel_size=4, data_parallel_size=2, quantization=fp8, enforce_eager=False, "
        "compilation_config={'cudagraph_capture_sizes': [1, 2, 4], 'max_cudagraph_capture_size': 4}"
    )
    events = GRAMMAR.read(text)
    (arguments,) = [event for event in events if isinstance(event, say.Arguments)]
    values = dict(arguments.values)
    assert (values["model"], values["tensor_parallel_size"], values["quantization"]) == ("org/m", "4", "fp8")
    assert [event.sizes for event in events if isinstance(event, say.GraphSizes)] == [(1, 2, 4)]
    assert [event.exact for event in events if isinstance(event, say.Release)] == ["0.20.0"]


LIMITS = {
    "GPU KV cache size: 1,234,567 tokens": ("kv_tokens", 1234567),
    "GPU KV cache size: 1,234,567 tokens, Maximum concurrency for 40,960 tokens per request: 12.3x": (
        "kv_tokens",
        1234567,
    ),
    "Chunked prefill is enabled with max_num_batched_tokens=8192.": ("prefill_chunk", 8192),
}


@pytest.mark.parametrize(("text", "expected"), LIMITS.items(), ids=range(len(LIMITS)))
def test_limits(text: str, expected: tuple[str, int]) -> None:
    (limit,) = GRAMMAR.read(text)
    assert isinstance(limit, say.Limit)
    assert (limit.name, limit.value) == expected


# Words of the grammar to a release whose wheel holds them.
WORDS = {
    "Using default MoE config. Performance might be sub-optimal! ": "0.33.0",
    "Using configuration from %s for MoE layer.": "0.33.0",
    "Using DeepGemm kernels for Fp8MoEMethod.": "0.11.0",
    "Using Triton backend for FP8 MoE": "0.12.0",
    "} Unquantized MoE backend out ": "0.20.0",
    "} Fp8 MoE backend out ": "0.33.0",
    "' WNA16 MoE backend.": "0.33.0",
    "LLM engine (v%s) with config: ": "0.33.0",
    "non-default args: %s": "0.33.0",
    "vLLM API server version %s": "0.11.0",
    "vLLM server version %s, serving model %s": "0.33.0",
    "Resolved architecture: %s": "0.33.0",
    "Chunked prefill is enabled with max_num_batched_tokens=%d.": "0.33.0",
    "KV cache size: %s tokens": "0.33.0",
    "Graph capturing finished in ": "0.33.0",
    "Failed to initialize Flashinfer allreduce workspace": "0.33.0",
}


def test_the_words_stand_in_the_wheels() -> None:
    texts: dict[str, str] = {}
    for words, version in WORDS.items():
        if version not in texts:
            names = [n for n in members("vllm", version) if n.startswith("vllm/") and n.endswith(".py")]
            texts[version] = "\n".join(read_member("vllm", version, name) for name in names)
        assert words in texts[version], (words, version)

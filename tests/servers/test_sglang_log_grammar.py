"""SGLang's log lines, against what the wheels' own rules print and against the wheels' own text."""

from __future__ import annotations

import pytest

from moetune.domain.gpu import find_gpu
from moetune.domain.model import read_expert_layer
from moetune.domain.packaged_models import packaged_models
from moetune.domain.problem import KERNELS, Parallelism
from moetune.servers import log_events as say
from moetune.servers.protocol import ConfigTree, Outcome, ServerOptions
from moetune.servers.sglang import open_sglang
from moetune.servers.sglang.log_grammar import RULES, SGLangLogGrammar
from tests.wheels import members, read_member

GRAMMAR = SGLangLogGrammar()
VERSIONS = ("0.5.1", "0.5.5", "0.5.6", "0.5.10", "0.5.12", "0.5.16", "0.5.23")
ROOT = "/site-packages/sglang/srt/layers/moe/fused_moe_triton"


def lines(
    version: str, directories: dict[str, frozenset[str]], deterministic: bool = False
) -> list[tuple[str, str]]:
    """What the lookup of a release prints; its words are held to the wheels' by other tests."""
    server = open_sglang(version)
    model = packaged_models()["Qwen/Qwen3-30B-A3B"]
    layer = read_expert_layer(model.config, name="m", source="test")
    problem = server.problem(layer, Parallelism(tp=2), find_gpu("NVIDIA H200"), ServerOptions())
    found = []
    for kernel in KERNELS:
        options = ServerOptions(deterministic=deterministic)
        lookup = server.lookup(problem, kernel, [ConfigTree(ROOT, directories)], options)
        found += [(lookup.outcome.value, text) for _, text in lookup.log_lines]
    return found


UP, DOWN = "E=128,N=384,device_name=NVIDIA_H200.json", "E=128,N=384,device_name=NVIDIA_H200_down.json"


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_there(version: str) -> None:
    printed = lines(version, {"triton_3_0_0": frozenset()})
    events = [event for _, text in printed for event in GRAMMAR.read(text)]
    missing = [event for event in events if isinstance(event, say.ConfigMissing)]
    assert missing[0].names[0].file == UP
    assert len(missing) == len(printed)
    assert all(event.names[0].E == 128 and event.names[0].N == 384 for event in missing)
    assert missing[0].names[0].triton == open_sglang(version).triton_version


@pytest.mark.parametrize("version", VERSIONS)
def test_all_there(version: str) -> None:
    here = "triton_" + open_sglang(version).triton_version.replace(".", "_")
    printed = lines(version, {here: frozenset({UP, DOWN})})
    events = [event for _, text in printed for event in GRAMMAR.read(text)]
    found = [event.name.file for event in events if isinstance(event, say.ConfigFound)]
    assert found == ([UP, DOWN] if open_sglang(version).separate_down_file else [UP])


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_stale(version: str) -> None:
    printed = lines(version, {"triton_3_2_0": frozenset({UP, DOWN})})
    events = [
        event for outcome, text in printed for event in GRAMMAR.read(text) if outcome == Outcome.STALE.value
    ]
    stale = [event for event in events if isinstance(event, say.ConfigStale)]
    assert [event.found.triton for event in stale] == ["3.2.0", "3.2.0"]
    assert stale[0].wanted.triton == open_sglang(version).triton_version
    assert stale[1].wanted.kernel == "down"


def test_down_missing_by_release() -> None:
    def down(version: str) -> say.ConfigMissing:
        here = "triton_" + open_sglang(version).triton_version.replace(".", "_")
        printed = lines(version, {here: frozenset({UP})})
        events = [event for _, text in printed for event in GRAMMAR.read(text)]
        (missing,) = [event for event in events if isinstance(event, say.ConfigMissing)]
        return missing

    assert [down(v).down_only for v in ("0.5.5", "0.5.6", "0.5.12", "0.5.16")] == [False, True, True, True]
    assert [down(v).reused_up for v in ("0.5.5", "0.5.12", "0.5.16", "0.5.23")] == [False, False, True, True]
    assert all(down(v).names[0].kernel == "down" for v in VERSIONS[1:])


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_case_5_deterministic(version: str) -> None:
    events = [event for _, text in lines(version, {}, deterministic=True) for event in GRAMMAR.read(text)]
    assert any(isinstance(event, say.FilesIgnored) for event in events)


def test_lines_bound_the_release() -> None:
    def bounds(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (release,) = [event for event in GRAMMAR.read(text) if isinstance(event, say.Release)]
        return release.since, release.until

    assert bounds("server_args=ServerArgs(model_path='m')") == ((), (0, 5, 19))
    assert bounds("server_args={'model_path': 'm'}") == ((0, 5, 19), ())
    assert bounds("down_moe config BLOCK_SIZE_M=16 does not match up config BLOCK_SIZE_M=64 at M=8; x")[
        0
    ] == (0, 5, 13)
    assert bounds("Up MoE TMA is enabled (USE_TMA=true in the up-projection config).")[0] == (0, 5, 18)


def test_arguments_of_both_notations() -> None:
    for text in (
        "server_args=ServerArgs(model_path='org/m', tp_size=8, ep_size=2, quantization=None, "
        "cuda_graph_bs=[1, 2])",
        "server_args={'model_path': 'org/m', 'tp_size': 8, 'ep_size': 2, 'quantization': None, "
        "'cuda_graph_bs': [1, 2]}",
    ):
        (arguments,) = [event for event in GRAMMAR.read(text) if isinstance(event, say.Arguments)]
        values = dict(arguments.values)
        assert values["model_path"] == "org/m"
        assert (values["tp_size"], values["ep_size"], values["quantization"]) == ("8", "2", "None")
        assert values["cuda_graph_bs"] == "[1, 2]"


def test_names_that_only_look_like_arguments_are_none() -> None:
    (arguments,) = [
        event
        for event in GRAMMAR.read("server_args=ServerArgs(draft_tp_size=4, tp_size=2, path='x tp_size=9')")
        if isinstance(event, say.Arguments)
    ]
    assert dict(arguments.values)["tp_size"] == "2"


GRAPHS = {
    "0.5.6": ("Capture cuda graph bs [1, 2, 4]", "decode", (1, 2, 4), 1),
    "0.5.9 prefill": ("Capture cuda graph num tokens [4, 8, 16]", "prefill", (4, 8, 16), 1),
    "0.5.12 breakable": ("[BCG] Capture num tokens: [4, 8]", "prefill", (4, 8), 1),
    "0.5.15": (
        "Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2], avail",
        "decode",
        (1, 2),
        1,
    ),
    "0.5.15 verify": (
        "Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=4, bs=[1, 2], avail",
        "decode",
        (1, 2),
        4,
    ),
    "0.5.23": ("Capture target decode CUDA graph end. bs=[1, 8], elapsed=1 s", "decode", (1, 8), 0),
    "0.5.23 prefill": (
        "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=1 GB",
        "prefill",
        (4, 8),
        0,
    ),
}


@pytest.mark.parametrize(("text", "phase", "sizes", "each"), GRAPHS.values(), ids=GRAPHS.keys())
def test_graph_sizes_of_all_releases(text: str, phase: str, sizes: tuple[int, ...], each: int) -> None:
    (graphs,) = [event for event in GRAMMAR.read(text) if isinstance(event, say.GraphSizes)]
    assert (graphs.phase, graphs.sizes, graphs.tokens_per_request) == (phase, sizes, each)


def test_the_draft_models_graphs_are_not_the_models() -> None:
    assert not GRAMMAR.read(
        "Capture draft decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2]"
    )


RUNNERS = {
    "Use flashinfer_trtllm as MoE runner backend on sm100 for Qwen3MoeForCausalLM": (
        "flashinfer_trtllm",
        False,
    ),
    "Detected GPT-OSS model, enabling triton_kernels MOE kernel.": ("triton_kernels", False),
    "Detected SM100 and MXFP4 quantization format for GPT-OSS model, enabling FlashInfer MXFP4 MOE kernel.": (
        "flashinfer",
        False,
    ),
    "The model is convertible to awq_marlin during runtime. Using awq_marlin kernel.": ("marlin", False),
    "Using CompressedTensorsWNA16MarlinMoEMethod": ("marlin", False),
    "Layer x is not supported by AWQMoeMarlin. Falling back to Moe WNA16 kernels.": (
        "triton (moe_wna16)",
        True,
    ),
    "server_args=ServerArgs(moe_runner_backend='deep_gemm')": ("deep_gemm", False),
}


@pytest.mark.parametrize(("text", "expected"), RUNNERS.items(), ids=range(len(RUNNERS)))
def test_case_4_other_runners(text: str, expected: tuple[str, bool]) -> None:
    (runner,) = [event for event in GRAMMAR.read(text) if isinstance(event, say.RunnerChosen)]
    assert (runner.runner, runner.reads_file) == expected


def test_every_line_holds_a_needle() -> None:
    """The reader looks for needles only: a rule whose line holds none would never be asked."""
    needles = [needle.decode() for needle in GRAMMAR.needles]
    shared = (
        "lash",
        "isabl",
        "arlin",
        "FlashInfer",
        "sglang/",
        "CUDA graph",
    )  # each asked below by its lines
    for rule in RULES:
        if rule.literal not in shared:
            assert any(needle in rule.literal or needle in rule.pattern.pattern for needle in needles), (
                rule.literal
            )


# Words of the grammar to a release whose wheel holds them. Formatted text stands there in pieces.
WORDS = {
    "Using MoE kernel config from": "0.5.6",
    "Fallback to triton version": "0.5.6",
    "Using MoE kernel config with down_moe=False": "0.5.12",
    "Down MoE config file not found at": "0.5.16",
    "Using default W8A8 Block FP8 kernel config": "0.5.6",
    "Deterministic inference is enabled, using default MoE kernel config": "0.5.23",
    "down_moe config BLOCK_SIZE_M=": "0.5.23",
    "Up MoE TMA is enabled": "0.5.23",
    "max_total_num_tokens=": "0.5.23",
    "KV Cache is allocated": "0.5.23",
    "Capture cuda graph bs": "0.5.12",
    "Capture cuda graph num tokens": "0.5.6",
    "[BCG] Capture num tokens": "0.5.12",
    "Disable prefill CUDA graph because": "0.5.23",
    "Failed to initialize FlashInfer workspace": "0.5.12",
    "as MoE runner backend": "0.5.23",
    "is convertible to": "0.5.6",
    "Falling back to Moe WNA16 kernels": "0.5.6",
    "Load weight begin. avail mem=": "0.5.23",
    "The server is fired up and ready to roll": "0.5.23",
    "Received sigquit from a child process": "0.5.23",
}


def test_the_words_stand_in_the_wheels() -> None:
    texts: dict[str, str] = {}
    for words, version in WORDS.items():
        if version not in texts:
            names = [
                n for n in members("sglang", version) if n.startswith("sglang/srt/") and n.endswith(".py")
            ]
            texts[version] = "\n".join(read_member("sglang", version, name) for name in names)
        assert words in texts[version], (words, version)

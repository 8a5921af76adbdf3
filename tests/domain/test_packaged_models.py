"""Every packaged checkpoint reads, and has the numbers of its source."""

from __future__ import annotations

import pytest

from moetune.domain.model import ExpertLayer, read_expert_layer
from moetune.domain.packaged_models import find_packaged, nearest_packaged, packaged_models
from moetune.domain.quantization import Dtype


def read(name: str) -> ExpertLayer:
    packaged = packaged_models()[name]
    return read_expert_layer(
        packaged.config, name=name, source="packaged", hf_quant_config=packaged.hf_quant_config
    )


# Experts, topk, hidden, intermediate; written by hand from the published table of checkpoints.
BY_HAND = {
    "Qwen/Qwen3.5-122B-A10B": (256, 8, 3072, 1024),
    "Qwen/Qwen3.5-397B-A17B": (512, 10, 4096, 1024),
    "Qwen/Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (160, 8, 6144, 2560),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (128, 8, 4096, 1536),
    "google/gemma-4-26B-A4B": (128, 8, 2816, 704),
    "moonshotai/Kimi-K3": (896, 16, 7168, 3072),
    "moonshotai/Kimi-K2-Instruct": (384, 8, 7168, 2048),
    "moonshotai/Kimi-K2.5": (384, 8, 7168, 2048),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (512, 22, 4096, 2688),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (128, 6, 2688, 1856),
    "deepseek-ai/DeepSeek-V3": (256, 8, 7168, 2048),
    "deepseek-ai/DeepSeek-V4-Pro": (384, 6, 7168, 3072),
    "mistralai/Mixtral-8x7B-v0.1": (8, 2, 4096, 14336),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (128, 1, 5120, 8192),
    "openai/gpt-oss-120b": (128, 4, 2880, 2880),
    "stepfun-ai/Step-3.7-Flash": (288, 8, 4096, 1280),
    "zai-org/GLM-5": (256, 8, 6144, 2048),
    "MiniMaxAI/MiniMax-M2.5": (256, 8, 3072, 1536),
    "MiniMaxAI/MiniMax-M3": (128, 4, 6144, 3072),
    "XiaomiMiMo/MiMo-V2-Flash": (256, 8, 4096, 2048),
    "Qwen/Qwen1.5-MoE-A2.7B": (60, 4, 2048, 1408),
    "baidu/ERNIE-4.5-21B-A3B-PT": (64, 6, 2560, 1536),
    "meituan-longcat/LongCat-Flash-Chat": (512, 12, 6144, 2048),
}


@pytest.mark.parametrize("name", sorted(packaged_models()))
def test_every_packaged_checkpoint_reads(name: str) -> None:
    layer = read(name)
    assert 1 <= layer.topk < layer.num_experts
    assert layer.architecture
    assert layer.hidden_size % 64 == 0
    expected = BY_HAND.get(name)
    if expected is not None:
        assert (layer.num_experts, layer.topk, layer.hidden_size, layer.intermediate_size) == expected
    # A name that says how its weights are quantized is not contradicted by what is packaged.
    if "NVFP4" in name:
        assert layer.quantization.dtype is Dtype.NVFP4
    elif "FP8" in name:
        assert layer.quantization.dtype is Dtype.FP8_W8A8
    elif "BF16" in name:
        assert layer.quantization.dtype is Dtype.BF16


def test_all_of_the_checkpoints_by_hand_are_packaged() -> None:
    assert set(BY_HAND) <= set(packaged_models())
    assert len(packaged_models()) >= 78


def test_latent_sizes_gates_and_shared_experts() -> None:
    nemotron = read("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8")
    assert (nemotron.latent_size, nemotron.gated, nemotron.shared_intermediate_size) == (1024, False, 5376)
    assert read("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16").latent_size == 2048
    # Its config says 3584 for the columns that enter the experts; 7168 is the residual stream.
    kimi = read("moonshotai/Kimi-K3")
    assert (kimi.latent_size, kimi.gated, kimi.num_shared_experts) == (3584, True, 2)
    assert read("openai/gpt-oss-20b").bias
    assert read("Qwen/Qwen3.5-122B-A10B").shared_intermediate_size == 1024
    assert read("Qwen/Qwen3-30B-A3B").num_shared_experts == 0
    assert read("deepseek-ai/DeepSeek-V3").num_shared_experts == 1


@pytest.mark.parametrize(
    ("name", "dtype", "block", "group"),
    [
        ("deepseek-ai/DeepSeek-V3", Dtype.FP8_W8A8, (128, 128), None),
        ("deepseek-ai/DeepSeek-V4-Flash", Dtype.MXFP4, None, 32),
        ("sgl-project/DeepSeek-V4-Flash-FP8", Dtype.FP8_W8A8, (128, 128), None),
        ("nvidia/DeepSeek-V4-Flash-NVFP4", Dtype.NVFP4, None, 16),
        ("moonshotai/Kimi-K2.5", Dtype.INT4_W4A16, None, 32),
        ("moonshotai/Kimi-K3", Dtype.MXFP4, None, 32),
        ("nvidia/DeepSeek-V3.1-NVFP4", Dtype.NVFP4, None, 16),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", Dtype.FP8_W8A8, None, None),
        ("openai/gpt-oss-120b", Dtype.MXFP4, None, 32),
        ("Qwen/Qwen3-30B-A3B", Dtype.BF16, None, None),
    ],
)
def test_quantization_of_packaged_checkpoints(
    name: str, dtype: Dtype, block: tuple[int, int] | None, group: int | None
) -> None:
    quantization = read(name).quantization
    assert (quantization.dtype, quantization.block_shape, quantization.group_size) == (dtype, block, group)


def test_weights_only_nvfp4_has_no_quantized_activations() -> None:
    assert read("nvidia/Qwen3.6-35B-A3B-NVFP4").quantization.dynamic_activation is None
    assert read("nvidia/Qwen3.5-122B-A10B-NVFP4").quantization.dynamic_activation is False


def test_names_match_without_organisation_and_case_when_unique() -> None:
    whole = "Qwen/Qwen3.5-122B-A10B"
    tail = whole.partition("/")[2]
    for name in (whole, whole.lower(), tail, tail.lower()):
        found = find_packaged(name)
        assert found is not None
        assert found.name == whole
    assert find_packaged("unsloth/Qwen3.5-122B-A10B") is None
    assert find_packaged("Qwen3.5") is None


def test_near_names_are_offered() -> None:
    assert nearest_packaged("Qwen/Qwen3.5-122B-A10")[0] == "Qwen/Qwen3.5-122B-A10B"
    assert "Qwen/Qwen3-30B-A3B" in nearest_packaged("unsloth/Qwen3-30B-A3B-GGUF")
    assert nearest_packaged("zzzz") == ()
    assert len(nearest_packaged("Qwen" * 100000)) <= 3


def test_every_row_says_where_it_is_from() -> None:
    assert {model.origin.split()[0] for model in packaged_models().values()} == {"config.json", "defaults"}

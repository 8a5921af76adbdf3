"""What a user relies on when a config.json is read: the right numbers, or an error that helps."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import ModelError, MoetuneError
from moetune.domain.model import ExpertLayer, LayerOverrides, read_expert_layer
from moetune.domain.model_keys import EXPERT_SIZE_KEYS, FIELD_KEYS, NESTS
from moetune.domain.quantization import Dtype, Quantization

Config = dict[str, Any]

CLEAR: Config = {
    "architectures": ["SomethingNewForCausalLM"],
    "model_type": "something_new",
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "dtype": "bfloat16",
}


def read(config: Config, **by_hand: Any) -> ExpertLayer:
    return read_expert_layer(config, name="m", source="test", overrides=LayerOverrides(**by_hand))


def sizes(layer: ExpertLayer) -> tuple[int, int, int, int]:
    return layer.num_experts, layer.topk, layer.hidden_size, layer.intermediate_size


def test_case_11_gemma_4_in_its_text_config() -> None:
    text = {
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "intermediate_size": 2112,
        "hidden_size": 2816,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    layer = read({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text})
    assert sizes(layer) == (128, 8, 2816, 704)
    assert layer.gated
    with pytest.raises(ModelError, match=r"dense.*enable_moe_block"):
        read({"text_config": {**text, "enable_moe_block": False}})


def test_case_12_kimi_k3_says_per_token() -> None:
    config = {
        "text_config": {
            "num_experts": 896,
            "num_experts_per_token": 16,
            "top_k": 50,  # of sampling, not of routing
            "moe_intermediate_size": 3072,
            "hidden_size": 7168,
            "routed_expert_hidden_size": 3584,
            "num_shared_experts": 2,
            "hidden_act": "situ",
        }
    }
    layer = read(config)
    assert sizes(layer) == (896, 16, 7168, 3072)
    assert layer.latent_size == 3584
    assert (layer.num_shared_experts, layer.shared_intermediate_size) == (2, 6144)


def test_case_13_text_config_without_architectures_has_the_parents() -> None:
    nested = {key: value for key, value in CLEAR.items() if key != "architectures"}
    layer = read({"architectures": ["ParentForConditionalGeneration"], "text_config": nested})
    assert layer.architecture == "ParentForConditionalGeneration"
    # A text config with a name of its own does not replace the parent's: servers choose by that.
    layer = read({"architectures": ["ParentForConditionalGeneration"], "text_config": CLEAR})
    assert layer.architecture == "ParentForConditionalGeneration"


def test_case_14_lists_of_equal_values() -> None:
    hunyuan = {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "moe_intermediate_size": [3072] * 32,
        "num_shared_expert": [1] * 32,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    layer = read(hunyuan)
    assert sizes(layer) == (64, 8, 4096, 3072)
    assert layer.num_shared_experts == 1


def test_case_14_dense_layers_do_not_count() -> None:
    config = {**CLEAR, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    assert read({**config, "moe_intermediate_size": [0, 1408, 1408, 1408]}).intermediate_size == 1408
    assert read({**config, "moe_intermediate_size": [11264, 1408, 1408, 1408]}).intermediate_size == 1408


def test_case_14_a_list_of_different_values_is_shown() -> None:
    config = {**CLEAR, "num_hidden_layers": 4, "moe_intermediate_size": [1408, 1408, 512, 1408]}
    with pytest.raises(ModelError, match=r"moe_intermediate_size differs.*512, 1408") as caught:
        read(config)
    assert "--intermediate" in (caught.value.hint or "")
    assert read(config, intermediate=512).intermediate_size == 512


def test_case_15_an_unknown_architecture_with_clear_keys_works() -> None:
    assert sizes(read(CLEAR)) == (64, 6, 2048, 1408)


def test_case_15_an_ambiguous_size_is_no_guess() -> None:
    config = {key: value for key, value in CLEAR.items() if key != "moe_intermediate_size"}
    with pytest.raises(ModelError, match="not known whether intermediate_size") as caught:
        read(config)
    assert "intermediate_size=11264" in caught.value.message
    assert "num_experts=64" in caught.value.message
    assert "--intermediate" in (caught.value.hint or "")
    assert read(config, intermediate=1408).intermediate_size == 1408


@pytest.mark.parametrize(
    ("missing", "flag"),
    [
        ("num_experts", "--experts"),
        ("num_experts_per_tok", "--topk"),
        ("hidden_size", "--hidden"),
    ],
)
def test_case_15_a_missing_number_names_the_keys_seen_and_the_flag(missing: str, flag: str) -> None:
    config = {key: value for key, value in CLEAR.items() if key != missing}
    config["expert_frobnication"] = 3
    with pytest.raises(ModelError) as caught:
        read(config)
    assert "expert_frobnication=3" in caught.value.message
    assert flag in (caught.value.hint or "")


def test_two_keys_that_disagree_are_shown() -> None:
    with pytest.raises(ModelError, match=r"num_experts=64.*n_routed_experts=128"):
        read({**CLEAR, "n_routed_experts": 128})
    assert read({**CLEAR, "n_routed_experts": 64}).num_experts == 64
    assert read({**CLEAR, "n_routed_experts": 128}, experts=128).num_experts == 128


NEMOTRON: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "hidden_size": 4096,
    "moe_latent_size": 1024,
    "intermediate_size": 2688,
    "moe_intermediate_size": 2688,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 5376,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "hybrid_override_pattern": "MEM*E",
}


def test_case_16_nemotron_h_has_a_latent_size_and_no_gate() -> None:
    layer = read(NEMOTRON)
    assert sizes(layer) == (512, 22, 4096, 2688)
    assert layer.latent_size == 1024
    assert not layer.gated
    assert (layer.num_shared_experts, layer.shared_intermediate_size) == (1, 5376)
    assert layer.num_moe_layers == 2
    assert read({**NEMOTRON, "moe_latent_size": None}).latent_size is None


def test_case_16_relu2_of_an_unknown_model_is_no_guess() -> None:
    with pytest.raises(ModelError, match="hidden_act is relu2") as caught:
        read({**CLEAR, "hidden_act": "relu2"})
    assert "--gated" in (caught.value.hint or "")
    assert not read({**CLEAR, "hidden_act": "relu2"}, gated=False).gated
    assert read({**CLEAR, "hidden_act": "relu2"}, gated=True).gated


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ({}, (0, None)),
        ({"n_shared_experts": None}, (0, None)),
        ({"n_shared_experts": 1}, (1, 1408)),
        ({"n_shared_experts": 2}, (2, 2816)),
        ({"num_shared_experts": 2}, (2, 2816)),
        ({"shared_expert_intermediate_size": 512}, (1, 512)),
        ({"shared_expert_intermediate_size": 0}, (0, None)),
        ({"shared_intermediate_size": 0}, (0, None)),
        ({"n_shared_experts": 1, "share_expert_dim": 1280}, (1, 1280)),
    ],
)
def test_case_10_shared_experts_by_number_or_by_size(
    shared: Config, expected: tuple[int, int | None]
) -> None:
    layer = read({**CLEAR, **shared})
    assert (layer.num_shared_experts, layer.shared_intermediate_size) == expected


def test_gpt_oss_has_biases_and_its_size_in_intermediate_size() -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        },
    }
    layer = read(config)
    assert layer.bias
    assert sizes(layer) == (128, 4, 2880, 2880)
    assert layer.quantization.dtype is Dtype.MXFP4
    assert not read(CLEAR).bias


def test_dbrx_keeps_its_experts_in_ffn_config() -> None:
    config = {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "d_model": 6144,
        "n_layers": 40,
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "moe_num_experts": 16,
            "moe_top_k": 4,
            "moe_loss_weight": 0.05,
        },
    }
    layer = read(config)
    assert sizes(layer) == (16, 4, 6144, 10752)
    assert layer.num_moe_layers == 40


def test_the_thinker_is_read_and_not_the_talker() -> None:
    thinker = {**CLEAR, "num_experts": 128}
    talker = {**CLEAR, "num_experts": 32}
    config = {"thinker_config": {"text_config": thinker}, "talker_config": {"text_config": talker}}
    layer = read(config)
    assert layer.num_experts == 128
    assert dict(layer.provenance)["num_experts"] == "thinker_config.text_config.num_experts"


def test_parts_with_different_experts_are_shown() -> None:
    with pytest.raises(ModelError, match=r"(?s)several parts.*64.*32"):
        read({"text_config": CLEAR, "llm_config": {**CLEAR, "num_experts": 32}})
    assert read({"text_config": CLEAR, "llm_config": CLEAR}).num_experts == 64


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008},
        {**CLEAR, "num_experts": 1},
        {**CLEAR, "num_experts": 0},
        {**CLEAR, "is_moe": False},
        {"text_config": {"hidden_size": 5376, "intermediate_size": 21504, "num_experts": None}},
        {},
    ],
)
def test_a_dense_model_is_called_dense(config: Config) -> None:
    with pytest.raises(ModelError, match="dense model"):
        read(config)


def test_what_is_given_by_hand_wins_and_provenance_says_so() -> None:
    layer = read(
        {**CLEAR, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        experts=8,
        topk=2,
        hidden=512,
        intermediate=256,
        latent=128,
        shared_experts=1,
        gated=False,
        quant="fp8-block[128,128]",
    )
    assert sizes(layer) == (8, 2, 512, 256)
    assert (layer.latent_size, layer.num_shared_experts, layer.gated) == (128, 1, False)
    assert layer.quantization.block_shape == (128, 128)
    assert layer.architecture == "SomethingNewForCausalLM"
    by_hand = {field for field, place in layer.provenance if place == "by hand"}
    assert by_hand >= {
        "num_experts",
        "topk",
        "hidden_size",
        "intermediate_size",
        "latent_size",
        "quantization",
    }


def test_with_all_sizes_by_hand_no_config_is_needed() -> None:
    layer = read({}, experts=256, topk=8, hidden=3072, intermediate=1024)
    assert sizes(layer) == (256, 8, 3072, 1024)
    assert layer.quantization == Quantization(dtype=Dtype.BF16)
    # Nor does a config that cannot be read stand in the way.
    broken = {"text_config": {"num_experts": "many", "hidden_size": 1.5}}
    assert sizes(read(broken, experts=256, topk=8, hidden=3072, intermediate=1024)) == (256, 8, 3072, 1024)


def test_provenance_names_the_keys() -> None:
    provenance = dict(read({"text_config": CLEAR}).provenance)
    assert provenance["num_experts"] == "text_config.num_experts"
    assert provenance["intermediate_size"] == "text_config.moe_intermediate_size"
    assert provenance["activation_dtype"] == "text_config.dtype"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, Dtype.BF16),
        ({"dtype": None, "torch_dtype": "float16"}, Dtype.FP16),
        ({"dtype": None, "torch_dtype": "torch.float16"}, Dtype.FP16),
        ({"dtype": "float32"}, Dtype.BF16),  # the servers halve it
        ({"dtype": None}, Dtype.BF16),
        ({"dtype": "auto"}, Dtype.BF16),
    ],
)
def test_dtype_of_the_hidden_states(keys: Config, expected: Dtype) -> None:
    layer = read({**CLEAR, **keys})
    assert layer.activation_dtype is expected
    assert layer.quantization.dtype is expected


def test_a_dtype_by_hand_and_one_that_is_unknown() -> None:
    assert read(CLEAR, quant="fp32").activation_dtype is Dtype.FP32
    assert read(CLEAR, quant="fp16").quantization.dtype is Dtype.FP16
    with pytest.raises(ModelError, match="float12"):
        read({**CLEAR, "dtype": "float12"})


def test_quantization_of_the_parent_of_the_child_and_of_modelopts_file() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert read({"text_config": CLEAR, "quantization_config": fp8}).quantization.block_shape == (128, 128)
    assert read({"text_config": {**CLEAR, "quantization_config": fp8}}).quantization.block_shape == (128, 128)
    assert read({**CLEAR, "compression_config": fp8}).quantization.block_shape == (128, 128)
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}

    def with_file(config: Config) -> Dtype:
        layer = read_expert_layer(config, name="m", source="test", hf_quant_config=file)
        return layer.quantization.dtype

    assert with_file(CLEAR) is Dtype.NVFP4
    assert with_file({**CLEAR, "quantization_config": {"quant_method": "modelopt"}}) is Dtype.NVFP4
    assert with_file({**CLEAR, "quantization_config": fp8}) is Dtype.FP8_W8A8


def test_deepseek_v4_experts_are_fp4_though_the_method_is_fp8() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {**CLEAR, "quantization_config": fp8}
    assert read({**config, "expert_dtype": "fp4"}).quantization.dtype is Dtype.MXFP4
    assert read({**config, "expert_dtype": "fp8"}).quantization.dtype is Dtype.FP8_W8A8
    nvfp4 = {**fp8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    assert (
        read({**config, "expert_dtype": "fp4", "quantization_config": nvfp4}).quantization.dtype
        is Dtype.NVFP4
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 28),
        ({"first_k_dense_replace": 3}, 25),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 13),
        ({"moe_layer_freq": [0] * 4 + [1] * 24}, 24),
        ({"interleave_moe_layer_step": 2}, 14),
        ({"decoder_sparse_step": 2}, 14),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, 26),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 14),
        ({"moe_layer_start_index": 1, "moe_layer_interval": 1}, 27),
        ({"moe_layers_enum": "4,5,6"}, 3),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 27}, 27),
        ({"num_hidden_layers": None}, None),
    ],
)
def test_layers_with_experts(keys: Config, expected: int | None) -> None:
    assert read({**CLEAR, **keys}).num_moe_layers == expected


@pytest.mark.parametrize("key", sorted({k for f in ("num_experts", "topk") for k in FIELD_KEYS[f]}))
def test_every_name_of_the_table_is_read(key: str) -> None:
    field = next(f for f in ("num_experts", "topk") if key in FIELD_KEYS[f])
    config = {k: v for k, v in CLEAR.items() if k not in FIELD_KEYS[field]}
    assert getattr(read({**config, key: 32}), field) == 32


@pytest.mark.parametrize("kind", sorted(EXPERT_SIZE_KEYS))
def test_kinds_whose_expert_size_stands_elsewhere(kind: str) -> None:
    config = {k: v for k, v in CLEAR.items() if k not in ("moe_intermediate_size", "intermediate_size")}
    config |= {EXPERT_SIZE_KEYS[kind]: 777, "model_type": kind}
    assert read(config).intermediate_size == 777
    # A key that can only mean experts wins over it.
    assert read({**config, "moe_intermediate_size": 555}).intermediate_size == 555


@given(st.lists(st.sampled_from([n for n in NESTS if n not in ("ffn_config", "moe_config")]), max_size=4))
def test_any_nesting_gives_the_same_layer(path: list[str]) -> None:
    config = copy.deepcopy(CLEAR)
    for key in reversed(path):
        config = {key: config, "vision_config": {"hidden_size": 1, "num_experts": 7}}
    layer = read(config)
    flat = read(CLEAR)
    assert sizes(layer) == sizes(flat)
    assert (layer.architecture, layer.model_type, layer.num_moe_layers) == (
        flat.architecture,
        flat.model_type,
        flat.num_moe_layers,
    )


KNOWN_KEYS = sorted(
    {
        *itertools.chain.from_iterable(FIELD_KEYS.values()),
        *NESTS,
        "architectures",
        "model_type",
        "intermediate_size",
        "quantization_config",
        "first_k_dense_replace",
        "moe_layer_freq",
        "mlp_layer_types",
        "mlp_only_layers",
        "moe_layers_enum",
        "hybrid_override_pattern",
        "layers_block_type",
        "expert_dtype",
        "enable_moe_block",
        "decoder_sparse_step",
        "expert_layer_period",
        "expert_layer_offset",
        "moe_layer_interval",
        "moe_layer_start_index",
    }
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["fp8", "mixtral", "modelopt", "relu2", "nemotron_h", "bfloat16", "E", "moe"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KNOWN_KEYS) | st.text(max_size=6), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(KNOWN_KEYS), JSON, max_size=8), st.booleans())
def test_no_config_gives_another_error_than_ours(keys: Config, over_a_valid_one: bool) -> None:
    config = {**CLEAR, **keys} if over_a_valid_one else keys
    message = ""
    try:
        layer = read(config)
    except MoetuneError as refused:
        message = f"{refused.message} {refused.hint}"
    else:
        assert 1 <= layer.topk <= layer.num_experts
        assert min(layer.hidden_size, layer.intermediate_size) >= 1
    assert message.isprintable()


@given(JSON)
def test_a_value_that_is_no_size_is_named(value: object) -> None:
    """Nothing but a whole number, or a list that agrees, is ever taken for the hidden size."""
    try:
        layer = read({**CLEAR, "hidden_size": value})
    except ModelError:
        return
    members = value if isinstance(value, list) else [value]
    assert {v for v in members if v} == {layer.hidden_size}


def test_text_of_a_config_is_fit_for_a_terminal() -> None:
    layer = read({**CLEAR, "architectures": ["Evil\x1b[31mForCausalLM"], "model_type": "x\ny"})
    assert layer.architecture.isprintable()
    assert layer.model_type.isprintable()
    with pytest.raises(ModelError) as caught:
        read({**CLEAR, "hidden_size": "\x1b]0;title\x07"})
    assert caught.value.message.isprintable()


def test_sizes_that_no_model_has_are_refused() -> None:
    for value in (-1, 1 << 40, True, 2.0, "64", float("nan")):
        with pytest.raises(ModelError, match="hidden_size"):
            read({**CLEAR, "hidden_size": value})
    with pytest.raises(ModelError, match="65 of 64"):
        read({**CLEAR, "num_experts_per_tok": 65})
    with pytest.raises(ModelError, match="by hand"):
        read(CLEAR, experts=1 << 20)

"""How the routed experts of a checkpoint are quantized, from every kind of config that the servers read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import ModelError
from moetune.domain.expert_modules import ExpertModules
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_config import METHODS, read_quantization

Config = dict[str, Any]
LAYERS = ExpertModules(layers=tuple(range(3, 61)))


def read(config: Config | None, experts: ExpertModules = LAYERS, **more: Any) -> Quantization:
    return read_quantization(config, experts=experts, **more).quantization


def test_no_config_is_the_type_of_the_hidden_states() -> None:
    assert read(None) == Quantization(dtype=Dtype.BF16)
    assert read({}, activation_dtype=Dtype.FP16) == Quantization(dtype=Dtype.FP16)


def test_fp8_block() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert read(config) == Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)


@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}])
def test_case_20_fp8_without_a_block_size_has_no_block_shape(block: Config) -> None:
    assert read({"quant_method": "fp8", "activation_scheme": "static", **block}) == Quantization(
        Dtype.FP8_W8A8, "fp8", dynamic_activation=False
    )


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "weight_block_size": [0, None]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "group_size": None},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": None},
        {"quant_method": "awq", "bits": 4, "group_size": None},
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
    ],
)
def test_case_19_null_sizes_give_no_block_shape_and_no_crash(config: Config) -> None:
    quantization = read(config)
    assert quantization.block_shape is None
    assert quantization.group_size in (None, 16)


def compressed(weights: Config, activations: Config | None = None, **more: Any) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def test_case_18_compressed_tensors_by_channel() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True}
    assert read(compressed(weights, FP8_TOKEN)) == Quantization(
        Dtype.FP8_W8A8, "compressed-tensors", per_channel=True, dynamic_activation=True
    )


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        (
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            Quantization(Dtype.FP8_W8A8, dynamic_activation=False),
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            FP8_TOKEN,
            Quantization(Dtype.FP8_W8A8, block_shape=(128, 128), dynamic_activation=True),
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"},
            FP8_TOKEN,
            Quantization(Dtype.FP8_W8A8, block_shape=(128, 64), dynamic_activation=True),
        ),
        (
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            Quantization(Dtype.INT8_W8A8, per_channel=True, dynamic_activation=True),
        ),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
            None,
            Quantization(Dtype.INT4_W4A16, group_size=32),
        ),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
            None,
            Quantization(Dtype.INT4_W4A16, group_size=128, zero_point=True),
        ),
        (
            {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
            None,
            Quantization(Dtype.INT8_W8A16, group_size=128),
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
            Quantization(Dtype.NVFP4, group_size=16, dynamic_activation=True),
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            None,
            Quantization(Dtype.MXFP4, group_size=32),
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            None,
            Quantization(Dtype.FP8_W8A16, per_channel=True),
        ),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            FP8_TOKEN,
            Quantization(Dtype.INT4_W4AFP8, group_size=128, dynamic_activation=True),
        ),
    ],
)
def test_compressed_tensors_schemes(
    weights: Config, activations: Config | None, expected: Quantization
) -> None:
    found = read(compressed(weights, activations))
    assert found.method == "compressed-tensors"
    assert found == Quantization(**{**_fields(expected), "method": "compressed-tensors"})


def _fields(quantization: Quantization) -> Config:
    return {name: getattr(quantization, name) for name in Quantization.__slots__}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def groups(**targets: tuple[list[str], Config]) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            name: {"targets": names, "weights": weights, "input_activations": None}
            for name, (names, weights) in targets.items()
        },
    }


def test_of_several_groups_the_one_that_names_the_experts_is_read() -> None:
    by_regex = groups(a=(["Linear"], FP8), b=([r"re:.*mlp\.experts\..*"], INT4))
    assert read(by_regex).dtype is Dtype.INT4_W4A16
    by_name = groups(
        a=(["model.layers.3.self_attn.q_proj"], FP8), b=(["model.layers.3.mlp.experts.0.gate_proj"], INT4)
    )
    assert read(by_name).dtype is Dtype.INT4_W4A16
    shared = groups(a=([r"re:.*shared_experts.*"], FP8), b=(["Linear"], INT4))
    assert read(shared).dtype is Dtype.INT4_W4A16


def test_groups_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ModelError, match="first, second") as caught:
        read(groups(first=(["Linear"], FP8), second=(["Linear"], INT4)))
    assert "--quant" in (caught.value.hint or "")
    assert read(groups(first=(["Linear"], INT4), second=(["Linear"], INT4))).dtype is Dtype.INT4_W4A16


def test_a_group_that_leaves_the_experts_alone_is_no_quantization() -> None:
    assert read(groups(a=([r"re:.*self_attn.*"], FP8))) == Quantization(dtype=Dtype.BF16)


def test_ignore_lists_of_compressed_tensors() -> None:
    config = compressed(INT4)
    moonshot = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
    assert read({**config, "ignore": moonshot}).dtype is Dtype.INT4_W4A16
    assert read({**config, "ignore": ["re:.*mlp.*"]}).dtype is Dtype.BF16
    assert read({**config, "ignore": [r"re:.*\.experts\.\d+\..*"]}).dtype is Dtype.BF16
    # llm-compressor lists parent modules whose children are quantized (the servers never match a prefix).
    assert read({**config, "ignore": ["model.layers.3.mlp.experts.0"]}).dtype is Dtype.INT4_W4A16


def test_ignore_lists_by_path_and_glob() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    for names, dtype in [
        (["lm_head", "model.layers.3.mlp.gate", "mlp.gate"], Dtype.FP8_W8A8),
        (["model.layers.*.self_attn"], Dtype.FP8_W8A8),
        (["mlp.shared_experts"], Dtype.FP8_W8A8),
        (["experts"], Dtype.BF16),
        (["mlp"], Dtype.BF16),
        (["*.mlp.experts*"], Dtype.BF16),
        ([f"model.layers.{n}" for n in range(61)], Dtype.BF16),
        ([f"model.language_model.layers.{n}.mlp.experts.0.up_proj" for n in range(61)], Dtype.BF16),
    ]:
        assert read({**fp8, "modules_to_not_convert": names}).dtype is dtype, names
        assert read({**fp8, "ignored_layers": names}).dtype is dtype, names


def test_single_layers_left_out_are_noted() -> None:
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "exclude_modules": ["lm_head", "model.layers.3.*", "model.layers.4.mlp*", "model.layers.0*"],
    }
    found = read_quantization(config, experts=LAYERS)
    assert found.quantization.dtype is Dtype.NVFP4
    assert "2 layers with experts are left out (first: 3)" in found.note


def test_the_container_of_the_experts_depends_on_the_model() -> None:
    # Gemma-4 has a dense mlp beside its experts: leaving that out leaves the experts in.
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["model.language_model.layers.*.mlp*"],
    }
    assert read(config, ExpertModules("experts", tuple(range(30)))).dtype is Dtype.NVFP4
    assert read(config).dtype is Dtype.BF16


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, (4, 128, True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, (4, 64, False)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
            (4, 128, False),
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, (8, 32, True)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, (4, 128, False)),
        ({"quant_method": "moe_wna16", "bits": 8, "group_size": 64}, (8, 64, False)),
    ],
)
def test_awq_gptq_and_their_like(config: Config, expected: tuple[int, int, bool]) -> None:
    bits, group, zero_point = expected
    found = read(config)
    assert found.dtype is {4: Dtype.INT4_W4A16, 8: Dtype.INT8_W8A16}[bits]
    assert (found.group_size, found.zero_point, found.method) == (group, zero_point, config["quant_method"])
    assert found.dynamic_activation is None
    assert found.block_shape is None


def test_gptqmodels_dynamic_rules() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    assert read({**config, "dynamic": {r"-:.*shared_expert.*": {}}}).dtype is Dtype.INT4_W4A16
    assert read({**config, "dynamic": {r"-:.*mlp\.experts.*": {}}}).dtype is Dtype.BF16
    assert read({**config, "dynamic": {r"+:.*\.experts\..*": {"bits": 8}}}).dtype is Dtype.INT8_W8A16


@pytest.mark.parametrize("bits", [2, 3, 5, None, "4", True])
def test_weights_of_other_bits_are_an_error(bits: object) -> None:
    with pytest.raises(ModelError, match="bits") as caught:
        read({"quant_method": "gptq", "bits": bits, "group_size": 128})
    assert "--quant" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("FP8", Quantization(Dtype.FP8_W8A8, "modelopt", dynamic_activation=False)),
        ("FP8_PB_WO", Quantization(Dtype.FP8_W8A8, "modelopt", (128, 128), dynamic_activation=True)),
        (
            "FP8_PER_CHANNEL_PER_TOKEN",
            Quantization(Dtype.FP8_W8A8, "modelopt", per_channel=True, dynamic_activation=True),
        ),
        ("NVFP4", Quantization(Dtype.NVFP4, "modelopt", group_size=16, dynamic_activation=False)),
        ("W4A16_NVFP4", Quantization(Dtype.NVFP4, "modelopt", group_size=16)),
        ("MXFP8", Quantization(Dtype.MXFP8, "modelopt", group_size=32, dynamic_activation=True)),
        ("W4A8_AWQ", Quantization(Dtype.INT4_W4AFP8, "modelopt", group_size=128, dynamic_activation=False)),
    ],
)
def test_modelopt_algorithms_in_both_files(algorithm: str, expected: Quantization) -> None:
    assert read({"quant_method": "modelopt", "quant_algo": algorithm}) == expected
    assert read({"quant_algo": algorithm}) == expected
    assert read({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}) == expected


def test_modelopt_mixed_precision_is_what_its_experts_have() -> None:
    layers = {
        "model.layers.3.self_attn.o_proj": {"quant_algo": "FP8"},
        "model.layers.3.mlp.shared_experts.up_proj": {"quant_algo": "FP8"},
        "model.layers.3.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.3.mlp.experts.1.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert read(config).dtype is Dtype.NVFP4
    layers["model.layers.4.mlp.experts"] = {"quant_algo": "FP8"}
    with pytest.raises(ModelError, match="FP8, NVFP4"):
        read(config)
    without = {name: value for name, value in layers.items() if ".mlp.experts" not in name}
    assert read({**config, "quantized_layers": without}) == Quantization(dtype=Dtype.BF16)


def test_modelopt_nvfp4_whose_group_has_no_activations_is_weights_only() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}}
    assert read(config).dynamic_activation is None
    group["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": False}
    assert read(config).dynamic_activation is False


def test_keys_that_single_out_the_routed_experts() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert read({**fp8, "routed_experts_quant_method": "mxfp4"}).dtype is Dtype.MXFP4
    assert read({**fp8, "store_dtype": "mxfp4"}).dtype is Dtype.MXFP4
    assert read({**fp8, "expert_dtype": "fp4"}).dtype is Dtype.MXFP4
    assert read(fp8, expert_dtype="fp4").dtype is Dtype.MXFP4
    assert read({**fp8, "moe_quant_algo": "NVFP4"}, expert_dtype="fp4").dtype is Dtype.NVFP4
    assert read(fp8, expert_dtype="fp8").block_shape == (128, 128)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "mxfp4"}, Quantization(Dtype.MXFP4, "mxfp4", group_size=32)),
        (
            {"quant_method": "mxfp8"},
            Quantization(Dtype.MXFP8, "mxfp8", group_size=32, dynamic_activation=True),
        ),
        (
            {"quant_method": "w8a8_int8"},
            Quantization(Dtype.INT8_W8A8, "w8a8_int8", per_channel=True, dynamic_activation=True),
        ),
        (
            {"quant_method": "w8a8_fp8"},
            Quantization(Dtype.FP8_W8A8, "w8a8_fp8", per_channel=True, dynamic_activation=True),
        ),
        (
            {
                "quant_method": "blockwise_int8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            Quantization(Dtype.INT8_W8A8, "blockwise_int8", (128, 128), dynamic_activation=True),
        ),
        (
            {"quant_method": "w4afp8", "group_size": 128, "activation_scheme": "static"},
            Quantization(Dtype.INT4_W4AFP8, "w4afp8", group_size=128, dynamic_activation=False),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            Quantization(Dtype.BITSANDBYTES, "bitsandbytes"),
        ),
        ({"quant_method": "GGUF"}, Quantization(Dtype.GGUF, "gguf")),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"},
                    "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True},
                },
            },
            Quantization(Dtype.FP8_W8A8, "quark", per_channel=True, dynamic_activation=True),
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
                    "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "is_dynamic": True},
                },
            },
            Quantization(Dtype.MXFP4, "quark", group_size=32, dynamic_activation=True),
        ),
    ],
)
def test_other_methods(config: Config, expected: Quantization) -> None:
    assert read(config) == expected


@pytest.mark.parametrize("method", ["aqlm", "torchao", "\x1b[31mred", "x" * 500])
def test_an_unknown_method_is_named_with_the_flag(method: str) -> None:
    with pytest.raises(ModelError) as caught:
        read({"quant_method": method})
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 800
    assert "--quant" in (caught.value.hint or "")
    if method.isalnum() and len(method) < 20:
        assert method in caught.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"bits": 4},
        {"quant_method": 4},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": "big"},
        {"quant_method": "fp8", "weight_block_size": [128, -1]},
        {"quant_method": "fp8", "weight_block_size": [128.0, 128]},
        {"quant_method": "fp8", "activation_scheme": "sometimes"},
        {"quant_method": "fp8", "modules_to_not_convert": "mlp"},
        {"quant_method": "awq", "bits": 4, "group_size": 1 << 40},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
        compressed({"num_bits": 3, "type": "int"}),
        compressed({"num_bits": [8], "type": "int"}),
        compressed({"num_bits": 8, "type": "float", "strategy": "block"}, FP8_TOKEN),
        {"quant_method": "modelopt"},
        {"quant_method": "modelopt", "quant_algo": ["FP8"]},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "quark"},
        {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}]}},
        {**compressed(INT4), "ignore": [r"re:(?<=mlp)\.experts"]},
    ],
)
def test_broken_configs_are_errors_with_a_hint(config: Config) -> None:
    with pytest.raises(ModelError) as caught:
        read(config)
    assert "--quant" in (caught.value.hint or "")


KEYS = [
    "quant_method",
    "quant_algo",
    "bits",
    "group_size",
    "sym",
    "zero_point",
    "weight_block_size",
    "activation_scheme",
    "config_groups",
    "quantized_layers",
    "weights",
    "input_activations",
    "targets",
    "ignore",
    "modules_to_not_convert",
    "dynamic",
    "global_quant_config",
    "layer_quant_config",
    "weight",
    "input_tensors",
    "quantization",
    "num_bits",
    "type",
    "strategy",
    "block_structure",
    "moe_quant_algo",
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 256)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(
        ["Linear", "re:.*experts.*", "*.mlp*", "float", "int", "NVFP4", "MIXED_PRECISION", "fp8_e4m3"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=10,
)


@settings(max_examples=400)
@given(st.sampled_from(sorted(METHODS)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8))
def test_any_config_reads_or_is_our_error(method: str, config: Config) -> None:
    message = ""
    try:
        found = read({**config, "quant_method": method})
    except ModelError as refused:
        message = refused.message
    else:
        assert found.block_shape is None or min(found.block_shape) > 0
        assert found.group_size is None or found.group_size > 0
    assert message.isprintable()

"""`--quant`: the servers' own words, with a block or a group where one belongs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import ModelError
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.quantization_names import QUANTIZATION_NAMES, parse_quantization


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", Quantization(Dtype.BF16)),
        ("FP16", Quantization(Dtype.FP16)),
        ("fp8", Quantization(Dtype.FP8_W8A8, "fp8", dynamic_activation=True)),
        ("fp8_w8a8", Quantization(Dtype.FP8_W8A8, "fp8", dynamic_activation=True)),
        ("fp8-block", Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)),
        ("fp8-block[128,128]", Quantization(Dtype.FP8_W8A8, "fp8", (128, 128), dynamic_activation=True)),
        ("fp8-block[64, 128]", Quantization(Dtype.FP8_W8A8, "fp8", (64, 128), dynamic_activation=True)),
        ("int8_w8a8", Quantization(Dtype.INT8_W8A8, "w8a8_int8", per_channel=True, dynamic_activation=True)),
        (
            "int8_w8a8[128,128]",
            Quantization(Dtype.INT8_W8A8, "blockwise_int8", (128, 128), dynamic_activation=True),
        ),
        (
            "int8-channel",
            Quantization(Dtype.INT8_W8A8, "compressed-tensors", per_channel=True, dynamic_activation=True),
        ),
        ("int8_w8a16", Quantization(Dtype.INT8_W8A16, "moe_wna16", group_size=128)),
        ("int8_w8a16-channel", Quantization(Dtype.INT8_W8A16, "experts_int8", per_channel=True)),
        ("int8_w8a16-asym[32]", Quantization(Dtype.INT8_W8A16, "moe_wna16", group_size=32, zero_point=True)),
        ("gptq-int8", Quantization(Dtype.INT8_W8A16, "gptq", group_size=128)),
        ("int4-asym", Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=128, zero_point=True)),
        ("int8_w8a16[64]", Quantization(Dtype.INT8_W8A16, "moe_wna16", group_size=64)),
        ("int4_w4a16", Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=128)),
        ("int4_w4a16[32]", Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=32)),
        ("awq", Quantization(Dtype.INT4_W4A16, "awq", group_size=128, zero_point=True)),
        ("gptq", Quantization(Dtype.INT4_W4A16, "gptq", group_size=128)),
        ("mxfp4", Quantization(Dtype.MXFP4, "mxfp4", group_size=32)),
        ("nvfp4", Quantization(Dtype.NVFP4, "modelopt", group_size=16, dynamic_activation=False)),
    ],
)
def test_names_and_sizes(text: str, expected: Quantization) -> None:
    assert parse_quantization(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int3",
        "fp8-block[128]",
        "fp8-block[0,128]",
        "bf16[128,128]",
        "awq[128,128]",
        "mxfp4[32]",
        "experts_int8[32]",
        "int8-channel[32]",
        "fp8[a,b]",
    ],
)
def test_other_names_are_errors_that_list_what_there_is(text: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_quantization(text)
    assert text in caught.value.message


def test_the_list_of_names_is_shown() -> None:
    with pytest.raises(ModelError) as caught:
        parse_quantization("int3")
    assert all(name in (caught.value.hint or "") for name in QUANTIZATION_NAMES)


@given(st.text(max_size=30))
def test_any_text_parses_or_is_our_error(text: str) -> None:
    message = ""
    try:
        parse_quantization(text)
    except ModelError as refused:
        message = refused.message
    assert message.isprintable()

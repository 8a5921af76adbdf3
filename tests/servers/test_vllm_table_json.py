"""Config files of vLLM: choosing, writing, and what kills a server; cases 29, 30 and 38."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.vllm import open_vllm
from tests.servers.vllm_problems import (
    A100,
    FP8_BLOCK,
    GOOD,
    MI300X,
    RELEASES,
    layer,
    sharded,
)


def table(*ms: int) -> ConfigTable:
    return ConfigTable(tuple((m, KernelConfig(16, 64, 64, place + 1)) for place, m in enumerate(ms)))


def test_case_30_a_file_replaces_the_default_for_every_m() -> None:
    server = open_vllm()
    found = table(96, 128, 1024)
    assert server.config_for(found, 1) == found.entries[0][1]
    assert server.config_for(found, 10**6) == found.entries[2][1]


def test_the_first_of_two_equally_near_keys_wins() -> None:
    server = open_vllm()
    assert server.config_for(table(8, 16), 12).group_size_m == 1
    assert server.config_for(table(16, 8), 12).group_size_m == 1
    assert server.config_for(table(16, 8), 11).group_size_m == 2
    with pytest.raises(ConfigFileError, match="no entries"):
        server.config_for(ConfigTable(()), 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20, unique=True), st.integers(1, 10**6))
def test_the_chosen_key_is_nearest(ms: list[int], m: int) -> None:
    chosen = open_vllm().config_for(table(*ms), m)
    (key,) = [key for key, config in table(*ms).entries if config == chosen]
    assert all(abs(key - m) <= abs(other - m) for other in ms)


@pytest.mark.parametrize("version", RELEASES)
def test_a_rendered_table_is_sorted_canonical_and_read_back(version: str) -> None:
    server, problem = sharded(layer(64, 1024), version=version)
    text = server.render_table(problem, table(1024, 1, 64))
    assert text == server.render_table(problem, table(1024, 1, 64))
    assert text.endswith("}\n")
    assert text.startswith("{\n    ")
    document = json.loads(text)
    keys = [] if version == "0.10.2" else ["triton_version"]
    assert list(document) == [*keys, "1", "64", "1024"]
    assert list(document["1"]) == list(GOOD)
    read = server.read_table(text, "file", problem)
    assert read.entries == tuple(sorted(table(1024, 1, 64).entries))


def test_case_29_split_k_is_written_where_the_kernel_requires_it() -> None:
    grouped = layer(64, 1024, quantization=Quantization(Dtype.INT4_W4A16, group_size=128))
    for version, expected in (("0.11.0", False), ("0.11.1", True), ("0.33.0", True)):
        server, problem = sharded(grouped, version=version)
        entry = json.loads(server.render_table(problem, table(1)))["1"]
        assert ("SPLIT_K" in entry) == expected
        assert ("SPLIT_K" in server.allowed_keys(problem)) == expected
    server, plain = sharded(layer(64, 1024))
    with_split_k = ConfigTable(((1, KernelConfig(16, 64, 64, 1, extra=(("SPLIT_K", 1),))),))
    assert "SPLIT_K" not in server.render_table(plain, with_split_k)


def test_case_29_foreign_keys_are_never_written() -> None:
    server, problem = sharded(layer(64, 1024))
    _, amd = sharded(layer(64, 1024), gpu=MI300X)
    waves = ConfigTable(((1, KernelConfig(16, 64, 64, 1, extra=(("waves_per_eu", 2),))),))
    assert '"waves_per_eu": 2' in server.render_table(amd, waves)
    with pytest.raises(ConfigFileError, match=r"m=1 sets waves_per_eu.*KeyError"):
        server.render_table(problem, waves)
    with pytest.raises(ConfigFileError, match="USE_TMA"):
        server.render_table(problem, ConfigTable(((1, KernelConfig(16, 64, 64, 1, use_tma=True)),)))


def test_what_no_launch_survives_is_never_written() -> None:
    server, problem = sharded(layer(64, 1024), gpu=A100)
    for config in (KernelConfig(24, 64, 64, 1), KernelConfig(16, 64, 64, 1, extra=(("num_ctas", 2),))):
        with pytest.raises(ConfigFileError, match="the table to write"):
            server.render_table(problem, ConfigTable(((1, config),)))


@pytest.mark.parametrize("version", RELEASES)
def test_the_servers_own_default_can_always_be_written(version: str) -> None:
    for quantization in (Quantization(), FP8_BLOCK, Quantization(Dtype.INT4_W4A16, group_size=64)):
        server, problem = sharded(layer(64, 1024, quantization=quantization), version=version)
        ms = (1, 2, 3, 5, 16, 24, 64, 300, 4096)
        default = ConfigTable(tuple((m, server.default_config(problem, "up", m)) for m in ms))
        text = server.render_table(problem, default)
        assert [m for m, _ in server.read_table(text, "f", problem).entries] == list(ms)


REFUSED = [
    ("USE_TMA", True, "KeyError"),
    ("USE_TMA", False, "KeyError"),
    ("tile_m", 16, "KeyError"),
    ("top_k", 2, "TypeError"),
    ("BLOCK_SIZE_M", 24, "CompilationError"),
    ("BLOCK_SIZE_M", 0, "CompilationError"),
    ("BLOCK_SIZE_M", -16, "CompilationError"),
    ("BLOCK_SIZE_M", "16", "TypeError"),
    ("BLOCK_SIZE_M", 16.0, "TypeError"),
    ("BLOCK_SIZE_M", None, "TypeError"),
    ("BLOCK_SIZE_M", True, "TypeError"),
    ("BLOCK_SIZE_M", [16], "TypeError"),
    ("BLOCK_SIZE_K", 8, "CompilationError"),
    ("GROUP_SIZE_M", 0, "RuntimeError"),
    ("num_warps", 6, "AssertionError"),
    ("num_warps", 64, "RuntimeError"),
    ("num_stages", -1, "RuntimeError"),
]


@pytest.mark.parametrize(("key", "value", "exception"), REFUSED)
def test_case_29_an_entry_that_kills_a_launch_names_the_exception(
    key: str, value: object, exception: str
) -> None:
    with pytest.raises(ConfigFileError) as refused:
        open_vllm().read_table(json.dumps({"4": GOOD | {key: value}}), "some.json")
    assert refused.value.message.startswith("some.json: the entry '4'")
    assert refused.value.message.endswith(f"(vLLM 0.33.0: {exception})")


@pytest.mark.parametrize("key", ["ir_override", "debug", "extern_libs"])
def test_options_of_triton_that_no_file_may_set_are_refused_without_blaming_the_server(key: str) -> None:
    with pytest.raises(ConfigFileError, match="no tuned file may set") as refused:
        open_vllm().read_table(json.dumps({"4": GOOD | {key: "x"}}), "some.json")
    assert "vLLM 0" not in refused.value.message


def test_case_29_keys_of_another_vendor_are_refused_once_the_gpu_is_known() -> None:
    server, nvidia = sharded(layer(64, 1024))
    _, amd = sharded(layer(64, 1024), gpu=MI300X)
    text = json.dumps({"1": GOOD | {"waves_per_eu": 0}})
    assert server.read_table(text, "f").entries == server.read_table(text, "f", amd).entries
    with pytest.raises(ConfigFileError, match="KeyError"):
        server.read_table(text, "f", nvidia)
    assert "waves_per_eu" in server.allowed_keys(amd) - server.allowed_keys(nvidia)
    clusters = json.dumps({"1": GOOD | {"num_ctas": 2}})
    server.read_table(clusters, "f", nvidia)
    with pytest.raises(ConfigFileError, match="ValueError"):
        server.read_table(clusters, "f", replace(nvidia, gpu=A100))


def test_tiles_of_fewer_than_16_rows_need_triton_3_5() -> None:
    text = json.dumps({"1": GOOD | {"BLOCK_SIZE_M": 8}})
    open_vllm("0.11.1").read_table(text, "f")
    with pytest.raises(ConfigFileError, match="below 16"):
        open_vllm("0.11.0").read_table(text, "f")


def test_case_29_a_triton_version_key_is_fatal_before_0_11() -> None:
    text = json.dumps({"triton_version": "3.4.0", "1": GOOD})
    assert len(open_vllm("0.11.0").read_table(text, "f").entries) == 1
    with pytest.raises(ConfigFileError, match=r"'triton_version'.*ValueError") as refused:
        open_vllm("0.10.2").read_table(text, "f")
    assert "remove it" in str(refused.value.hint)


BROKEN = [
    ("", "JSONDecodeError"),
    ("\ufeff{}", "JSONDecodeError"),
    ("[]", "TypeError"),
    ("3", "AttributeError"),
    ('{"8.0": {}}', "ValueError"),
    ('{"1": [1]}', "TypeError"),
    ("[" * 50_000, "RecursionError"),
]


@pytest.mark.parametrize(("text", "exception"), BROKEN)
def test_case_38_hand_written_json_is_a_clear_error(text: str, exception: str) -> None:
    with pytest.raises(ConfigFileError, match=f"vLLM 0.33.0: {exception}"):
        open_vllm().read_table(text, "hand.json")


def test_case_38_what_the_server_takes_and_we_do_not() -> None:
    nan = json.dumps({"1": GOOD}).replace("16", "NaN")
    for text in (" " * (2 << 20) + "{}", '{"triton_version": ' + "[" * 40 + "]" * 40 + "}", nan):
        with pytest.raises(ConfigFileError):
            open_vllm().read_table(text, "hand.json")


def test_case_38_what_the_server_takes_we_take() -> None:
    server, entry = open_vllm(), json.dumps(GOOD)
    assert server.read_table("{}", "f").entries == ()
    twice = server.read_table(f'{{"8": {entry}, "4": {entry}, "8": {entry}}}', "f")
    assert [m for m, _ in twice.entries] == [8, 4]
    assert [m for m, _ in server.read_table(f'{{"1_0": {entry}, " 8 ": {entry}}}', "f").entries] == [
        10,
        8,
    ]


@settings(deadline=None)
@given(st.text(max_size=200))
def test_case_38_no_text_is_a_traceback(text: str) -> None:
    try:
        open_vllm().read_table(text, text)
    except ConfigFileError as error:
        message = error.message
    else:
        message = ""
    assert all(character >= " " for character in message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["1", "2", "x", "triton_version"]),
        st.one_of(JSON, st.dictionaries(st.sampled_from([*GOOD, "SPLIT_K", "maxnreg", "grf_mode"]), JSON)),
        max_size=4,
    )
)
def test_case_38_no_document_is_a_traceback(document: dict[str, Any]) -> None:
    try:
        found = open_vllm().read_table(json.dumps(document), "f")
    except ConfigFileError:
        return
    assert all(isinstance(config.block_size_m, int) for _, config in found.entries)


CONFIGS = st.builds(
    KernelConfig,
    *[st.sampled_from([16, 32, 64, 128]) for _ in range(3)],
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 6),
)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 10**6), CONFIGS, max_size=12), st.sampled_from(RELEASES))
def test_every_table_survives_writing_and_reading(entries: dict[int, KernelConfig], version: str) -> None:
    server, problem = sharded(layer(64, 1024), version=version)
    text = server.render_table(problem, ConfigTable(tuple(entries.items())))
    assert server.read_table(text, "f", problem).entries == tuple(sorted(entries.items()))

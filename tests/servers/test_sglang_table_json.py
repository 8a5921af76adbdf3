"""SGLang's config files: what is read, refused, noted and written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.servers.sglang import open_sglang
from tests.servers.sglang_problems import ENTRY, MI300, layer, shard


def test_case_29_a_vllm_file_is_fatal_and_the_error_says_what_to_remove() -> None:
    text = json.dumps({"triton_version": "3.6.0", "8": ENTRY})
    with pytest.raises(ConfigFileError, match="ValueError") as refused:
        open_sglang().read_table(text, "x.json")
    assert "vLLM" in (refused.value.hint or "")
    with pytest.raises(ConfigFileError, match="SPLIT_K"):
        open_sglang().read_table(json.dumps({"8": ENTRY | {"SPLIT_K": 1}}), "x.json")


def test_case_29_which_keys_an_entry_may_have_by_vendor_and_release() -> None:
    problem, rocm = shard(layer()), shard(layer(), gpu=MI300)
    assert {"waves_per_eu", "kpack", "matrix_instr_nonkdim"} <= open_sglang().allowed_keys(rocm)
    assert not {"waves_per_eu", "kpack", "SPLIT_K", "grf_mode"} & open_sglang().allowed_keys(problem)
    assert "USE_TMA" in open_sglang("0.5.18").allowed_keys(problem)
    assert "USE_TMA" not in open_sglang("0.5.17").allowed_keys(problem)
    assert "USE_TMA" in open_sglang("0.5.17").allowed_keys(problem, "down")
    assert "USE_TMA" not in open_sglang("0.5.4").allowed_keys(problem, "down")


def test_case_30_below_the_first_key_the_first_key_is_used() -> None:
    table = open_sglang().read_table(json.dumps({"96": ENTRY, "1024": ENTRY | {"GROUP_SIZE_M": 1}}), "x.json")
    assert open_sglang().config_for(table, 1).group_size_m == 8
    assert open_sglang().config_for(table, 560).group_size_m == 8
    assert open_sglang().config_for(table, 561).group_size_m == 1
    assert open_sglang().config_for(table, 8192).group_size_m == 1


def test_a_tie_goes_to_the_key_that_stands_first_in_the_file() -> None:
    entries = {"64": ENTRY, "32": ENTRY | {"GROUP_SIZE_M": 1}}
    forwards = open_sglang().read_table(json.dumps(entries), "x.json")
    backwards = open_sglang().read_table(json.dumps(dict(reversed(entries.items()))), "x.json")
    assert open_sglang().config_for(forwards, 48).group_size_m == 8
    assert open_sglang().config_for(backwards, 48).group_size_m == 1


def test_up_to_0_5_10_a_call_is_cut_into_chunks_of_65536_tokens() -> None:
    table = ConfigTable(((65_536, KernelConfig(16, 64, 64, 1)), (200_000, KernelConfig(64, 64, 64, 1))))
    assert open_sglang("0.5.10").config_for(table, 200_000).block_size_m == 16
    assert open_sglang("0.5.11").config_for(table, 200_000).block_size_m == 64


def test_case_32_a_pair_that_disagrees_dies_or_is_overridden() -> None:
    problem, up, down = shard(layer()), KernelConfig(64, 64, 64, 1), KernelConfig(16, 64, 64, 1)
    for version in ("0.5.5", "0.5.12"):
        with pytest.raises(ConfigFileError, match="AssertionError"):
            open_sglang(version).launch(problem, "down", down, up)
    assert open_sglang("0.5.13").launch(problem, "down", down, up).config.block_size_m == 64
    assert open_sglang("0.5.4").launch(problem, "down", down, up).config == up
    assert open_sglang("0.5.13").launch(problem, "up", up, down).config == up


HOSTILE = {
    "keys as floats": ('{"8.0": {}}', "ValueError"),
    "byte order mark": ("\ufeff{}", "JSONDecodeError"),
    "array": ("[]", "AttributeError"),
    "number": ("8", "AttributeError"),
    "empty": ("", "JSONDecodeError"),
    "cut off": ('{"8": {"BLOCK', "JSONDecodeError"),
    "entry is a list": ('{"8": []}', "TypeError"),
    "missing M": ('{"8": {}}', "KeyError"),
    "deep": ("[" * 200_000, "RecursionError"),
    "deep object": ('{"8":' * 100_000 + "1" + "}" * 100_000, "RecursionError"),
    "50 MB": ('{"8": "' + "x" * 50_000_000 + '"}', "larger than"),
    "huge number": ('{"8": ' + "9" * 100_000 + "}", "digits"),
    "NaN": ('{"8": NaN}', "NaN"),
    "NaN as a block": (json.dumps({"8": ENTRY | {"BLOCK_SIZE_M": float("nan")}}), "NaN"),
    "text as a block": (json.dumps({"8": ENTRY | {"BLOCK_SIZE_M": "32"}}), "BLOCK_SIZE_M"),
    "no power of two": (json.dumps({"8": ENTRY | {"BLOCK_SIZE_N": 48}}), "CompilationError"),
    "warps": (json.dumps({"8": ENTRY | {"num_warps": 3}}), "AssertionError"),
    "terminal": (json.dumps({"\x1b[31m": ENTRY}), "ValueError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_case_38_hostile_json_is_a_clear_error(name: str) -> None:
    text, word = HOSTILE[name]
    with pytest.raises(ConfigFileError) as refused:
        open_sglang().read_table(text, "E=1,N=2,device_name=A.json")
    assert word in refused.value.message
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 600


def test_case_38_tabs_duplicates_and_an_empty_object_are_read_and_noted() -> None:
    server = open_sglang()
    entry = json.dumps(ENTRY)
    text = f'{{\t"8": {{"BLOCK_SIZE_M": 16}}, "16": {entry}, "8": {entry}}}'
    reading = server.read_with_notes(text, "x.json")
    assert reading.table.keys() == (8, 16)
    assert any("twice" in note for note in reading.notes)
    empty = server.read_with_notes("{}", "x.json")
    assert empty.table.entries == ()
    assert any("default" in note for note in empty.notes)
    with pytest.raises(ConfigFileError, match="empty"):
        server.config_for(empty.table, 8)


def test_use_tma_in_an_up_file_is_read_from_0_5_18_and_in_a_down_file_from_0_5_5() -> None:
    text = json.dumps({"8": ENTRY | {"USE_TMA": True}})
    for version, name, fits in [
        ("0.5.17", "up.json", False),
        ("0.5.18", "up.json", True),
        ("0.5.5", "x_down.json", True),
        ("0.5.4", "x_down.json", False),
    ]:
        if fits:
            assert open_sglang(version).read_table(text, name).nearest(8).use_tma
            continue
        with pytest.raises(ConfigFileError, match="KeyError"):
            open_sglang(version).read_table(text, name)


def test_rendered_tables_are_canonical_sorted_and_complete() -> None:
    table = ConfigTable(
        ((64, KernelConfig(64, 64, 64, 1)), (8, KernelConfig(16, 64, 64, 1, 8, 2, use_tma=True)))
    )
    text = open_sglang().render_table(shard(layer()), table)
    assert text.startswith('{\n    "8": {\n        "BLOCK_SIZE_M": 16,\n')
    assert text.endswith("}\n")
    assert list(json.loads(text)) == ["8", "64"]
    assert json.loads(text)["64"] == {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    assert json.loads(text)["8"]["USE_TMA"] is True


def test_a_table_with_what_the_server_would_die_of_is_not_written() -> None:
    tma = ConfigTable(((8, KernelConfig(16, 64, 64, 1, use_tma=True)),))
    split = ConfigTable(((8, KernelConfig(16, 64, 64, 1, extra=(("SPLIT_K", 1),))),))
    waves = ConfigTable(((8, KernelConfig(16, 64, 64, 1, extra=(("waves_per_eu", 1),))),))
    with pytest.raises(ConfigFileError, match="USE_TMA"):
        open_sglang("0.5.17").render_table(shard(layer()), tma)
    assert "USE_TMA" in open_sglang("0.5.17").render_table(shard(layer()), tma, "down")
    with pytest.raises(ConfigFileError, match="SPLIT_K"):
        open_sglang().render_table(shard(layer()), split)
    with pytest.raises(ConfigFileError, match="waves_per_eu"):
        open_sglang().render_table(shard(layer()), waves)
    assert "waves_per_eu" in open_sglang().render_table(shard(layer(), gpu=MI300), waves)


CONFIGS = st.builds(
    KernelConfig,
    st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from([32, 64, 128, 256]),
    st.sampled_from([32, 64, 128, 256]),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 6),
    st.booleans(),
)


@given(st.dictionaries(st.integers(1, 100_000), CONFIGS, min_size=1))
def test_what_is_rendered_is_read_back_and_rendered_alike(configs: dict[int, KernelConfig]) -> None:
    server, problem = open_sglang(), shard(layer())
    table = ConfigTable(tuple(configs.items()))
    text = server.render_table(problem, table)
    again = server.read_table(text, "x.json")
    assert dict(again.entries) == configs
    assert server.render_table(problem, again) == text

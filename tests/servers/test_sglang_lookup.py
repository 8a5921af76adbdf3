"""What SGLang's lookup finds, prints and dies of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, Outcome, ServerOptions
from moetune.servers.sglang import open_sglang
from tests.servers.sglang_problems import DEFAULTS, layer, shard, tree

NAME = "E=128,N=768,device_name=NVIDIA_H200.json"
DOWN = "E=128,N=768,device_name=NVIDIA_H200_down.json"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.2", "3_3_1"),
        ("0.5.4", "3_3_1"),
        ("0.5.11", "3_3_1"),
        ("0.5.12", "3_5_1"),
        ("0.5.23", "3_5_1"),
    ],
)
def test_case_36_which_directory_3_6_0_falls_back_to(version: str, expected: str) -> None:
    server = open_sglang(version, "3.6.0")
    seen = tree(**{f"triton_{v}": (NAME,) for v in ("3_1_0", "3_3_1", "3_5_1")})
    lookup = server.lookup(shard(layer()), "up", [seen], DEFAULTS)
    assert lookup.outcome is Outcome.STALE
    assert lookup.found == f"/root/configs/triton_{expected}/{NAME}"
    assert lookup.found in lookup.candidates


def test_fallbacks_are_compared_as_numbers_and_may_be_newer_than_what_runs() -> None:
    seen = tree(triton_3_8_0=(NAME,), triton_3_10_0=(NAME,))
    lookup = open_sglang("0.5.23", "3.6.0").lookup(shard(layer()), "up", [seen], DEFAULTS)
    assert lookup.found == f"/root/configs/triton_3_10_0/{NAME}"
    assert "Fallback to triton version 3.10.0" in lookup.log_lines[0][1]


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
@pytest.mark.parametrize("entry", ["triton_3_6_0_bak", "triton_foo", "triton_"])
def test_case_55_a_backup_directory_ends_the_server_on_a_miss(version: str, entry: str) -> None:
    server, problem = open_sglang(version, "3.6.0"), shard(layer())
    missed = server.lookup(problem, "up", [tree(**{entry: (), "triton_3_5_1": (NAME,)})], DEFAULTS)
    assert (missed.outcome, missed.error, missed.found) == (Outcome.CRASH, "ValueError", None)
    exact = server.lookup(problem, "up", [tree(**{entry: (), "triton_3_6_0": (NAME,)})], DEFAULTS)
    assert exact.outcome is Outcome.EXACT
    older = open_sglang("0.5.11", "3.6.0").lookup(problem, "up", [tree(**{entry: ()})], DEFAULTS)
    assert older.outcome is Outcome.DEFAULT


def test_case_35_only_the_first_tree_counts_and_a_missing_configs_folder_ends_the_server() -> None:
    problem = shard(layer())
    mine, shipped = tree("/mine", triton_3_8_0=()), tree("/shipped", triton_3_8_0=(NAME,))
    lookup = open_sglang().lookup(problem, "up", [mine, shipped], DEFAULTS)
    assert lookup.outcome is Outcome.DEFAULT
    gone = open_sglang().lookup(problem, "up", [ConfigTree("/mine", None), shipped], DEFAULTS)
    assert (gone.outcome, gone.error) == (Outcome.CRASH, "FileNotFoundError")
    assert open_sglang("0.5.11").lookup(problem, "up", [ConfigTree("/x", None)], DEFAULTS).error is None


def test_case_33_up_and_down_can_come_from_different_tritons() -> None:
    seen = tree(triton_3_7_1=(NAME,), triton_3_5_1=(DOWN,))
    server, problem = open_sglang(), shard(layer())
    up, down = (server.lookup(problem, kernel, [seen], DEFAULTS) for kernel in ("up", "down"))
    assert up.found is not None
    assert down.found is not None
    assert "triton_3_7_1" in up.found
    assert "triton_3_5_1" in down.found
    assert up.outcome is down.outcome is Outcome.STALE


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.5", "Using default MoE kernel config."),
        ("0.5.6", "Using MoE kernel config with down_moe=False."),
        ("0.5.15", "Using MoE kernel config with down_moe=False."),
        ("0.5.16", "reusing the tuned up-projection config without TMA"),
    ],
)
def test_a_missing_down_file_uses_the_up_config_and_says_so_in_each_releases_words(
    version: str, words: str
) -> None:
    server = open_sglang(version, "3.6.0")
    lookup = server.lookup(shard(layer()), "down", [tree(triton_3_6_0=(NAME,))], DEFAULTS)
    assert lookup.outcome is Outcome.REUSED_UP
    assert lookup.found == f"/root/configs/triton_3_6_0/{NAME}"
    assert lookup.log_lines[0][0] == "WARNING"
    assert words in lookup.log_lines[0][1]
    assert DOWN in lookup.log_lines[0][1]


def test_without_any_file_both_kernels_run_with_the_default() -> None:
    for kernel in ("up", "down"):
        lookup = open_sglang().lookup(shard(layer()), kernel, [tree()], DEFAULTS)
        assert (lookup.outcome, lookup.found) == (Outcome.DEFAULT, None)
        assert "Using default MoE kernel config" in lookup.log_lines[0][1]


def test_deterministic_inference_opens_no_file_from_0_5_5() -> None:
    options = ServerOptions(deterministic=True)
    seen = [tree(triton_3_6_0=(NAME, DOWN))]
    new, old = open_sglang("0.5.5", "3.6.0"), open_sglang("0.5.4", "3.6.0")
    ignored = new.lookup(shard(layer()), "up", seen, options)
    assert (ignored.outcome, ignored.found) == (Outcome.IGNORED, None)
    assert "Deterministic inference" in ignored.log_lines[0][1]
    assert old.lookup(shard(layer()), "up", seen, options).outcome is Outcome.EXACT
    problem = shard(layer(quantization=Quantization(Dtype.FP8_W8A8, "fp8")), options=options)
    assert new.default_config(problem, "up", 1) == KernelConfig(64, 64, 32, 8)
    assert new.default_switches(problem) == ()


@given(
    st.dictionaries(
        st.sampled_from(["triton_3_1_0", "triton_3_5_1", "triton_3_6_0", "triton_3_10_0", "other"]),
        st.sets(st.sampled_from([NAME, DOWN, "x.json"])),
    ),
    st.sampled_from(["0.5.2", "0.5.5", "0.5.12", "0.5.16", "0.5.23"]),
    st.sampled_from(["up", "down"]),
)
def test_what_is_found_is_there_and_was_a_candidate(
    directories: dict[str, set[str]], version: str, kernel: str
) -> None:
    seen = tree(**{name: tuple(files) for name, files in directories.items()})
    lookup = open_sglang(version, "3.6.0").lookup(shard(layer()), kernel, [seen], DEFAULTS)  # type: ignore[arg-type]
    assert (lookup.found is None) == (lookup.outcome is Outcome.DEFAULT)
    if lookup.found is not None:
        directory, name = lookup.found.removeprefix("/root/configs/").split("/")
        assert seen.has(directory, name)
        assert lookup.found in lookup.candidates
    assert len(set(lookup.candidates)) == len(lookup.candidates)
    assert lookup.candidates[0].startswith("/root/configs/triton_3_6_0/")

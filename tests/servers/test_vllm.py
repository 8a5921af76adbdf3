"""One release of vLLM as a user meets it: versions, sharding and lookup.

That the rules are vLLM's own is in test_vllm_wheels*.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.config import KernelConfig
from moetune.domain.errors import ServerError, ShardingError
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, Outcome, Server, ServerOptions
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.rules import Change, has, rule_source
from tests.servers.vllm_problems import (
    FP8_BLOCK,
    H200,
    NO_OPTIONS,
    layer,
    sharded,
)

if TYPE_CHECKING:
    from moetune.domain.model import ExpertLayer


def test_the_newest_known_release_is_the_default() -> None:
    server: Server = open_vllm(None, None)
    assert isinstance(server, Server)
    assert (server.version, server.triton_version) == ("0.33.0", "3.8.0")
    assert server.directory_variable == "VLLM_TUNED_CONFIG_FOLDER"
    assert not server.separate_down_file


def test_a_newer_release_is_treated_as_the_newest_and_says_so() -> None:
    newer = open_vllm("0.40.1", "3.9.0")
    assert newer.assumed
    assert newer.version == "0.40.1"
    assert newer.release == open_vllm().release
    assert not open_vllm("0.33.0").assumed
    assert not open_vllm("v0.20.2rc1+cu130").assumed


def test_an_older_release_or_no_release_is_refused_with_the_next_command() -> None:
    with pytest.raises(ServerError, match=r"older than 0\.10\.2") as refused:
        open_vllm("0.10.1")
    assert "--server-version 0.10.2" in str(refused.value.hint)
    with pytest.raises(ServerError, match="not a version"):
        open_vllm("newest")
    with pytest.raises(ServerError, match="not a version"):
        open_vllm(None, "three")


def test_short_versions_stand_for_the_first_of_their_series() -> None:
    assert open_vllm("0.11").release == (0, 11, 0)


@pytest.mark.parametrize(
    ("version", "triton"),
    [("0.10.2", "3.4.0"), ("0.11.1", "3.5.0"), ("0.20.0", "3.6.0"), ("0.27.1", "3.7.1")],
)
def test_triton_is_the_one_that_the_release_installs(version: str, triton: str) -> None:
    assert open_vllm(version).triton_version == triton


def test_every_change_names_its_source() -> None:
    for change in Change:
        assert rule_source(change).startswith("vllm 0.")
        assert has((0, 33, 0), change)


def test_case_25_a_size_that_does_not_divide_lists_those_that_do() -> None:
    with pytest.raises(ShardingError, match="--tp 3 does not divide the intermediate size 704") as refused:
        sharded(layer(128, 704), tp=3)
    assert str(refused.value.hint).startswith("values of --tp that fit: 1, 2, 4, 8, 11, 16, 22, 32, 44, 64")


def test_case_25_what_fits_is_what_is_then_accepted() -> None:
    for checkpoint in (
        layer(128, 1408, quantization=FP8_BLOCK),
        layer(60, 1408),
        layer(128, 768, quantization=FP8_BLOCK),
    ):
        for version in ("0.20.0", "0.33.0"):
            with pytest.raises(ShardingError) as refused:
                sharded(checkpoint, version=version, tp=63)
            listed = {int(size) for size in str(refused.value.hint).split(": ")[1].split(", ")}
            for tp in range(1, 65):
                if tp in listed:
                    sharded(checkpoint, version=version, tp=tp)
                else:
                    with pytest.raises(ShardingError):
                        sharded(checkpoint, version=version, tp=tp)


def test_fp8_blocks_are_refused_then_refined() -> None:
    qwen = layer(128, 768, quantization=FP8_BLOCK)
    with pytest.raises(
        ShardingError, match=r"96, is no multiple of the fp8 block 128x128: vLLM 0\.28\.0 stops"
    ):
        sharded(qwen, version="0.28.0", tp=8)
    server, problem = sharded(qwen, version="0.29.0", tp=8)
    assert problem.quantization.block_shape == (32, 32)
    assert "N=96,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[32,32]" in server.file_name(
        problem, "up"
    )
    other = replace(qwen, quantization=replace(FP8_BLOCK, method="compressed-tensors"))
    with pytest.raises(ShardingError, match="ValueError"):
        sharded(other, version="0.33.0", tp=8)


def test_uneven_experts_are_refused_with_both_sizes() -> None:
    with pytest.raises(
        ShardingError, match="some ranks would hold 22 and read one file, the others 21"
    ) as refused:
        sharded(layer(128, 768), tp=6, ep=6)
    assert "--experts 22 and --experts 21" in str(refused.value.hint)


def test_redundant_experts_need_expert_parallelism() -> None:
    _, problem = sharded(layer(256, 2048), tp=8, ep=8, redundant_experts=32)
    assert (problem.E, problem.global_experts) == (36, 288)
    with pytest.raises(ShardingError, match="only with expert parallelism"):
        sharded(layer(256, 2048), tp=8, redundant_experts=32)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_groups_are_halved_until_they_divide(method: str) -> None:
    def quantized(size: int) -> ExpertLayer:
        return layer(64, size, quantization=Quantization(Dtype.INT4_W4A16, method=method, group_size=128))

    assert sharded(quantized(1408), tp=2)[1].quantization.group_size == 64
    assert sharded(quantized(1024), tp=2)[1].quantization.group_size == 128
    with pytest.raises(ShardingError, match="halved down to 32"):
        sharded(quantized(1408), tp=8)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"ep": -1}, {"dp": 0}, {"redundant_experts": -1}])
def test_sizes_below_one_are_errors(sizes: dict[str, int]) -> None:
    with pytest.raises(ShardingError):
        open_vllm().problem(layer(128, 768), Parallelism(**sizes), H200, NO_OPTIONS)


@pytest.mark.parametrize(
    "checkpoint",
    [layer(0, 768), layer(128, 0), layer(128, 768, topk=0), layer(8, 768, topk=9), layer(8, 768, hidden=0)],
)
def test_a_layer_without_sizes_is_an_error(checkpoint: ExpertLayer) -> None:
    with pytest.raises(ShardingError):
        sharded(checkpoint)


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(1, 4096), st.integers(1, 16), st.integers(1, 16), st.integers(1, 4))
def test_sharding_never_crashes_and_never_loses_columns(
    experts: int, size: int, tp: int, ep: int, dp: int
) -> None:
    try:
        _, problem = sharded(layer(experts, size, topk=1), tp=tp, ep=ep, dp=dp)
    except ShardingError:
        return
    assert problem.N * (1 if ep > 1 else tp * dp) == size
    assert problem.E * problem.ep == experts


def test_the_runner_is_asked_with_the_release_whose_rules_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("moetune.servers.vllm.server.choose_runner", lambda *a: asked.append(a))
    checkpoint = layer(8, 64)
    open_vllm("0.99").runner(checkpoint, Parallelism(), H200, NO_OPTIONS)
    assert asked == [((0, 33, 0), checkpoint, Parallelism(), H200, NO_OPTIONS)]


def trees(name: str, *, user: bool, shipped: bool) -> list[ConfigTree]:
    files = {True: frozenset({name}), False: frozenset({"README"})}
    return [ConfigTree("/u", {"": files[user]}), ConfigTree("/s/configs", {"": files[shipped]})]


def test_case_35_the_users_folder_adds_to_the_shipped_one() -> None:
    server, problem = sharded(layer(64, 1024))
    name = server.file_name(problem, "up")
    for user, shipped, found in ((True, True, "/u/"), (True, False, "/u/"), (False, True, "/s/configs/")):
        result = server.lookup(problem, "down", trees(name, user=user, shipped=shipped), NO_OPTIONS)
        assert (result.outcome, result.found) == (Outcome.EXACT, found + name)
        assert result.candidates == ("/u/" + name, "/s/configs/" + name)
        assert result.log_lines == (("INFO", f"Using configuration from {found}{name} for MoE layer."),)
    nothing = server.lookup(problem, "up", [ConfigTree("/u", None), ConfigTree("/s", {})], NO_OPTIONS)
    assert (nothing.outcome, nothing.found) == (Outcome.DEFAULT, None)


def test_case_2_the_warning_lists_the_places_by_release() -> None:
    for version, places in (("0.12.0", "['/u/{0}', '/s/configs/{0}']"), ("0.13.0", "/u/{0}, /s/configs/{0}")):
        server, problem = sharded(layer(64, 1024), version=version)
        name = server.file_name(problem, "up")
        ((level, text),) = server.lookup(
            problem, "up", trees(name, user=False, shipped=False), NO_OPTIONS
        ).log_lines
        assert level == "WARNING"
        assert text.endswith("Config file not found at " + places.format(name))


@pytest.mark.parametrize(
    "options", [ServerOptions(deterministic=True), ServerOptions(environment={"VLLM_BATCH_INVARIANT": "1"})]
)
def test_case_5_batch_invariant_mode_opens_no_file(options: ServerOptions) -> None:
    for version, outcome in (
        ("0.11.0", Outcome.EXACT),
        ("0.11.1", Outcome.IGNORED),
        ("0.33.0", Outcome.IGNORED),
    ):
        server = open_vllm(version)
        problem = server.problem(layer(64, 1024), Parallelism(), H200, options)
        name = server.file_name(problem, "up")
        found = server.lookup(problem, "up", trees(name, user=True, shipped=True), options)
        assert found.outcome is outcome
        if outcome is Outcome.IGNORED:
            assert (found.candidates, found.log_lines) == ((), ())
            assert server.default_config(problem, "up", 4096) == KernelConfig(64, 64, 32, 8)
            assert server.default_switches(problem) == ()


@pytest.mark.parametrize("value", ["0", "", "yes", "0x1"])
def test_batch_invariance_is_off_for_what_is_no_number(value: str) -> None:
    options = ServerOptions(environment={"VLLM_BATCH_INVARIANT": value})
    assert open_vllm().problem(layer(8, 64, topk=2), Parallelism(), H200, options).flags == ()

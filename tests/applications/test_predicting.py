"""From a problem to tables: the fastest that can run, never worse than the default, at every m."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moetune.applications.predicting import NOISE, Forecast, NothingFitsError, forecast, keys_for
from moetune.domain.choose import Reason
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.model import LayerOverrides
from moetune.domain.problem import KERNELS, Parallelism
from moetune.domain.space import can_run
from moetune.domain.version import parse_release
from moetune.servers.protocol import ServerOptions
from moetune.servers.registry import open_server
from tests.doubles import ModelDouble, padded_rows_us

if TYPE_CHECKING:
    from moetune.applications.predicting import Predicted, Rejected
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem
    from moetune.servers.protocol import Server

WINNER = KernelConfig(64, 128, 64, 16, 8, 4)


def problem_of(server: Server, gpu: str = "NVIDIA H200", quant: str = "bf16", tp: int = 4) -> Problem:
    from moetune.applications.checkpoints import resolve

    overrides = LayerOverrides(experts=256, topk=8, hidden=3072, intermediate=1024, quant=quant)
    layer = resolve(None, overrides=overrides)
    return server.problem(layer, Parallelism(tp=tp), find_gpu(gpu), ServerOptions())


def tables(
    server: Server,
    problem: Problem,
    model: ModelDouble,
    rejected: Rejected = frozenset(),
    largest_m: int = 8192,
) -> Predicted:
    keys = keys_for(server, problem, largest_m, ())
    return Forecast(server, problem, model).tables(keys, largest_m, rejected)


def test_a_planted_winner_is_chosen_for_every_m() -> None:
    server = open_server("sglang")

    def time_us(kernel: Kernel, m: int, launch: Launch) -> float:
        return padded_rows_us(kernel, m, launch) * (0.01 if launch.config == WINNER else 1)

    predicted = tables(server, problem_of(server), ModelDouble(time_us))
    assert {choice.pair.up for choice in predicted.choices.entries} == {WINNER}
    assert {choice.pair.down for choice in predicted.choices.entries} == {WINNER}
    assert predicted.gain is not None
    assert predicted.gain > 50


@pytest.mark.parametrize(
    ("gpu", "quant"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16"),
        ("NVIDIA L40S", "bf16"),
        ("NVIDIA L40S", "fp8-block"),
        ("NVIDIA H200", "fp8-block"),
        ("NVIDIA B200", "bf16"),
    ],
)
def test_whatever_is_chosen_can_run(gpu: str, quant: str) -> None:
    server = open_server("sglang")
    problem = problem_of(server, gpu, quant)

    def greedy_us(kernel: Kernel, m: int, launch: Launch) -> float:
        """The larger the tile and the more stages, the better: straight to what cannot run."""
        config = launch.config
        size = config.block_size_m * config.block_size_n * config.block_size_k * config.num_stages
        return 1e9 / size + m * (kernel == "up")

    predicted = tables(server, problem, ModelDouble(greedy_us))
    triton = parse_release(server.triton_version)
    for choice in predicted.choices.entries:
        up = server.launch(problem, "up", choice.pair.up)
        down = server.launch(problem, "down", choice.pair.down, choice.pair.up)
        assert can_run(up, problem.gpu, triton)
        assert can_run(down, problem.gpu, triton)
        assert not choice.pair.up.use_tma
    assert sum(predicted.refused.values()) > 100


def test_two_files_agree_on_block_size_m_and_one_file_holds_one_config() -> None:
    def apart_us(kernel: Kernel, m: int, launch: Launch) -> float:
        """Up wants few warps and small tiles, down many and large ones."""
        size = launch.config.block_size_m * launch.config.num_warps
        return padded_rows_us(kernel, m, launch) + (size if kernel == "up" else 2048 - size) / 100

    for name, one_file in (("sglang", False), ("vllm", True)):
        server = open_server(name)
        predicted = tables(server, problem_of(server), ModelDouble(apart_us))
        assert predicted.choices.one_file is one_file
        pairs = [choice.pair for choice in predicted.choices.entries]
        assert all(pair.up.block_size_m == pair.down.block_size_m for pair in pairs)
        assert all(pair.up == pair.down for pair in pairs) is one_file


def test_no_m_is_slower_than_the_default_also_between_the_keys() -> None:
    server = open_server("sglang")
    problem = problem_of(server)
    model = ModelDouble()
    predicted = tables(server, problem, model)
    up, down = predicted.choices.up, predicted.choices.down
    assert down is not None
    assert predicted.shortfalls == ()
    for m in range(1, 8193, 37):
        chosen = padded_rows_us("up", m, server.launch(problem, "up", up.nearest(m)))
        chosen += padded_rows_us("down", m, server.launch(problem, "down", down.nearest(m)))
        default = sum(
            padded_rows_us(
                kernel, m, server.launch(problem, kernel, server.default_config(problem, kernel, m))
            )
            for kernel in KERNELS
        )
        assert chosen <= default * (1 + NOISE), m


def test_a_default_that_is_best_stays_and_nothing_is_gained() -> None:
    server = open_server("sglang")
    problem = problem_of(server)

    def default_us(kernel: Kernel, m: int, launch: Launch) -> float:
        return 1.0 if launch.config == server.default_config(problem, kernel, m) else 2.0

    predicted = tables(server, problem, ModelDouble(default_us))
    assert not predicted.choices.improves
    assert {choice.reason for choice in predicted.choices.entries} == {Reason.DEFAULT_KEPT}
    assert {choice.speedup for choice in predicted.choices.entries} == {1.0}


def test_a_gain_within_the_noise_is_none() -> None:
    server = open_server("sglang")
    problem = problem_of(server)

    def close_us(kernel: Kernel, m: int, launch: Launch) -> float:
        return 1.0 if launch.config == server.default_config(problem, kernel, m) else 1.0 - NOISE / 2

    assert not tables(server, problem, ModelDouble(close_us)).choices.improves


def test_case_26_a_default_that_does_not_fit_the_card_is_replaced_and_said() -> None:
    # The per-tensor fp8 default of 0.5.13, 128/256/128 with four stages, on 101,376 bytes.
    server = open_server("sglang", "0.5.13")
    problem = problem_of(server, "NVIDIA GeForce RTX 4090", "fp8")
    predicted = tables(server, problem, ModelDouble())
    large = [choice for choice in predicted.choices.entries if choice.m > problem.E]
    assert large
    assert all(choice.default_us is None and choice.speedup is None for choice in large)
    assert all(choice.reason is Reason.DEFAULT_CANNOT_RUN for choice in large)
    assert predicted.choices.improves


def test_a_config_that_one_member_of_the_model_doubts_is_passed_over() -> None:
    server = open_server("sglang")
    safe = replace(WINNER, num_stages=3)

    def hopes_us(kernel: Kernel, m: int, launch: Launch) -> float:
        factor = {WINNER: 0.010, safe: 0.011}.get(launch.config, 1.0)
        return padded_rows_us(kernel, m, launch) * factor

    def doubts_us(kernel: Kernel, m: int, launch: Launch) -> float:
        return hopes_us(kernel, m, launch) * (1.5 if launch.config == WINNER else 1.0)

    bold = tables(server, problem_of(server), ModelDouble(hopes_us))
    wary = tables(server, problem_of(server), ModelDouble(hopes_us, hopes_us, doubts_us))
    assert {choice.pair.up for choice in bold.choices.entries} == {WINNER}
    assert {choice.pair.up for choice in wary.choices.entries} == {safe}


def test_what_was_rejected_is_not_chosen_again() -> None:
    server = open_server("sglang")
    problem = problem_of(server)
    first = tables(server, problem, ModelDouble())
    rejected: Rejected = frozenset(("up", choice.pair.up) for choice in first.choices.entries)
    again = tables(server, problem, ModelDouble(), rejected)
    assert not rejected & {("up", choice.pair.up) for choice in again.choices.entries}
    # The down kernel's choice was not rejected.
    assert {choice.pair.down for choice in again.choices.entries} & {
        choice.pair.down for choice in first.choices.entries
    }


def test_a_default_that_was_rejected_cannot_run() -> None:
    server = open_server("sglang")
    problem = problem_of(server)
    defaults: Rejected = frozenset(("up", server.default_config(problem, "up", m)) for m in (1, 8192))
    predicted = tables(server, problem, ModelDouble(), defaults)
    assert all(choice.default_us is None for choice in predicted.choices.entries)


def test_the_whole_space_is_asked_once_for_each_kernel_and_key() -> None:
    server = open_server("sglang")
    model = ModelDouble()
    predicted = tables(server, problem_of(server), model)
    whole = [(kernel, m) for kernel, m, count in model.asked if count > 100]
    assert len(whole) == len(set(whole)) == 2 * len(predicted.choices.entries)
    # What stands between the keys is asked about a few configs only.
    assert all(count <= 8 for _, _, count in model.asked if count <= 100)


def test_limits_are_those_of_each_kernel() -> None:
    server = open_server("sglang")
    predicted = tables(server, problem_of(server), ModelDouble())
    assert set(predicted.limits.values()) == {("memory", "latency")}


def test_vllm_clamps_leave_no_config_that_the_server_would_change() -> None:
    server = open_server("vllm")
    problem = problem_of(server, "NVIDIA L40S", "fp8-block")

    seen: list[KernelConfig] = []

    def wide_us(kernel: Kernel, m: int, launch: Launch) -> float:
        if (kernel, m) == ("up", 64):
            seen.append(launch.config)
        return 1e6 / launch.config.block_size_k + padded_rows_us(kernel, m, launch)

    predicted = tables(server, problem, ModelDouble(wide_us))
    assert {choice.pair.up.block_size_k for choice in predicted.choices.entries} == {128}
    ranked = seen[: predicted.ranked["up"]]
    assert len(set(ranked)) == len(ranked)


def test_fp8_without_fp8_tensor_cores_says_why() -> None:
    server = open_server("sglang")
    problem = problem_of(server, "NVIDIA A100-SXM4-80GB", "fp8-block")
    with pytest.raises(NothingFitsError, match="fp8"):
        forecast(server, problem, ModelDouble())


def test_a_gpu_without_room_for_anything_is_an_answer_not_a_crash() -> None:
    server = open_server("sglang")
    problem = problem_of(server)
    tiny = replace(problem, gpu=replace(problem.gpu, smem_optin_bytes=1024))
    with pytest.raises(NothingFitsError, match="H200"):
        forecast(server, tiny, ModelDouble())


def test_own_keys_and_their_weights_make_the_mean() -> None:
    server = open_server("sglang")
    problem = problem_of(server)
    keys = keys_for(server, problem, 8192, ((7, 3.0), (900, 1.0)))
    predicted = Forecast(server, problem, ModelDouble()).tables(keys, 8192)
    gains = {choice.m: choice.speedup for choice in predicted.choices.entries}
    assert {7, 900} <= gains.keys()
    assert gains[7] is not None
    assert gains[900] is not None
    assert predicted.gain == pytest.approx(gains[7] ** 0.75 * gains[900] ** 0.25)


def test_the_document_holds_what_was_chosen() -> None:
    server = open_server("sglang")
    predicted = tables(server, problem_of(server), ModelDouble())
    document = predicted.to_json()
    first = document["entries"][0]
    assert first["up"] == predicted.choices.entries[0].pair.up.to_json()
    assert first["limits"] == {"up": "memory", "down": "latency"}
    assert document["familiarity"] == {"distance": 0.25, "text": "a stand-in of the tests"}

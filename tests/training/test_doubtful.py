"""Doubtful times: what a host that was held up leaves is found, what routings and kernels do is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from training.dataset import Group
from training.doubtful import doubtful, named

from moetune.domain.config import KernelConfig
from moetune.domain.features import FloatArray, features, launch_arrays
from moetune.domain.gpu import filled
from moetune.domain.predict import PerformanceModel
from moetune.servers.registry import open_server
from tests.generators import problem

CONFIGS = tuple(
    KernelConfig(16, block_size_n, 64, group_size_m, 4, 3)
    for block_size_n in (32, 64, 128)
    for group_size_m in (1, 8, 16, 32)
)


def group() -> Group:
    """Times that are the model's own, twice; other routings took 10% longer the second time."""
    layer = problem()
    launches = [open_server("sglang", "0.5.23", "3.6.0").launch(layer, "up", config) for config in CONFIGS]
    matrix, done = features(layer, "up", 64, launch_arrays(launches, (9, 0)), filled(layer.gpu))
    model = PerformanceModel.load()
    time_us = np.exp(predicted(matrix, model)) * done.floor_us
    for place in range(0, len(CONFIGS), 4):  # those that differ in GROUP_SIZE_M alone take the same
        time_us[place : place + 4] = time_us[place]
    return Group(
        *("a_shape_h200_own-kernel", (layer.E, layer.N, layer.K), "bf16", layer, "up", 64, CONFIGS, matrix),
        *(done.floor_us, time_us, 1.1 * time_us),
    )


def predicted(matrix: FloatArray, model: PerformanceModel) -> FloatArray:
    answers = model.time_head(((matrix - model.mean) / model.scale).astype(np.float32))
    return np.asarray(answers.mean(0))


def found(one: Group) -> list[KernelConfig]:
    return doubtful(one, np.log(one.time_us / one.floor_us))


def test_other_routings_are_not_doubtful() -> None:
    assert found(group()) == []


def test_passes_that_part_are() -> None:
    one = group()
    one.second_us[5] *= 1.08
    one.time_us[7] *= 1.08
    assert found(one) == [CONFIGS[5], CONFIGS[7]]


def test_what_was_timed_once_is_where_its_like_is_faster() -> None:
    one = group()
    one.time_us[6] *= 1.25
    one.second_us[6] = np.nan
    assert found(one) == [CONFIGS[6]]
    one.time_us[6] /= 1.1
    assert found(one) == []
    twice = group()
    twice.time_us[6] *= 1.25
    twice.second_us[6] *= 1.25
    assert found(twice) == []


def test_what_was_timed_once_is_where_the_model_had_it_among_the_best() -> None:
    one = group()
    said = np.log(one.time_us / one.floor_us)
    said[:4], said[4:] = said.min(), said.min() + np.log(1.5)
    one.time_us[:] = one.floor_us * np.exp(said) * 1.25
    one.second_us[:] = 1.1 * one.time_us
    one.second_us[[0, 1, 2, 3, 6]] = np.nan
    assert doubtful(one, said) == list(CONFIGS[:4])
    one.time_us[:4] /= 1.1
    assert doubtful(one, said) == []


def test_groups_of_one_pass_are_left_alone_and_the_others_named_as_the_recorder_reads_them() -> None:
    model, one = PerformanceModel.load(), group()
    one.second_us[5] *= 1.3
    places = named([one], model)["a_shape"]["up 64"]
    assert [16, 64, 64, 8, 4, 3] in places
    one.time_us[6] *= 2.0
    assert named([replace(one, second_us=np.full(len(CONFIGS), np.nan))], model) == {}

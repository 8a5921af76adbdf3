"""What SGLang's own code hands to its kernel with USE_TMA and with the sum over topk, in every release."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moetune.domain.compilation import CompileTask, compile_task
from moetune.domain.config import KernelConfig
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.servers.kernel_values import Descriptor, Lengths
from moetune.servers.protocol import KernelServer
from moetune.servers.registry import open_server
from moetune.servers.sglang.releases import Feature, rules_of
from tests.measure.server_files import RELEASES
from tests.measure.test_layer import FP8, SEED
from tests.servers.kernel_calls import Described, Wheel
from tests.servers.test_kernel_values import made, matches

VERSIONS = [
    version
    for package, version in RELEASES
    if package == "sglang" and rules_of(version).has(Feature.DOWN_FILE)
]
PLAIN = KernelConfig(16, 128, 64, 8, 4, 3)
TMA = replace(PLAIN, use_tma=True)
M = 8


def task_of(
    version: str, problem: Problem, kernel: Kernel, up: KernelConfig, down: KernelConfig
) -> CompileTask:
    server = open_server("sglang", version)
    launch = server.launch(problem, kernel, up if kernel == "up" else down, up, down)
    (kind,) = server.launch_classes(problem, kernel, (M,), launch.config.block_size_m)
    task = compile_task(launch, problem, kind)
    assert isinstance(task, CompileTask)
    return task


@pytest.mark.parametrize("version", VERSIONS)
def test_descriptors_and_sorted_rows_are_what_sglang_hands_over(version: str) -> None:
    wheel, server = Wheel("sglang", version), open_server("sglang", version)
    assert isinstance(server, KernelServer)
    ups = (PLAIN, TMA) if rules_of(version).has(Feature.UP_TMA) else (PLAIN,)
    for shape in (SEED, FP8):
        problem = replace(shape, server_version=version)
        for kernel in KERNELS:
            for up in ups:
                task = task_of(version, problem, kernel, up, TMA)
                # As `_fused_moe_kernel_sequence` calls it, before 0.5.11 `fused_experts_impl`.
                asked = {
                    "a_use_tma": kernel == "down",
                    "b_use_tma": kernel == "down" or up.use_tma,
                    "c_sorted": kernel == "up",
                }
                call = wheel.launch({**made(problem, task, M), **asked}, grouped=False)
                lengths = Lengths(
                    server.covered_length(problem, kernel, M, PLAIN.block_size_m), M * problem.topk
                )
                values = server.kernel_values(wheel.parameters[call.kernel], task, lengths)
                assert values["c_sorted"] is call.values["c_sorted"] is (kernel == "up")
                for name in ("a_desc", "b_desc"):
                    ours, theirs = values[name], call.values[name]
                    if theirs is None:
                        assert ours is None, (name, kernel)
                        continue
                    assert isinstance(ours, Descriptor)
                    assert isinstance(theirs, Described)
                    assert ours.tile == theirs.tile
                    whole = {"a_desc": call.values["a_ptr"], "b_desc": call.values["b_ptr"]}[name]
                    assert theirs.base is whole
                rest = {k: v for k, v in values.items() if k in call.values and not k.endswith("_desc")}
                assert not {k: v for k, v in rest.items() if not matches(v, call.values[k])}


@pytest.mark.parametrize("version", [v for v in VERSIONS if rules_of(v).has(Feature.FUSED_SUM)])
def test_a_sum_over_topk_is_what_sglang_hands_over(version: str) -> None:
    wheel, server = Wheel("sglang", version), open_server("sglang", version)
    assert isinstance(server, KernelServer)
    problem = replace(SEED, topk=3, server_version=version, flags=("fused_sum",))
    for kernel in KERNELS:
        task = task_of(version, problem, kernel, PLAIN, PLAIN)
        arguments = made(problem, task, M)
        if kernel == "down":
            arguments |= {"fuse_sum_all_reduce": True, "router_topk": 3}
            arguments["C"] = torch.zeros(M, task.n, dtype=arguments["C"].dtype)
        call = wheel.launch(arguments, grouped=False)
        lengths = Lengths(server.covered_length(problem, kernel, M, PLAIN.block_size_m), M * problem.topk)
        values = server.kernel_values(wheel.parameters[call.kernel], task, lengths)
        assert values["FUSE_SUM_ALL_REDUCE"] is (kernel == "down")
        assert not {k: v for k, v in values.items() if k in call.values and not matches(v, call.values[k])}

"""Our sharding of an expert layer against the functions of vLLM's published wheels."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from moetune.domain.errors import ShardingError
from moetune.domain.gpu import Gpu
from moetune.domain.model import ExpertLayer
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ServerOptions
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.rules import Change, has
from tests.servers.vllm_cases import (
    VERSIONS,
    every_version,
)
from tests.servers.vllm_loader import (
    FUSED_MOE,
    defines,
    load,
    method_of,
)


@every_version
def test_the_wheel_splits_experts_and_columns_as_we_do(version: str) -> None:
    """Cases 9 and 25: tensor, data and expert parallelism, against the layer's own two functions."""
    config, server = FUSED_MOE + "config.py", open_vllm(version, None)
    owner = "FusedMoEParallelConfig"
    flatten = ("flatten_tp_across_dp", "flatten_tp_across_dp_and_pcp")
    parts = [name for name in ("make", *flatten) if has_method(version, config, owner, name)]
    make = load(
        [(version, config, method_of(version, config, owner, name)) for name in parts],
        {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_dp_group": lambda: SimpleNamespace(rank_in_group=0),
        },
    )
    holder = MagicMock(side_effect=lambda **sizes: SimpleNamespace(**sizes))
    for name in parts:
        setattr(holder, name, make[name])
    make[owner] = holder
    maps = next(
        FUSED_MOE + name
        for name in ("expert_map_manager.py", "layer.py")
        if defines(version, FUSED_MOE + name, "determine_expert_map")
    )
    expert_map = load([(version, maps, "determine_expert_map")], {})["determine_expert_map"]
    rng = random.Random(version)
    refused = 0
    for _ in range(300):
        parallelism = Parallelism(
            tp=rng.choice((1, 2, 3, 4, 8)), ep=rng.choice((1, 1, 2, 8)), dp=rng.choice((1, 1, 2, 4))
        )
        layer = ExpertLayer(
            "m", "A", rng.choice((60, 64, 128, 288)), 4, 1024, rng.choice((704, 768, 1408, 2048))
        )
        sizes = {"tp_size_": parallelism.tp, "dp_size_": parallelism.dp, "pcp_size_": 1, "sp_size_": 1}
        accepted = inspect.signature(make["make"]).parameters
        parallel = make["make"](
            **{name: size for name, size in sizes.items() if name in accepted},
            vllm_parallel_config=SimpleNamespace(
                enable_expert_parallel=parallelism.ep > 1, all2all_backend="x", enable_eplb=False
            ),
        )
        local = {expert_map(parallel.ep_size, rank, layer.num_experts)[0] for rank in range(parallel.ep_size)}
        # The layer asserts that the columns divide; uneven ranks read two files.
        if layer.intermediate_size % parallel.tp_size or len(local) == 2:
            with pytest.raises(ShardingError):
                server.problem(layer, parallelism, Gpu("NVIDIA H200"), ServerOptions())
            refused += 1
            continue
        problem = server.problem(layer, parallelism, Gpu("NVIDIA H200"), ServerOptions())
        assert local == {problem.E}
        assert problem.N * parallel.tp_size == layer.intermediate_size
        assert problem.ep == parallel.ep_size
    assert 20 < refused < 200


def has_method(version: str, path: str, owner: str, name: str) -> bool:
    try:
        method_of(version, path, owner, name)
    except LookupError:
        return False
    return True


@every_version
def test_the_wheel_fits_fp8_blocks_to_the_shard_as_we_do(version: str) -> None:
    server = open_vllm(version, None)
    refines = has(server.release, Change.FP8_BLOCK_REFINED)
    oracle, method = FUSED_MOE + "oracle/fp8.py", "vllm/model_executor/layers/quantization/fp8.py"
    create = load([(version, method, method_of(version, method, "Fp8MoEMethod", "create_weights"))], {})
    names = ["refine_fp8_moe_block_shape", "pad_tp_shard_to_weight_blocks"] if refines else []
    fit = load([(version, oracle, name) for name in names], {"round_up": lambda a, b: -(-a // b) * b})
    outcomes: set[str] = set()
    for block in ((128, 128), (64, 128), (128, 64), (96, 128)):
        for intermediate in (128, 352, 704, 768, 1024, 1408, 2048):
            for tp, ep, dp in SPLITS:
                if ep == 1 and intermediate % (tp * dp):
                    continue
                # The hidden size has its say in how fine the blocks can be.
                for backend, hidden in (("auto", 1024), ("triton", 1024), ("auto", 1040)):
                    layer = ExpertLayer(
                        "m",
                        "A",
                        64,
                        4,
                        hidden,
                        intermediate,
                        quantization=Quantization(Dtype.FP8_W8A8, method="fp8", block_shape=block),
                    )
                    expected = fp8_shape_really(create, fit, layer, Parallelism(tp, ep, dp), backend)
                    try:
                        problem = server.problem(
                            layer,
                            Parallelism(tp, ep, dp),
                            Gpu("NVIDIA H200"),
                            ServerOptions(moe_runner_backend=backend),
                        )
                    except ShardingError:
                        assert expected is None, (layer, tp, ep, dp, backend)
                        outcomes.add("refused")
                        continue
                    assert (problem.N, problem.quantization.block_shape) == expected, (
                        layer,
                        tp,
                        ep,
                        dp,
                        backend,
                    )
                    outcomes.add("refined" if problem.quantization.block_shape != block else "exact")
                    outcomes |= (
                        {"padded"} if problem.N * (tp * dp if ep == 1 else 1) != intermediate else set()
                    )
    assert outcomes == ({"exact", "refined", "padded", "refused"} if refines else {"exact", "refused"})


SPLITS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 1), (1, 1, 2), (1, 2, 4), (1, 1, 8))


def fp8_shape_really(
    create: dict[str, Any], fit: dict[str, Any], layer: ExpertLayer, parallelism: Parallelism, backend: str
) -> tuple[int, tuple[int, int]] | None:
    """N and block shape after the real functions; None where they raise."""
    block = list(layer.quantization.block_shape or ())
    ranks = parallelism.tp * parallelism.dp
    moe_tp = 1 if parallelism.ep > 1 else ranks
    N = layer.intermediate_size // moe_tp
    config = SimpleNamespace(
        intermediate_size_per_partition=N,
        intermediate_size=layer.intermediate_size,
        hidden_dim=layer.hidden_size,
        tp_size=moe_tp,
        ep_size=ranks if parallelism.ep > 1 else 1,
        is_lora_enabled=False,
        has_bias=False,
    )
    refine, pad = fit.get("refine_fp8_moe_block_shape"), fit.get("pad_tp_shard_to_weight_blocks")
    refined = refine(config, block) if refine else None
    if refined is not None:
        return N, (refined[0], refined[1])
    try:
        if pad and backend != "auto" and pad(config, block):
            return config.intermediate_size_per_partition, (block[0], block[1])
        create["get_tensor_model_parallel_world_size"] = lambda: parallelism.tp
        if "validate_fp8_block_shape_moe" in create:
            create["validate_fp8_block_shape_moe"] = validate_really(parallelism.tp)
        this = MagicMock(
            block_quant=True, weight_block_size=block, weight_scale_refine=None, moe_block_shape=block
        )
        this.quant_config.weight_block_size = block
        this.quant_config.activation_scheme = "dynamic"
        create["create_weights"](this, MagicMock(), layer.num_experts, layer.hidden_size, N, "bf16")
    except ValueError:
        return None
    return N, (block[0], block[1])


def validate_really(tp: int) -> Any:
    path = "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
    newest = VERSIONS[-1]
    parallel = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: tp)
    names = {"__modules__": {"vllm.distributed": parallel}}
    return load([(newest, path, "validate_fp8_block_shape_moe")], names)["validate_fp8_block_shape_moe"]

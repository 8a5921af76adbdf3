"""Our rules of vLLM against the functions of its published wheels: a disagreement is a bug of ours.

Four releases on both sides of most changes run by default; MOETUNE_VLLM_VERSIONS names others.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError, ServerError
from moetune.domain.gpu import Gpu
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype
from moetune.servers.protocol import Outcome
from moetune.servers.vllm import open_vllm
from moetune.servers.vllm.defaults import is_grouped
from moetune.servers.vllm.rules import Change, has
from tests.servers.vllm_cases import (
    FLAGS,
    Case,
    cases,
    every_version,
    fill,
    options,
    outcome_of,
    same,
    tree,
)
from tests.servers.vllm_loader import (
    FUSED_MOE,
    real,
)
from tests.servers.vllm_problems import FP8_BLOCK, layer, sharded
from tests.wheels import members, read_member


def write_table(path: Path, rng: random.Random, problem: Problem, split_k: bool) -> None:
    """A tuned file whose entries differ and whose keys stand in any order."""
    keys = rng.sample((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096), rng.randint(1, 9))
    document: dict[str, Any] = {}
    for place, key in enumerate(keys):
        document[str(key)] = {
            "BLOCK_SIZE_M": rng.choice((16, 32, 64, 128)),
            "BLOCK_SIZE_N": rng.choice((32, 64, 128, 256)),
            "BLOCK_SIZE_K": rng.choice((64, 128, 256)),
            "GROUP_SIZE_M": place + 1,
            **({"SPLIT_K": 1} if split_k else {}),
            "num_warps": rng.choice((4, 8)),
            "num_stages": rng.choice((2, 3, 4)),
        }
    if rng.random() < 0.3 and open_vllm(problem.server_version, None).release >= (0, 11, 0):
        document["triton_version"] = "3.4.0"
    path.write_text(json.dumps(document))


@every_version
def test_the_wheel_finds_the_same_file_entry_default_and_log(version: str, tmp_path: Path) -> None:
    functions, server, rng = real(version), open_vllm(version, None), random.Random(version)
    seen: set[str] = set()
    for number, case in enumerate(cases(version, 400)):
        problem = case.problem
        user, module = tmp_path / f"{number}u", tmp_path / f"{number}m"
        (module / "configs").mkdir(parents=True)
        user.mkdir()
        has_folder = rng.random() < 0.7
        with functions.world(
            problem.gpu.torch_name,
            vendor=problem.gpu.vendor,
            capability=problem.gpu.compute_capability,
            folder=str(user) if has_folder else None,
            invariant=bool(problem.flags),
            module=module,
        ):
            try:
                tag = functions.dtype_tag(FLAGS.get(problem.quantization.dtype, set()), case.tensor_dtype)
            except KeyError:
                with pytest.raises(ServerError, match="no name"):
                    server.file_name(problem, "up")
                seen.add("no tag")
                continue
            name = functions.get_config_file_name(problem.E, problem.file_n, tag, case.block)
            if any(character in name for character in "/\t"):
                with pytest.raises(ServerError, match="cannot stand in a file name"):
                    server.file_name(problem, "up")
                seen.add("odd device")
                continue
            assert server.file_name(problem, "up") == server.file_name(problem, "down") == name
            split_k = is_grouped(problem) and has(server.release, Change.SPLIT_K)
            decoys = [
                f"E={problem.E},N={problem.file_n},device_name=X.json",
                name.replace(",", ", "),
                name + "x",
            ]
            for folder in (user, module / "configs"):
                for decoy in decoys:
                    (folder / decoy).write_text("{}")
                if rng.random() < 0.4:
                    write_table(folder / name, rng, problem, split_k)
            w1, w2 = case.shapes(version)
            chosen = functions.try_get_optimal_moe_config(w1, w2, problem.topk, tag, case.m, case.block)
            log = tuple(functions.log.lines)
            trees = [tree(user)] if has_folder else []
            trees.append(tree(module / "configs"))
            ours = server.lookup(problem, "up", trees, options(problem))
            assert ours.log_lines == log
            assert ours.file_name == name
            found = [line.split(" from ")[1].split(" for MoE")[0] for level, line in log if level == "INFO"]
            assert ([ours.found] if ours.found else []) == found
            assert (ours.outcome is Outcome.IGNORED) == bool(problem.flags)
            for kernel in KERNELS:
                if ours.found:
                    table = server.read_table(Path(ours.found).read_text(), name, problem)
                    config = server.config_for(table, case.m)
                else:
                    config = server.default_config(problem, kernel, case.m)
                expected = fill(functions, version, case, kernel, dict(chosen))
                assert same(expected, config, problem), (case, kernel, expected, config)
            seen.add(ours.outcome.value + (" user" if ours.found and str(user) in ours.found else ""))
    assert {"exact", "exact user", "default"} <= seen
    assert ("ignored" in seen) == has(server.release, Change.BATCH_INVARIANT)


@every_version
def test_the_wheel_changes_its_default_where_we_say(version: str) -> None:
    functions, server = real(version), open_vllm(version, None)
    for case in cases(version, 60, "switches"):
        problem = case.problem
        if problem.quantization.dtype is Dtype.FP8_W8A16:
            continue
        limit = min(129 * problem.E + 2, 2200)
        with functions.world(
            problem.gpu.torch_name, vendor=problem.gpu.vendor, invariant=bool(problem.flags)
        ):
            tag = functions.dtype_tag(FLAGS.get(problem.quantization.dtype, set()), case.tensor_dtype)
            w1, _ = case.shapes(version)
            real_defaults: dict[int, list[dict[str, Any]]] = {}
            for m in range(1, limit + 1):
                found = functions.get_default_config(
                    m, problem.E, problem.N, w1[2], problem.topk, tag, case.block
                )
                at_m = Case(problem, m)
                real_defaults[m] = [fill(functions, version, at_m, kernel, dict(found)) for kernel in KERNELS]
            switches = [
                m for m in range(1, limit) if _launched(real_defaults[m]) != _launched(real_defaults[m + 1])
            ]
            assert [m for m in server.default_switches(problem) if m < limit] == switches
            for m in {1, limit, *switches, *(m + 1 for m in switches)}:
                for kernel, expected in zip(KERNELS, real_defaults[m], strict=True):
                    ours = server.default_config(problem, kernel, m)
                    assert same(expected, ours, problem), (problem, kernel, m, expected, ours)


def _launched(defaults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # The CUDA kernel's default has no GROUP_SIZE_M, which is then 1 to us.
    return [{"GROUP_SIZE_M": 1, **config} for config in defaults]


GOOD = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
TEXTS = (
    "",
    " ",
    "[]",
    "[1]",
    "7",
    '"1"',
    "null",
    "true",
    "{}",
    "{",
    '{"1": }',
    "{'1': {}}",
    "\ufeff{}",
    "\t{}\n",
    '{"8.0": {}}',
    '{"default": {}}',
    '{"": {}}',
    '{"1_0": GOOD}',
    '{" 8 ": GOOD, "8": GOOD}',
    '{"-3": GOOD, "+4": GOOD}',
    '{"0x10": GOOD}',
    '{"\u0663": GOOD}',
    '{"1": GOOD, "triton_version": "3.4.0"}',
    '{"triton_version": null}',
    '{"triton_version": {"a": [1]}, "2": GOOD}',
    '{"1": GOOD, "1": GOOD, "2": GOOD}',
    '{"1": GOOD,}',
    '{"1": GOOD} {"2": GOOD}',
    "[" * 100000,
    '{"1": GOOD, "' + "9" * 5000 + '": GOOD}',
)


@every_version
def test_the_wheel_loads_or_dies_as_our_reader_says(version: str, tmp_path: Path) -> None:
    """Case 38: what the loader itself raises, named; keys and their order when it loads."""
    functions, server, rng = real(version), open_vllm(version, None), random.Random(version)
    texts = [text.replace("GOOD", json.dumps(GOOD)) for text in TEXTS]
    whole = json.dumps(
        {"1": GOOD, "triton_version": "3.4.0", "2": GOOD} if version >= "0.11" else {"1": GOOD}
    )
    for _ in range(300):
        # One character of a good file replaced, dropped or doubled.
        place, character = rng.randrange(len(whole)), rng.choice('{}[]",:0a \n\\')
        middle = rng.choice((character, "", whole[place] * 2))
        texts.append(whole[:place] + middle + whole[place + 1 :])
    died = loaded = 0
    for number, text in enumerate(texts):
        module = tmp_path / str(number)
        (module / "configs").mkdir(parents=True)
        with functions.world("GPU", module=module):
            path = module / "configs" / functions.get_config_file_name(8, 64, None, None)
            path.write_text(text, encoding="utf-8")
            found, error = outcome_of(functions.get_moe_configs, 8, 64, None)
        if error is not None:
            _, refused = outcome_of(server.read_table, text, path.name)
            assert isinstance(refused, ConfigFileError)
            assert f": {type(error).__name__})" in refused.message, (text[:80], error)
            died += 1
            continue
        loaded += 1
        table, refused = outcome_of(server.read_table, text, path.name)
        if refused is not None:
            # The loader takes any entry: only a launch can have died of it.
            assert any(entry != GOOD for entry in found.values()), (text[:80], refused)
            continue
        assert [m for m, _ in table.entries] == list(found)
    assert died > 50
    assert loaded > 50


@every_version
def test_every_file_that_the_wheel_ships_is_read_or_said_to_be_unreadable(version: str) -> None:
    """Case 37: the shipped files that no lookup can find, and why."""
    server = open_vllm(version, None)
    shipped = [name for name in members("vllm", version) if name.startswith(FUSED_MOE + "configs/E=")]
    unread: dict[str, int] = {}
    for path in shipped:
        name = path.rsplit("/", 1)[1]
        reason = server.never_read(name)
        text = read_member("vllm", version, path)
        if reason is not None:
            kind = next(
                (word for word in ("int8_w8a8", "=bf16", "=float8", "flydsl") if word in name), reason
            )
            unread[kind] = unread.get(kind, 0) + 1
        if "flydsl" in name:
            with pytest.raises(ConfigFileError, match="KeyError"):
                server.read_table(text, name)
            continue
        table = server.read_table(text, name)
        document = json.loads(text)
        document.pop("triton_version", None)
        assert [m for m, _ in table.entries] == [int(key) for key in document]
        for (_, config), entry in zip(table.entries, document.values(), strict=True):
            assert {"num_warps": 4, "num_stages": 3, **entry} == as_entry(config)
    assert len(shipped) > 200
    if version == "0.33.0":
        assert unread == {"int8_w8a8": 5, "=bf16": 2, "=float8": 2, "flydsl": unread["flydsl"]}


def as_entry(config: KernelConfig) -> dict[str, Any]:
    return {
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **dict(config.extra),
    }


@every_version
def test_the_wheel_reads_back_what_we_write(version: str, tmp_path: Path) -> None:
    functions, server, rng = real(version), open_vllm(version, None), random.Random(version)
    written = 0
    for case in cases(version, 40, "write"):
        problem = case.problem
        if problem.quantization.dtype is Dtype.FP8_W8A16 or any(c in problem.gpu.torch_name for c in "/\t"):
            continue
        keys = rng.sample((1, 2, 8, 16, 64, 256, 4096), 4)
        entries = tuple((key, KernelConfig(16 << place, 64, 128, 1, 4, 3)) for place, key in enumerate(keys))
        module = tmp_path / str(written)
        (module / "configs").mkdir(parents=True)
        name = server.file_name(problem, "up")
        (module / "configs" / name).write_text(server.render_table(problem, ConfigTable(entries)))
        with functions.world(problem.gpu.torch_name, vendor=problem.gpu.vendor, module=module):
            tag = functions.dtype_tag(FLAGS.get(problem.quantization.dtype, set()), case.tensor_dtype)
            block = case.block or [0, 0]
            found = functions.get_moe_configs(problem.E, problem.file_n, tag, *block)
        assert list(found) == sorted(keys)
        for key, config in entries:
            assert same(
                found[key],
                replace(config, extra=(("SPLIT_K", 1),) if "SPLIT_K" in found[key] else ()),
                problem,
            )
        written += 1
    assert written > 20


def test_case_27_vllm_clamps_block_size_k_of_its_own_b200_file() -> None:
    """Eight entries have 256 where the scales have 128; clamped, every entry fits 101,376 bytes."""
    name = "E=128,N=768,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128,128].json"
    rtx = Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", compute_capability=(12, 0))
    server, problem = sharded(layer(128, 768, quantization=FP8_BLOCK), version="0.33.0", gpu=rtx)
    table = server.read_table(read_member("vllm", "0.33.0", FUSED_MOE + "configs/" + name), name, problem)
    assert len(table.entries) == 18
    assert sum(config.block_size_k == 256 for _, config in table.entries) == 8

    def shared_bytes(config: KernelConfig) -> int:
        # sm_120: one stage less than num_stages, one byte an element (specification of the resources).
        tile = (config.block_size_m + config.block_size_n) * config.block_size_k
        return max(config.num_stages - 1, 1) * tile

    too_large = [m for m, config in table.entries if shared_bytes(config) > 101_376]
    assert too_large == [32, 48, 64, 96, 2048, 3072, 4096]
    clamped = [server.launch(problem, "up", config).config for _, config in table.entries]
    assert {config.block_size_k for config in clamped} <= {64, 128}
    assert max(map(shared_bytes, clamped)) <= 101_376

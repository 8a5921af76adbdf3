"""Our rules of SGLang against SGLang itself: its own functions, from its wheels, on real directories.

A scenario is one shape on one GPU with one Triton and one (often broken) tree of config files. Both
sides are asked what they find, which entry they choose, what they print, and what they die of.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.config import KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.domain.gpu import Gpu
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, Lookup, Outcome, ServerOptions
from moetune.servers.sglang import SGLang, open_sglang
from tests.servers.sglang_loader import Real, World, load_lookup

# All three homes of the module, both sides of each change of its rules.
VERSIONS = [
    *("0.4.9", "0.5.1", "0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.6", "0.5.9", "0.5.10"),
    *("0.5.11", "0.5.12", "0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.18", "0.5.20", "0.5.23"),
]
SCENARIOS = 50

GPUS = (
    Gpu("NVIDIA H200", compute_capability=(9, 0), smem_optin_bytes=232_448),
    Gpu("NVIDIA H200 NVL", compute_capability=(9, 0), smem_optin_bytes=232_448),
    Gpu("NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), smem_optin_bytes=166_912),
    Gpu("NVIDIA GeForce RTX 4090", compute_capability=(8, 9), smem_optin_bytes=101_376),
    Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", compute_capability=(12, 0)),
    Gpu("Orin (nvgpu)", compute_capability=(8, 7)),
    Gpu("AMD Instinct MI300X", vendor="AMD", gfx="gfx942"),
    Gpu("Intel(R) Arc(TM) Pro B60 Graphics", vendor="Intel"),
)
SHARED_MEMORY = {(12, 0): 101_376, (8, 7): 166_912}

QUANTIZATIONS = (
    Quantization(),
    Quantization(Dtype.FP8_W8A8, "fp8"),
    Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128)),
    Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(64, 128)),
    Quantization(Dtype.FP8_W8A8, "compressed-tensors", per_channel=True),
    Quantization(Dtype.INT8_W8A8, "w8a8_int8", per_channel=True),
    Quantization(Dtype.INT8_W8A8, "blockwise_int8", block_shape=(128, 128)),
    Quantization(Dtype.INT8_W8A16, "moe_wna16", group_size=128),
    Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=32),
    Quantization(Dtype.MXFP4, "mxfp4"),
)
FLAGS = {
    Dtype.FP8_W8A8: "use_fp8_w8a8",
    Dtype.INT8_W8A8: "use_int8_w8a8",
    Dtype.INT8_W8A16: "use_int8_w8a16",
    Dtype.INT4_W4A16: "use_int4_w4a16",
}

NUMERIC = ["3_1_0", "3_2_0", "3_3_1", "3_4_0", "3_5_1", "3_6_0", "3_8_0", "3_10_0", "4"]
ODD = ["triton_3_6_0_bak", "triton_foo", "triton_", "triton_3.9.0", "notes", "triton_readme.txt"]
TRITONS = ["3.1.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.10.0", "3.8.0+git1a2b"]
BROKEN = [
    '{"8.0": {"BLOCK_SIZE_M": 16}}',
    '{"triton_version": "3.6.0", "8": {"BLOCK_SIZE_M": 16}}',
    "[]",
    "{",
    "\ufeff{}",
    "",
    "null",
    '{"8": {"BLOCK_SIZE_M": 16},}',
]


@dataclass(frozen=True)
class Scenario:
    """One shape in one tree, for one release."""

    server: SGLang
    problem: Problem
    options: ServerOptions
    world: World
    tree: ConfigTree
    ms: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a call of m tokens runs with, or what it dies of."""

    up: KernelConfig | None = None
    down: KernelConfig | None = None
    error: str | None = None


def random_table(rng: random.Random, *, down: bool, whole: bool) -> str:
    if rng.random() < 0.12:
        return rng.choice(BROKEN)
    if rng.random() < 0.05:
        return "{}"
    keys = rng.sample([1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 512, 1024, 4096], rng.randint(1, 9))
    table: dict[str, Any] = {}
    for key in keys:
        entry: dict[str, Any] = {
            "BLOCK_SIZE_M": rng.choice([16, 64]) if rng.random() < 0.3 else 32,
            "BLOCK_SIZE_N": rng.choice([32, 64, 128]),
            "BLOCK_SIZE_K": rng.choice([64, 128]),
            "GROUP_SIZE_M": rng.randint(1, 64),
        }
        if whole or rng.random() < 0.8:
            entry |= {"num_warps": rng.choice([4, 8]), "num_stages": rng.choice([2, 3, 4])}
        if down and rng.random() < 0.3:
            entry["USE_TMA"] = rng.random() < 0.5
        table[rng.choice(["{}", "{}", "{}", " {} ", "0{}"]).format(key)] = entry
    return json.dumps(table, indent=4)


def fill(folder: Path, names: tuple[str, str], rng: random.Random, triton: str, *, whole: bool) -> None:
    """A tree of config files below a folder: some for this shape, some that only look like it.

    whole: every entry has num_stages; what Triton takes without it differs on ROCm.
    """
    if rng.random() < 0.06:
        return
    configs = folder / "configs"
    configs.mkdir(parents=True)
    entries = [f"triton_{version}" for version in rng.sample(NUMERIC, rng.randint(0, 5))]
    entries += rng.sample(ODD, 1) if rng.random() < 0.2 else []
    if rng.random() < 0.4:
        entries.append("triton_" + triton.replace(".", "_"))
    for entry in dict.fromkeys(entries):
        if entry.endswith(".txt"):
            (configs / entry).write_text("not a directory")
            continue
        (configs / entry).mkdir()
        for name in names:
            if rng.random() < 0.35:
                (configs / entry / name).write_text(
                    random_table(rng, down=name.endswith("_down.json"), whole=whole)
                )
            for decoy in {name.replace(", ", ","), name.replace("E=", "E=1"), name.lower()} - set(names):
                if rng.random() < 0.2:
                    (configs / entry / decoy).write_text(random_table(rng, down=False, whole=whole))


def scan(root: Path) -> ConfigTree:
    configs = root / "configs"
    if not configs.is_dir():
        return ConfigTree(str(root), None)
    return ConfigTree(
        str(root),
        {
            entry.name: frozenset(file.name for file in entry.iterdir()) if entry.is_dir() else frozenset()
            for entry in configs.iterdir()
        },
    )


def random_scenario(version: str, rng: random.Random, folder: Path) -> Scenario:
    gpu, quantization = rng.choice(GPUS), rng.choice(QUANTIZATIONS)
    activation = Dtype.FP32 if quantization.dtype is Dtype.BF16 and rng.random() < 0.2 else Dtype.BF16
    triton = rng.choice(TRITONS)
    server = open_sglang(version, triton)
    deterministic = rng.random() < 0.08
    N = rng.choice([128, 192, 256, 704, 1024])
    problem = Problem(
        E=rng.choice([8, 16, 64, 128, 256, 257]),
        global_experts=256,
        topk=8,
        K=2048,
        N=N,
        file_n=N // 2 if quantization.dtype is Dtype.INT4_W4A16 else N,
        gpu=gpu,
        server="sglang",
        server_version=version,
        triton_version=triton,
        activation_dtype=activation,
        quantization=quantization,
        flags=("deterministic",) if deterministic else (),
    )
    names = (server.file_name(problem, "up"), server.file_name(problem, "down"))
    package, pointed = folder / "package", folder / "pointed"
    for root in (package, pointed):
        root.mkdir(parents=True)
        fill(root, names, rng, triton, whole=gpu.vendor == "AMD")
    use_variable = rng.random() < 0.5
    root = pointed if use_variable and server.directory_variable else package
    smem = gpu.smem_optin_bytes or SHARED_MEMORY.get(gpu.compute_capability or (0, 0))
    world = World(gpu.torch_name, triton, gpu.vendor == "AMD", smem, deterministic, folder=str(package))
    ms = (
        1,
        3,
        problem.E,
        problem.E + 1,
        *(rng.choice([rng.randint(1, 300), rng.randint(1, 9000)]) for _ in range(9)),
    )
    environment = {"SGLANG_MOE_CONFIG_DIR": str(pointed)} if use_variable else {}
    return Scenario(
        server, problem, ServerOptions(deterministic=deterministic), world, scan(root), ms, environment
    )


def supports(real: Real, parameter: str) -> bool:
    return parameter in inspect.signature(real.try_get_optimal_moe_config).parameters


def ask_real(real: Real, problem: Problem, m: int) -> Answer:
    """What the wheel's own lookup answers, called as its `fused_moe.py` calls it."""
    quantization = problem.quantization
    block = list(quantization.block_shape) if quantization.block_shape else None
    if quantization.group_size:
        block = [0, quantization.group_size]
    flag = FLAGS.get(quantization.dtype)
    options: dict[str, Any] = {}
    if supports(real, "per_channel_quant"):
        options["per_channel_quant"] = quantization.per_channel
    if supports(real, "return_down_config"):
        options["return_down_config"] = True
    hidden = "float32" if problem.activation_dtype is Dtype.FP32 else "bfloat16"
    tag = real.get_config_dtype_str(dtype=hidden, **({flag: True} if flag else {}))
    w1, w2 = (problem.E, 2 * problem.N, problem.K), (problem.E, problem.K, problem.file_n)
    try:
        found = real.try_get_optimal_moe_config(w1, w2, problem.topk, tag, m, block_shape=block, **options)
    except Exception as death:  # noqa: BLE001
        return Answer(error=type(death).__name__)
    up, down = (found[0], found[1][0]) if "return_down_config" in options else (found, None)
    stages = 2 if problem.gpu.vendor == "AMD" else 3

    def config(entry: dict[str, Any]) -> KernelConfig:
        return KernelConfig.from_json({"num_stages": stages} | entry, "real")

    return Answer(config(up), config(down or up))


def ask_ours(scenario: Scenario, m: int) -> Answer:
    """The same from our own rules, reading files only where our lookup says that they lie."""
    server, problem = scenario.server, scenario.problem
    chosen: list[KernelConfig] = []
    for kernel in KERNELS:
        lookup = server.lookup(problem, kernel, [scenario.tree], scenario.options)
        if lookup.outcome is Outcome.CRASH:
            return Answer(error=lookup.error)
        config = server.default_config(problem, kernel, m)
        if lookup.found is not None:
            text = Path(lookup.found).read_text(encoding="utf-8")
            try:
                table = server.read_table(text, lookup.found)
            except ConfigFileError as refused:
                return Answer(error=exception_of(refused))
            if table.entries:
                config = server.config_for(table, m)
            elif kernel == "down":
                config = chosen[0]  # an empty down file counts as none
        chosen.append(config)
    up, down = chosen
    try:
        return Answer(up, server.launch(problem, "down", down, up).config)
    except ConfigFileError as refused:
        return Answer(error=exception_of(refused))


def exception_of(refused: ConfigFileError) -> str:
    match = re.search(r"dies with (\w+)", refused.message)
    assert match is not None, refused.message
    return match[1]


def lines_before_death(lookups: list[Lookup]) -> int:
    """How many lines stand before the end: a file that breaks is announced before it is read."""
    up, down = lookups
    if up.outcome is Outcome.CRASH:
        return 0
    if up.found is not None and is_broken(up.found):
        return 1
    return 1 + (down.outcome is not Outcome.CRASH)


def is_broken(path: str) -> bool:
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        return not isinstance(table, dict) or any(int(key) < 0 for key in table)
    except ValueError:
        return True


def printed(lookups: list[Lookup]) -> list[tuple[str, str]]:
    return [line for lookup in lookups for line in lookup.log_lines]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_found_chosen_printed_and_raised_is_what_the_wheel_does(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"sglang {version}")
    seen: set[str] = set()
    for number in range(SCENARIOS):
        scenario = random_scenario(version, rng, (tmp_path / str(number)).resolve())
        monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
        for name, value in scenario.environment.items():
            monkeypatch.setenv(name, value)
        real = load_lookup(version, scenario.world)
        context = f"scenario {number}: {scenario.problem} {scenario.tree}"
        lookups = [
            scenario.server.lookup(scenario.problem, kernel, [scenario.tree], scenario.options)
            for kernel in KERNELS
        ]
        for number_of_calls, m in enumerate(scenario.ms):
            theirs, ours = ask_real(real, scenario.problem, m), ask_ours(scenario, m)
            assert ours == theirs, f"m={m} {context}"
            seen.add(theirs.error or lookups[1].outcome.value)
            overrides = [line for line in real.logger.lines if line[1].startswith("down_moe config")]
            if number_of_calls == 0:  # later calls find everything in the cache, unless the first one died
                lines = [line for line in real.logger.lines if line not in overrides]
                died = theirs.error not in (None, "AssertionError")
                expected = printed(lookups)
                assert lines == (expected[: len(lines)] if died else expected), context
                assert not died or len(lines) == lines_before_death(lookups), context
    # The scenarios reach what they are meant to reach.
    assert {"exact", "stale", "default"} <= seen
    assert seen & {"ValueError", "AttributeError", "JSONDecodeError"}
    if scenario.server.separate_down_file:
        assert {"reused up", "ignored"} <= seen
    if (0, 5, 5) <= tuple(map(int, version.split("."))) < (0, 5, 13):
        assert "AssertionError" in seen
    if tuple(map(int, version.split("."))) >= (0, 5, 12):
        assert "FileNotFoundError" in seen


@pytest.mark.parametrize("version", VERSIONS)
def test_case_38_a_broken_file_is_refused_with_the_exception_that_ends_the_wheel(
    version: str, tmp_path: Path
) -> None:
    server, problem = open_sglang(version, "3.6.0"), problem_of(GPUS[0], QUANTIZATIONS[0])
    path = tmp_path / server.file_path(problem, "up")
    path.parent.mkdir(parents=True)
    for text in BROKEN:
        path.write_text(text, encoding="utf-8")
        theirs = ask_real(
            load_lookup(version, World("NVIDIA H200", "3.6.0", folder=str(tmp_path))), problem, 8
        )
        with pytest.raises(ConfigFileError) as refused:
            server.read_table(text, str(path))
        assert theirs.error == exception_of(refused.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_duplicate_and_odd_keys_are_read_as_the_wheel_reads_them(version: str, tmp_path: Path) -> None:
    server, problem = open_sglang(version, "3.6.0"), problem_of(GPUS[0], QUANTIZATIONS[0])
    path = tmp_path / server.file_path(problem, "up")
    path.parent.mkdir(parents=True)
    names = ["8", "64", " 8 ", "1_0", "-5", "+16", "\u0665", "8", "0064"]
    entry = '{{"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": {}}}'
    text = "{" + ",".join(f'"{name}": {entry.format(place + 1)}' for place, name in enumerate(names)) + "}"
    path.write_text(text, encoding="utf-8")
    real = load_lookup(version, World("NVIDIA H200", "3.6.0", folder=str(tmp_path)))
    reading = server.read_with_notes(text, str(path))
    theirs = real.get_moe_configs(problem.E, problem.N, None)
    assert [(m, config.group_size_m) for m, config in reading.table.entries] == [
        (m, entry["GROUP_SIZE_M"]) for m, entry in theirs.items()
    ]
    assert any("twice" in note for note in reading.notes)
    for m in range(1, 200):
        assert ask_real(real, problem, m).up == server.config_for(reading.table, m)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_file_name_is_the_wheels_for_every_dtype_and_device(version: str) -> None:
    for gpu in GPUS:
        real = load_lookup(version, World(gpu.torch_name, "3.6.0"))
        server = open_sglang(version)
        for quantization in QUANTIZATIONS:
            problem = problem_of(gpu, quantization)
            flag = FLAGS.get(quantization.dtype)
            tag = real.get_config_dtype_str(dtype="bfloat16", **({flag: True} if flag else {}))
            block = list(quantization.block_shape or (0, quantization.group_size or 0))
            for kernel in KERNELS:
                arguments: dict[str, Any] = {}
                if supports(real, "per_channel_quant"):
                    arguments["per_channel_quant"] = quantization.per_channel
                if server.separate_down_file:
                    arguments["down_moe"] = kernel == "down"
                theirs = real.get_config_file_name(problem.E, problem.file_n, tag, block, **arguments)
                assert server.file_name(problem, kernel) == theirs


def problem_of(gpu: Gpu, quantization: Quantization, E: int = 64, N: int = 256) -> Problem:
    return Problem(
        E=E,
        global_experts=E,
        topk=8,
        K=2048,
        N=N,
        file_n=N // 2 if quantization.dtype is Dtype.INT4_W4A16 else N,
        gpu=gpu,
        server="sglang",
        server_version="",
        triton_version="3.6.0",
        quantization=quantization,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_default_config_is_the_wheels_around_every_switch(version: str) -> None:
    server = open_sglang(version)
    for gpu in GPUS:
        smem = gpu.smem_optin_bytes or SHARED_MEMORY.get(gpu.compute_capability or (0, 0))
        for deterministic in (False, True):
            world = World(gpu.torch_name, "3.6.0", gpu.vendor == "AMD", smem, deterministic)
            real = load_lookup(version, world)
            for quantization in QUANTIZATIONS:
                for E in (8, 257):
                    problem = problem_of(gpu, quantization, E)
                    if deterministic:
                        problem = with_flag(problem)
                    stages = 2 if gpu.vendor == "AMD" else 3
                    flag = FLAGS.get(quantization.dtype)
                    tag = real.get_config_dtype_str(dtype="bfloat16", **({flag: True} if flag else {}))
                    block = list(quantization.block_shape) if quantization.block_shape else None
                    by_m = {}
                    for m in (1, E - 1, E, E + 1, 4 * E, 8192):
                        entry = real.get_default_config(m, E, 256, 2048, 8, tag, False, block)
                        by_m[m] = KernelConfig.from_json({"num_stages": stages} | entry, "real")
                        assert server.default_config(problem, "up", m) == by_m[m]
                        assert server.default_config(problem, "down", m) == by_m[m]
                    switches = server.default_switches(problem)
                    assert (len(set(by_m.values())) > 1) == bool(switches)
                    for last in switches:
                        assert by_m[last] != by_m[last + 1]


def with_flag(problem: Problem) -> Problem:
    return replace(problem, flags=("deterministic",))


@pytest.mark.parametrize("version", ["0.5.4", "0.5.5"])
def test_the_releases_that_know_the_per_channel_part_and_do_not_ask_for_it(version: str) -> None:
    real = load_lookup(version, World("NVIDIA H200", "3.4.0"))
    assert "per_channel_quant" in inspect.signature(real.get_config_file_name).parameters
    assert not supports(real, "per_channel_quant")

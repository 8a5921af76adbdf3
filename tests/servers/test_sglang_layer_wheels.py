"""Our picture of SGLang's launches against the layer of its wheels, from config file to bound kernel."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.domain.gpu import Gpu
from moetune.domain.problem import KERNELS, Kernel, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.protocol import ConfigTree, Outcome, ServerOptions
from moetune.servers.sglang import SGLang, open_sglang
from moetune.servers.sglang.releases import Feature, rules_of
from tests.servers.sglang_layer import Launched, Layer, Weights, load_layer, weights
from tests.servers.sglang_loader import World
from tests.servers.sglang_problems import layer, shard

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = [
    *("0.4.9", "0.5.1", "0.5.2", "0.5.4", "0.5.5", "0.5.6", "0.5.9", "0.5.10", "0.5.11", "0.5.12"),
    *("0.5.13", "0.5.16", "0.5.18", "0.5.20", "0.5.23"),
]
CAPABILITIES = [(8, 9), (9, 0), (10, 0), (12, 0)]
E, N, K, TOPK = 40, 128, 256, 2
M = 17
KINDS: dict[str, Quantization] = {
    "bf16": Quantization(),
    "fp8": Quantization(Dtype.FP8_W8A8, "fp8"),
    "fp8 block": Quantization(Dtype.FP8_W8A8, "fp8", block_shape=(128, 128)),
    "int4": Quantization(Dtype.INT4_W4A16, "moe_wna16", group_size=32),
}
WEIGHTS: dict[str, Weights] = {kind: weights(kind, E, N, K) for kind in KINDS}
# 0.5.5 to 0.5.7 cannot run their own grouped int4/int8 kernel: IndexError on C.stride(2).
BROKEN_INT4 = {"0.5.5", "0.5.6"}


def problem_of(server: SGLang, kind: str, capability: tuple[int, int], topk: int = TOPK) -> Problem:
    return Problem(
        E=E,
        global_experts=E,
        topk=topk,
        K=K,
        N=N,
        file_n=N // 2 if kind == "int4" else N,
        gpu=Gpu("NVIDIA Test GPU", compute_capability=capability),
        server="sglang",
        server_version=server.version,
        triton_version=server.triton_version,
        quantization=KINDS[kind],
    )


class Bench:
    """One release in one folder: writes config files, runs the wheel's layer, asks our rules."""

    def __init__(self, version: str, kind: str, capability: tuple[int, int], folder: Path) -> None:
        self.version, self.kind, self.capability = version, kind, capability
        self.server = open_sglang(version, "3.6.0")
        self.problem = problem_of(self.server, kind, capability)
        self.sources = folder.parent / "sources"
        self.root = folder
        self.configs = (folder / self.server.file_path(self.problem, "up")).parent
        self.configs.mkdir(parents=True, exist_ok=True)

    def write(self, kernel: Kernel, table: dict[str, Any]) -> Path:
        path = self.configs / self.server.file_name(self.problem, kernel)
        path.write_text(json.dumps(table))
        return path

    def layer(self, *, fused_sum: bool = False) -> Layer:
        name, root = self.problem.gpu.torch_name, str(self.root)
        world = World(name, "3.6.0", smem_optin_bytes=None, folder=root, fused_sum=fused_sum)
        return load_layer(self.version, world, self.capability, self.sources)

    def run(self, m: int) -> list[Launched] | str:
        try:
            return self.layer()(m=m, topk=TOPK, weights=WEIGHTS[self.kind])
        except Exception as death:  # noqa: BLE001
            return type(death).__name__


def random_entry(rng: random.Random, *, tma: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "BLOCK_SIZE_M": rng.choice([16, 32, 64, 128]),
        "BLOCK_SIZE_N": rng.choice([32, 64, 128]),
        "BLOCK_SIZE_K": rng.choice([64, 128]),
        "GROUP_SIZE_M": rng.choice([1, 16, 64]),
        "num_warps": rng.choice([4, 8]),
        "num_stages": rng.choice([2, 3, 4]),
    }
    return entry | {"USE_TMA": rng.random() < 0.5} if tma else entry


def ours(bench: Bench, up: dict[str, Any], down: dict[str, Any] | None) -> list[Any] | str:
    """The launches that we expect of two entries, or what the server dies of."""
    server, problem = bench.server, bench.problem
    try:
        config = KernelConfig.from_json(up, "up")
        second = config if down is None else KernelConfig.from_json(down, "down")
        # The pair is checked before the first kernel is launched.
        expected_down = server.launch(problem, "down", second, config)
        return [server.launch(problem, "up", config, down=expected_down.config), expected_down]
    except ConfigFileError as refused:
        return refused.message.split("dies with ")[1].split(":")[0]


def assert_same(launched: Launched, expected: Any, bench: Bench) -> None:
    arguments, options, config = launched.arguments, launched.options, expected.config
    blocks = (config.block_size_m, config.block_size_n, config.block_size_k, config.group_size_m)
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
    assert tuple(arguments[name] for name in names) == blocks
    assert (options.num_warps, options.num_stages) == (config.num_warps, config.num_stages)
    assert arguments["a_ptr"].element_size() * 8 == expected.a_bits
    assert arguments["b_ptr"].element_size() * 8 == (8 if bench.kind == "int4" else expected.b_bits)
    assert bool(arguments.get("swap_ab")) == expected.swap_ab
    assert options.launch_pdl == expected.pdl
    assert bool(arguments.get("USE_GDC")) == expected.pdl
    if bench.kind != "int4":
        assert (arguments.get("b_desc") is not None) == expected.weights_by_tma == config.use_tma
        assert (arguments.get("a_desc") is not None) == expected.sorted_input
        assert bool(arguments.get("c_sorted")) == expected.sorted_output
        assert_tiles(arguments, expected, bench)
        assert arguments["group_k"] == expected.block_k


def assert_tiles(arguments: dict[str, Any], expected: Any, bench: Bench) -> None:
    """The tiles of descriptors, and the rows that sorted order has room for."""
    config = expected.config
    m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
    rows = M * TOPK + min(M * TOPK, E + 1) * (m - 1)
    if expected.weights_by_tma:
        assert arguments["b_desc"].block_shape == [1, n, k]
        assert tuple(arguments["b_desc"].shape) == tuple(arguments["b_ptr"].shape)
    if expected.sorted_input:
        assert arguments["a_desc"].block_shape == [m, k]
        assert tuple(arguments["a_desc"].shape) == (rows, N)
    if expected.sorted_output:
        assert arguments["c_ptr"].shape[0] == rows
    # What is wrong with it is said of both kernels of the pair.
    is_wrong = (expected.sorted_input or expected.sorted_output) and bench.kind == "fp8"
    assert bool(expected.wrong_numbers) == is_wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_the_launches_of_both_kernels_are_the_wheels(version: str, tmp_path: Path) -> None:
    rng = random.Random(f"launch {version}")
    seen: set[str] = set()
    for number, (kind, capability) in enumerate(itertools.product(KINDS, CAPABILITIES)):
        for variant in range(2):
            bench = Bench(version, kind, capability, tmp_path / f"{number}-{variant}")
            has_down = bench.server.separate_down_file and variant == 0
            # USE_TMA goes through the int4 kernel's arguments only as a layout: left out there.
            tma = kind != "int4" and rng.random() < 0.6
            up = random_entry(rng, tma=tma and variant == 0 and rng.random() < 0.4)
            if variant == 1 and kind == "fp8 block":
                up |= {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64}  # what is transposed on sm_90
            bench.write("up", {"8": up})
            down = None
            if has_down:
                down = random_entry(rng, tma=tma)
                if rng.random() < 0.7:
                    down["BLOCK_SIZE_M"] = up["BLOCK_SIZE_M"]
                if capability == (10, 0) and kind != "int4":  # whatever was drawn, a pair with it
                    up.pop("USE_TMA", None)
                    bench.write("up", {"8": up})
                    down |= {"BLOCK_SIZE_M": up["BLOCK_SIZE_M"], "USE_TMA": True}
                bench.write("down", {"8": down})
            launched, expected = bench.run(M), ours(bench, up, down)
            if version in BROKEN_INT4 and kind == "int4" and not isinstance(expected, str):
                assert launched == "IndexError"
                continue
            if isinstance(launched, str) or isinstance(expected, str):
                # A false USE_TMA is as unknown to the kernel as a true one.
                if "USE_TMA" in up and not rules_of(version).at_least((0, 5, 18)) and launched == "KeyError":
                    expected = "KeyError"
                assert launched == expected, f"{kind} {capability} {up} {down}"
                seen.add(str(launched))
                continue
            for one, other in zip(launched, expected, strict=True):
                assert_same(one, other, bench)
                seen.add(f"swap {other.swap_ab}")
                seen.add(f"pdl {other.pdl}")
                seen.add(f"sorted input {other.sorted_input}")
                seen.add(f"sorted output {other.sorted_output}")
    assert {"swap False", "pdl False"} <= seen
    assert ("swap True" in seen) == rules_of(version).at_least((0, 5, 8))
    assert ("pdl True" in seen) == rules_of(version).at_least((0, 5, 19))
    for side in ("input", "output"):
        assert (f"sorted {side} True" in seen) == rules_of(version).has(Feature.DOWN_FILE)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_launch_classes_are_the_wheels_for_every_m(version: str, tmp_path: Path) -> None:
    ms = [1, 2, 3, 4, 5, 8, 13, 16, 19, 20, 21, 24, 37, 40, 64, 100, 255, 256, 257, 260, 511, 512, 513, 640]
    for capability, block_size_m in itertools.product([(8, 9), (9, 0)], [16, 64]):
        bench = Bench(version, "bf16", capability, tmp_path / f"{capability[0]}-{block_size_m}")
        entry = random_entry(random.Random(1), tma=False) | {"BLOCK_SIZE_M": block_size_m}
        bench.write("up", {"8": entry})
        layer = bench.layer()
        binaries: dict[str, dict[tuple[Any, ...], list[int]]] = {kernel: {} for kernel in KERNELS}
        for m in ms:
            for kernel, launched in zip(KERNELS, layer(m=m, topk=TOPK, weights=WEIGHTS["bf16"]), strict=True):
                key = (
                    launched.specialised["EM"],
                    launched.specialised["num_valid_tokens"],
                    launched.arguments["GDC_EARLY"] if launched.arguments.get("USE_GDC") else None,
                )
                binaries[kernel].setdefault(key, []).append(m)
        for kernel in KERNELS:
            classes = bench.server.launch_classes(bench.problem, kernel, ms, block_size_m)
            assert [list(kind.ms) for kind in classes] == list(binaries[kernel].values())
            for kind, (length, tokens, early) in zip(classes, binaries[kernel], strict=True):
                assert (kind.padded_length_divisible_by == 16) == (length[1] == "D")
                assert kind.num_valid_tokens_divisible_by_16 == (tokens[1] == "D")
                assert dict(kind.constexprs).get("GDC_EARLY") == early
                assert kind.kernel == kernel


@pytest.mark.parametrize("version", VERSIONS)
def test_one_token_to_one_expert_is_a_class_of_its_own(version: str) -> None:
    """Triton specialises the value 1 of num_valid_tokens."""
    server = open_sglang(version)
    problem = problem_of(server, "bf16", (9, 0), topk=1)
    first, *others = server.launch_classes(problem, "up", [1, 2, 3], 16)
    assert first.num_valid_tokens_is_one
    assert first.ms == (1,)
    assert not any(kind.num_valid_tokens_is_one for kind in others)


@pytest.mark.parametrize("version", [v for v in VERSIONS if rules_of(v).at_least((0, 5, 10))])
def test_the_sum_over_topk_is_the_wheels(version: str, tmp_path: Path) -> None:
    """Which kernel sums, over how many, and into an output that was set to zero."""
    entry = random_entry(random.Random(2), tma=False)
    for kind, topk, flag in itertools.product(KINDS, (2, 3, 8), (False, True)):
        bench = Bench(version, kind, (9, 0), tmp_path / f"{kind}-{topk}-{flag}")
        bench.write("up", {"8": entry})
        launched = bench.layer(fused_sum=flag)(m=17, topk=topk, weights=WEIGHTS[kind])
        checkpoint = layer(E, N, topk, quantization=KINDS[kind])
        problem = shard(checkpoint, options=ServerOptions(fused_moe_sum=flag), version=version)
        problem = replace(problem, K=K)
        assert problem.flags == (("fused_sum",) if flag and topk > 2 and kind != "int4" else ())
        for kernel, one in zip(KERNELS, launched, strict=True):
            expected = bench.server.launch(problem, kernel, KernelConfig.from_json(entry, "entry"))
            sums = bool(one.arguments.get("FUSE_SUM_ALL_REDUCE"))
            assert expected.sum_topk == (one.arguments["ROUTER_TOPK"] if sums else 0), (kind, topk, kernel)
            if sums:
                assert kernel == "down"
                assert one.arguments["c_ptr"].shape == (17, K)
                assert not one.arguments["c_ptr"].any(), "SGLang sets the output to zero before"


ENTRY = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
ADDITIONS: list[dict[str, Any]] = [
    {},
    {"num_warps": 8, "num_stages": 2},
    {"num_ctas": 1},
    {"maxnreg": 128},
    {"USE_TMA": True},
    {"USE_TMA": False},
    {"SPLIT_K": 1},
    {"waves_per_eu": 2},
    {"kpack": 2},
    {"matrix_instr_nonkdim": 16},
    {"grf_mode": "256"},
    {"block_size_m": 32},
    {"num_warps": 3},
    {"enable_fp_fusion": False},
]


def read(server: SGLang, path: Path) -> ConfigTable | ConfigFileError:
    try:
        return server.read_table(path.read_text(), str(path))
    except ConfigFileError as refused:
        return refused


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != "0.4.9"])
def test_case_29_the_keys_that_end_a_launch_are_the_ones_that_we_refuse(version: str, tmp_path: Path) -> None:
    for number, (kernel, addition) in enumerate(itertools.product(KERNELS, ADDITIONS)):
        bench = Bench(version, "bf16", (9, 0), tmp_path / str(number))
        if kernel == "down" and not bench.server.separate_down_file:
            continue
        bench.write("up", {"8": ENTRY})
        path = bench.write(kernel, {"8": ENTRY | addition})
        launched = bench.run(3)
        table = read(bench.server, path)
        if isinstance(table, ConfigFileError):
            assert isinstance(launched, str), f"{kernel} {addition}: {table.message}"
            assert f"dies with {launched}" in table.message
            continue
        allowed = bench.server.allowed_keys(bench.problem, kernel)
        accepted = set(ENTRY | addition) <= allowed or "enable_fp_fusion" in addition
        assert accepted == (not isinstance(launched, str)), f"{kernel} {addition}: {launched}"
        if accepted and "enable_fp_fusion" not in addition:
            again = bench.server.render_table(bench.problem, table, kernel)
            path.write_text(again)
            assert not isinstance(bench.run(3), str)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_key_ends_the_launch_as_we_say(version: str, tmp_path: Path) -> None:
    for kind, key in itertools.product(("bf16", "fp8"), ENTRY):
        bench = Bench(version, kind, (9, 0), tmp_path / f"{kind}-{key}")
        path = bench.write("up", {"8": {name: value for name, value in ENTRY.items() if name != key}})
        launched = bench.run(3)
        with pytest.raises(ConfigFileError, match=f"lacks {key}") as refused:
            bench.server.read_table(path.read_text(), str(path))
        assert isinstance(launched, str)
        assert launched in refused.value.message


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18", "0.5.20", "0.5.23"])
def test_case_34_an_up_file_with_tma_and_no_down_file(version: str, tmp_path: Path) -> None:
    """From 0.5.18 the reused down config keeps USE_TMA, though the log says "without TMA"."""
    bench = Bench(version, "fp8 block", (9, 0), tmp_path / "root")
    entry = ENTRY | {"USE_TMA": True}
    path = bench.write("up", {"8": entry})
    launched = bench.run(3)
    tree = ConfigTree(str(bench.root), {bench.configs.name: frozenset({path.name})})
    lookup = bench.server.lookup(bench.problem, "down", [tree], ServerOptions())
    assert lookup.outcome is Outcome.REUSED_UP
    if version == "0.5.16":
        assert launched == "KeyError"
        with pytest.raises(ConfigFileError, match="KeyError"):
            bench.server.read_table(path.read_text(), str(path))
        return
    assert not isinstance(launched, str)
    config = bench.server.read_table(path.read_text(), str(path)).nearest(3)
    assert bench.server.launch(bench.problem, "down", config, config).config.use_tma
    assert launched[1].arguments["b_desc"] is not None
    assert "without TMA" in lookup.log_lines[0][1]

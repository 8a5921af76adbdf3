"""Pairs whose down config has USE_TMA: where they are tried, and that the whole pair decides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.applications.exhaustive import write_landscape
from moetune.applications.targets import Target, targets_of
from moetune.applications.tuning_efforts import EFFORTS, Effort
from moetune.applications.tuning_loop import Measured
from moetune.applications.tuning_sorted import SortedPairs
from moetune.domain.choose import Pair
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.servers.registry import open_server
from tests.applications.fake_machine import PROBLEM, SERVER, VLLM, FakeMachine
from tests.applications.test_tuning_loop import MS, SHORT, tune

if TYPE_CHECKING:
    from pathlib import Path

EFFORT = replace(SHORT, sorted_sizes=1, sorted_downs=2)


def machine_in(folder: Path, **settings: Any) -> FakeMachine:
    folder.mkdir(exist_ok=True)
    return FakeMachine(folder, settings=settings)


def pairs(measured: Measured) -> dict[int, Pair]:
    return {entry.m: entry.pair for entry in measured.choices.entries if entry.m in MS}


def test_a_pair_that_gains_by_descriptors_is_chosen_and_comes_from_the_journal_again(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"sorted": {"down": 0.7, "tma": 1.2}})
    measured = tune(machine, effort=EFFORT)
    for m, pair in pairs(measured).items():
        assert pair.down.use_tma, m
        assert not pair.up.use_tma
        assert pair.up.block_size_m == pair.down.block_size_m
    # What was compared with the reference is what will run: up for sorted rows.
    for numerics in measured.numerics:
        assert numerics.config.use_tma == (numerics.kernel == "down")
    assert {line["sorted_output"] for line in machine.log("time") if line["kernel"] == "up"} == {False, True}
    asked = len(machine.log("time")) + len(machine.log("layer")) + len(machine.log("check"))
    again = tune(machine, effort=EFFORT)
    assert again.choices == measured.choices
    assert again.measured == 0
    assert len(machine.log("time")) + len(machine.log("layer")) + len(machine.log("check")) == asked


@pytest.mark.parametrize(("effort", "tried"), [("quick", False), ("full", True), ("exhaustive", True)])
def test_quick_has_no_seconds_for_them(effort: str, tried: bool, tmp_path: Path) -> None:
    assert _offers(PROBLEM, tmp_path, effort=EFFORTS[effort]) is tried


def test_the_time_of_a_pair_is_that_of_both_its_layouts(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"sorted": {"up": 0.9, "down": 0.7}})
    with machine.journal() as journal, machine.laboratory(journal, MS) as laboratory:
        pair = Pair(KernelConfig(16, 32, 64, 1, 4, 3), KernelConfig(16, 32, 64, 1, 4, 3, use_tma=True))
        plain = Pair(pair.up, replace(pair.down, use_tma=False))
        laboratory.want([*targets_of(64, pair), *targets_of(64, plain)])
        laboratory.run()
        up, down, up_plain, down_plain = (
            laboratory.known.times[target] or 0.0
            for target in (*targets_of(64, pair), *targets_of(64, plain))
        )
        assert up / up_plain == pytest.approx(0.9, rel=0.03)
        assert down / down_plain == pytest.approx(0.7, rel=0.03)
        # Plain configs are chosen among plain times only.
        assert laboratory.known.times_at("down", 64) == {plain.down: down_plain}
        assert laboratory.known.times_at("up", 64, in_order=True) == {pair.up: up}
        write_landscape(tmp_path, PROBLEM, laboratory, MS)
    import gzip

    assert gzip.decompress((tmp_path / "landscape.csv.gz").read_bytes()).count(b"\n") == 3


def test_the_up_kernel_may_have_descriptors_too_where_the_server_reads_that(tmp_path: Path) -> None:
    gain = {"down": 0.8, "tma": 0.8}
    found = tune(machine_in(tmp_path / "a", sorted=gain), ms=(64,), effort=EFFORT).choices.entries[0].pair
    assert (found.up.use_tma, found.down.use_tma) == (True, True)
    # Before 0.5.18 USE_TMA in an up file ends the server.
    older = replace(PROBLEM, server_version="0.5.16")
    machine = machine_in(tmp_path / "b", sorted=gain)
    server = open_server("sglang", "0.5.16", "3.6.0")
    with machine.journal(older) as journal, machine.laboratory(journal, (64,), older) as laboratory:
        config = KernelConfig(64, 64, 64, 1, 4, 3)
        for kernel in KERNELS:
            laboratory.known.times[Target(kernel, 64, config)] = 10.0
        SortedPairs(server, older, laboratory, EFFORT).measure((64,), None)
        tried = {(target.kernel, target.config.use_tma) for target in laboratory.known.times}
    assert tried == {("up", False), ("down", False), ("down", True)}


@pytest.mark.parametrize(
    "cost",
    [
        pytest.param({"down": 0.7, "up": 1.5}, id="the up kernel loses more"),
        pytest.param({"down": 0.7, "between_us": 30.0}, id="the layer between them loses more"),
        pytest.param({}, id="nothing is gained"),
    ],
)
def test_the_whole_pair_decides(cost: dict[str, float], tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"sorted": cost})
    measured = tune(machine, ms=(64,), effort=EFFORT)
    assert not any(entry.pair.down.use_tma for entry in measured.choices.entries)
    assert any("tma" in line["config"] for line in machine.log("time")), "none was tried"


def test_a_pair_with_wrong_numbers_is_not_written(tmp_path: Path) -> None:
    gain = {"down": 0.7}
    found = tune(machine_in(tmp_path / "a", sorted=gain), ms=(64,), effort=EFFORT)
    chosen = found.choices.entries[0].pair.down
    faults = {f"down {chosen}": "wrong numbers"}
    machine = machine_in(tmp_path / "b", sorted=gain, faults=faults)
    measured = tune(machine, ms=(64,), effort=EFFORT)
    assert measured.choices.entries[0].pair.down != chosen


def _offers(
    problem: Problem, tmp_path: Path, server: Any = SERVER, size: int = 64, effort: Effort = EFFORT
) -> bool:
    """Whether anything with USE_TMA is tried beside a plain pair."""
    machine = machine_in(tmp_path)
    with machine.journal(problem) as journal, machine.laboratory(journal, (64,), problem) as laboratory:
        config = KernelConfig(size, 64, 64, 1, 4, 3)
        for kernel in KERNELS:
            laboratory.known.times[Target(kernel, 64, config)] = 10.0
        tried = SortedPairs(server, problem, laboratory, effort)
        tried.measure((64,), None)
        return any(target.config.use_tma for target in laboratory.known.times)


_QUANTIZED = {
    "block fp8": (Quantization(Dtype.FP8_W8A8, "made", (128, 128), dynamic_activation=True), True),
    "static fp8": (Quantization(Dtype.FP8_W8A8, "made", dynamic_activation=False), True),
    "dynamic fp8 by tensor": (Quantization(Dtype.FP8_W8A8, "made", dynamic_activation=True), False),
    "fp8 by channel": (Quantization(Dtype.FP8_W8A8, "made", per_channel=True), False),
    "int8 by channel": (Quantization(Dtype.INT8_W8A8, "made", per_channel=True), False),
    "int8 by block": (Quantization(Dtype.INT8_W8A8, "made", (128, 128)), True),
    "int4": (Quantization(Dtype.INT4_W4A16, "made", group_size=128), False),
}


@pytest.mark.parametrize("name", _QUANTIZED)
def test_it_is_tried_only_with_formats_that_sglang_multiplies_right(name: str, tmp_path: Path) -> None:
    quantization, expected = _QUANTIZED[name]
    assert _offers(replace(PROBLEM, quantization=quantization), tmp_path) is expected


def test_it_is_tried_only_where_the_server_reads_it_and_the_gpu_has_it(tmp_path: Path) -> None:
    assert _offers(PROBLEM, tmp_path / "a")
    old = replace(PROBLEM, server_version="0.5.4")
    assert not _offers(old, tmp_path / "b", open_server("sglang", "0.5.4", "3.6.0"))
    vllm = replace(PROBLEM, server="vllm", server_version="0.33.0")
    assert not _offers(vllm, tmp_path / "c", VLLM)
    ada = replace(PROBLEM, gpu=find_gpu("NVIDIA L40S"))
    assert not _offers(ada, tmp_path / "d")
    parallel = replace(PROBLEM, E=64, ep=4)
    assert _offers(parallel, tmp_path / "e")
    # Up to 0.5.22 zeros for experts of other ranks are written over sorted rows.
    older = replace(parallel, server_version="0.5.22")
    assert not _offers(older, tmp_path / "f", open_server("sglang", "0.5.22", "3.6.0"))
    # Rows of a descriptor are whole 16 bytes.
    assert not _offers(replace(PROBLEM, N=100), tmp_path / "g")


def test_one_kernel_alone_is_no_pair(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"sorted": {"down": 0.5}})
    measured = tune(machine, ms=(64,), effort=EFFORT, only="down")
    assert not any(entry.pair.down.use_tma for entry in measured.choices.entries)

"""Verifying on a GPU: wrong numbers, failures, slow entries, and runs that go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.applications.nvml import detect_gpus
from moetune.applications.verify_answer import Verdict
from moetune.applications.verifying import verify
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.config import KernelConfig
from moetune.domain.errors import MoetuneError
from moetune.domain.quantization import Dtype, Quantization
from tests.applications.fake_machine import PROBLEM, SERVER, VLLM, FakeMachine
from tests.applications.verify_world import (
    DOWN,
    GOOD_DOWN,
    GOOD_UP,
    MS,
    SLOW,
    UP,
    lay,
    look,
    measure,
    measured,
    request,
)


def test_good_entries_are_faster_and_their_numbers_right(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    found = measure(FakeMachine(tmp_path), *paths)
    (one,) = found.problems
    assert one.answer == "yes"
    assert not found.is_no
    for entry in one.entries:
        assert entry.verdict is Verdict.FASTER
        assert entry.ratio is not None
        assert entry.noise is not None
        assert entry.ratio < 1 - entry.noise
        assert entry.spread is not None
        assert 0 < entry.spread < 0.02
        assert [item.passed for item in entry.numerics] == [True, True]
    assert one.gpu.facts is not None
    assert one.gpu.compilations == 0
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["verified"] is True


def test_an_entry_with_wrong_numbers_is_named_and_the_answer_is_no(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    machine = FakeMachine(tmp_path, settings={"faults": {f"down {GOOD_DOWN[64]}": "wrong numbers"}})
    found = measure(machine, *paths)
    entries = {entry.pick.m: entry for entry in found.problems[0].entries}
    assert found.is_no
    assert [entries[m].verdict for m in MS] == [Verdict.FASTER, Verdict.WRONG, Verdict.FASTER]
    assert "down is off by 0.3" in entries[64].why
    assert entries[64].ratio is None, "the speed of wrong numbers is no news"


def test_where_even_the_default_is_wrong_no_entry_is_blamed(tmp_path: Path) -> None:
    default = SERVER.default_config(PROBLEM, "up", 64)
    faults = {f"up {GOOD_UP[64]}": "wrong numbers", f"up {default}": "wrong numbers"}
    machine = FakeMachine(tmp_path, settings={"faults": faults})
    with pytest.raises(MoetuneError, match="m=64 even the default computes wrong numbers"):
        measure(machine, *lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN}))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("compile failure", "PassManager::run failed"),
        ("too much shared memory", "needs 400000 bytes of shared memory"),
        ("abort", "killed the worker: ended with signal 6"),
        ("sticky error", "lost the CUDA context"),
        ("over shared memory", "out of resource: shared memory"),
    ],
)
def test_an_entry_that_cannot_run_costs_itself_and_the_answer_is_no(
    fault: str, reason: str, tmp_path: Path
) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {GOOD_UP[2048]}": fault}})
    found = measure(machine, *paths)
    entries = {entry.pick.m: entry for entry in found.problems[0].entries}
    assert [entries[m].verdict for m in MS] == [Verdict.FASTER, Verdict.FASTER, Verdict.CANNOT_RUN]
    assert reason in entries[2048].why
    assert found.is_no


def test_an_entry_slower_than_the_default_is_no_and_the_default_itself_is_the_same(tmp_path: Path) -> None:
    default = {kernel: SERVER.default_config(PROBLEM, kernel, 1) for kernel in ("up", "down")}
    up: dict[int, KernelConfig] = {**GOOD_UP, 64: SLOW, 1: default["up"]}
    down: dict[int, KernelConfig] = {**GOOD_DOWN, 64: SLOW, 1: default["down"]}
    found = measure(FakeMachine(tmp_path), *lay(tmp_path, {UP: up, DOWN: down}))
    entries = {entry.pick.m: entry for entry in found.problems[0].entries}
    assert found.is_no
    assert [entries[m].verdict for m in MS] == [Verdict.SAME, Verdict.SLOWER, Verdict.FASTER]
    assert (entries[64].ratio or 0) > 1.2
    assert not entries[64].why, "slower as it is, not only under a skewed routing"
    assert "the default's own config" in entries[1].why
    assert entries[1].default_us is not None


def test_an_entry_that_loses_under_a_skewed_routing_is_slower(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, settings={"skewed": {f"up {GOOD_UP[2048]}": 5.0}})
    entries = measured(machine, *lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN}))
    assert entries[2048].verdict is Verdict.SLOWER
    assert "skewed" in entries[2048].why
    assert (entries[2048].ratio or 9) < 1


def test_a_difference_within_the_noise_is_none(tmp_path: Path) -> None:
    entries = measured(
        FakeMachine(tmp_path, settings={"flat": True}), *lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    )
    assert {entry.verdict for entry in entries.values()} == {Verdict.SAME}
    assert all((entry.noise or 0) >= 0.005 for entry in entries.values())


def test_a_default_that_cannot_run_loses_to_every_entry_that_can(tmp_path: Path) -> None:
    default = SERVER.default_config(PROBLEM, "up", 2048)
    machine = FakeMachine(tmp_path, settings={"faults": {f"up {default}": "over shared memory"}})
    entry = measured(machine, *lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN}))[2048]
    assert entry.verdict is Verdict.FASTER
    assert entry.why == "the default cannot run"
    assert entry.default_us is None
    assert entry.file_us is not None


def test_what_was_measured_is_in_the_journal_and_a_second_call_touches_no_gpu(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    first = measure(machine, *paths)
    asked = len((tmp_path / "log").read_text().splitlines())
    second = measure(machine, *paths)
    assert len((tmp_path / "log").read_text().splitlines()) == asked
    (one,), (other,) = first.problems, second.problems
    assert one.entries == other.entries
    assert one.gpu.measured > 0
    assert other.gpu.measured == 0
    assert other.gpu.facts == one.gpu.facts
    assert "verify" in Path(one.gpu.journal).parts, "what a tuning run wrote down is no proof"
    # Another seed measures anew.
    assert measure(machine, *paths, seed=1).problems[0].gpu.measured > 0


def test_a_call_that_was_killed_goes_on(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    first = measure(machine, *paths).problems[0]
    journal = Path(first.gpu.journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    checks = [number for number, line in enumerate(lines) if b'"kind":"check"' in line]
    journal.write_bytes(b"".join(lines[: checks[2]]) + lines[checks[2]][:20])
    times = len(machine.log("time"))
    second = measure(machine, *paths).problems[0]
    assert len(machine.log("time")) == times, "a time that was known was taken again"
    assert len(machine.log("check")) == len(first.entries) * 2 + (len(first.entries) * 2 - 2)
    assert [entry.numerics for entry in second.entries] == [entry.numerics for entry in first.entries]


def test_the_real_kernel_computes_wrong_numbers_with_a_k_tile_over_a_quantization_group(
    tmp_path: Path,
) -> None:
    """Not a fake: moetune's kernel, in Triton's interpreter, against the reference."""
    group = Quantization(Dtype.FP8_W8A8, block_shape=(128, 128), dynamic_activation=True)
    problem = replace(PROBLEM, E=2, global_experts=2, topk=1, K=256, N=128, file_n=128, quantization=group)
    names = [SERVER.file_name(problem, kernel) for kernel in ("up", "down")]
    wrong, right = KernelConfig(16, 64, 256, 1, 4, 2), KernelConfig(16, 64, 128, 1, 4, 2)
    paths = lay(tmp_path, {names[0]: {1: wrong}, names[1]: {1: right}})
    machine = FakeMachine(tmp_path)
    # A release without programmatic dependent launch, which the interpreter lacks.
    asked = request(*paths, server_version="0.5.9", hidden=256, topk=1, max_m=1, state=tmp_path / "state")
    command = WorkerCommand(
        arguments=("-m", "tests.measure.cpu_backend"),
        variables={"TRITON_INTERPRET": "1", "PYTHONPATH": machine.variables["PYTHONPATH"]},
        answer_seconds=120,
    )
    found = verify(asked, {}, gpus=machine.devices(), command=command, pool=machine.pool)
    (entry,) = found.problems[0].entries
    assert entry.verdict is Verdict.WRONG
    assert entry.why.startswith("up is off by 0.")
    assert [item.passed for item in entry.numerics] == [False, True]


def test_one_file_is_measured_as_both_kernels(tmp_path: Path) -> None:
    name = VLLM.file_name(replace(PROBLEM, server="vllm"), "up")
    (path,) = lay(tmp_path, {name: GOOD_UP}, Path("tuned"))
    machine = FakeMachine(tmp_path)
    (one,) = measure(machine, path, server="vllm", server_version="0.33.0").problems
    assert not one.is_no
    assert [file.kernel for file in one.looked.files] == ["up"]
    checked = {(line["kernel"], line["config"]) for line in machine.log("check")}
    assert {(kernel, str(config)) for kernel in ("up", "down") for config in GOOD_UP.values()} == checked


def test_an_up_file_is_paired_with_the_down_file_that_the_server_loads(tmp_path: Path) -> None:
    up, down = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    (one,) = measure(FakeMachine(tmp_path), up).problems
    assert [(file.path, file.named) for file in one.looked.files] == [(str(up), True), (str(down), False)]
    assert [entry.pick.down for entry in one.entries] == list(GOOD_DOWN.values())
    down.unlink()
    alone = look(up)
    assert [pick.down for pick in alone.looked.picks] == list(GOOD_UP.values())


def test_the_server_gives_the_down_kernel_the_up_entrys_block_size_m(tmp_path: Path) -> None:
    wide = {m: replace(config, block_size_m=64, block_size_n=64) for m, config in GOOD_DOWN.items()}
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: wide})
    measured(machine, *paths)
    ran = {line["config"] for line in machine.log("check") if line["kernel"] == "down"}
    assert ran == {str(replace(wide[m], block_size_m=GOOD_UP[m].block_size_m)) for m in MS}
    # Releases before 0.5.13 assert.
    (one,) = measure(machine, *paths, server_version="0.5.12").problems
    assert {entry.verdict for entry in one.entries} == {Verdict.CANNOT_RUN}
    assert "AssertionError" in one.entries[0].why


def test_an_entry_with_use_tma_is_measured_as_a_pair(tmp_path: Path) -> None:
    """The up kernel writes for it, and the whole pair decides."""
    down = {m: replace(config, use_tma=m == 64) for m, config in GOOD_DOWN.items()}
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: down})
    machine = FakeMachine(tmp_path, settings={"sorted": {"up": 3.0}})
    (one,) = measure(machine, *paths).problems
    entries = {entry.pick.m: entry for entry in one.entries}
    assert [entries[m].verdict for m in (1, 64)] == [Verdict.FASTER, Verdict.SLOWER]
    assert {line["config"] for line in machine.log("time") if line["sorted_output"]} == {str(GOOD_UP[64])}


def test_an_entry_with_which_the_server_computes_wrong_numbers_is_wrong(tmp_path: Path) -> None:
    fp8 = replace(PROBLEM, quantization=Quantization(Dtype.FP8_W8A8, "made", per_channel=True))
    names = [SERVER.file_name(fp8, kernel) for kernel in ("up", "down")]
    down = {m: replace(config, use_tma=m == 64) for m, config in GOOD_DOWN.items()}
    (one,) = measure(
        FakeMachine(tmp_path), *lay(tmp_path, dict(zip(names, (GOOD_UP, down), strict=True)))
    ).problems
    entries = {entry.pick.m: entry for entry in one.entries}
    assert entries[64].verdict is Verdict.WRONG
    assert "scales of other rows" in entries[64].why
    assert entries[1].verdict is Verdict.FASTER


def test_a_problem_without_a_kernel_of_ours_is_looked_up_and_not_measured(tmp_path: Path) -> None:
    name = "E=256,N=256,device_name=NVIDIA_H200,dtype=float32.json"
    machine = FakeMachine(tmp_path)
    (one,) = measure(machine, *lay(tmp_path, {name: GOOD_UP})).problems
    assert "cannot measure this problem" in one.gpu.reason
    assert not machine.log("open")
    assert one.looked.files[0].reads


@pytest.mark.gpu
def test_on_a_real_gpu_entries_are_what_they_are(tmp_path: Path) -> None:
    """The default's own config, one that takes many times as long, one over the shared memory."""
    device = detect_gpus().devices[0]
    problem = replace(PROBLEM, E=16, global_experts=16, topk=2, K=2048, N=1024, file_n=1024, gpu=device.gpu)
    names = [SERVER.file_name(problem, kernel) for kernel in ("up", "down")]
    tables: list[dict[int, KernelConfig]] = []
    for kernel in ("up", "down"):
        default = SERVER.default_config(problem, kernel, 1)
        tables.append(
            {
                1: default,
                256: KernelConfig(16, 16, 16, 1, 1, 1),
                1024: KernelConfig(256, 256, 256, 1, 8, 5),
            }
        )
    paths = lay(tmp_path, dict(zip(names, tables, strict=True)))
    asked = request(
        *paths, hidden=2048, topk=2, max_m=1024, state=tmp_path / "state", share_gpu=True, devices=(0,)
    )
    (one,) = verify(asked, {}).problems
    assert not one.gpu.reason
    assert [entry.verdict for entry in one.entries] == [Verdict.SAME, Verdict.SLOWER, Verdict.CANNOT_RUN]
    assert one.gpu.compilations == 0
    for entry in one.entries[:2]:
        assert [item.passed for item in entry.numerics] == [True, True]
    assert one.entries[0].default_us is not None
    assert one.entries[0].default_us > 1
    (again,) = verify(asked, {}).problems
    assert again.entries == one.entries
    assert again.gpu.measured == 0

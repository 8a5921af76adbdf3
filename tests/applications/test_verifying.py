"""Verifying files: the server's own lookup anywhere; on a GPU wrong numbers, failures and slow entries."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.measure_request import MeasureRequest
from moetune.applications.measuring_devices import GpuBusyError
from moetune.applications.nvml import detect_gpus
from moetune.applications.provenance import SCHEMA, SUFFIX, text_sha256
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_measured import tune_measured
from moetune.applications.verify_answer import Entry, Verdict, Verification, Verified, VerifyRequest
from moetune.applications.verify_devices import WrongGpuError
from moetune.applications.verify_picks import picks_of
from moetune.applications.verifying import verify
from moetune.applications.worker_pool import WorkerCommand
from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.gpu import find_gpu
from moetune.domain.identity import fingerprint, identity, problem_to_json
from moetune.domain.quantization import Dtype, Quantization
from tests.applications.fake_machine import PROBLEM, SERVER, VLLM, FakeMachine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.nvml import Device
    from moetune.domain.problem import Kernel

MS = (1, 64, 2048)
FOLDER = Path("configs", "triton_3_6_0")
UP, DOWN = (SERVER.file_name(PROBLEM, kernel) for kernel in ("up", "down"))
# By the made-up times of tests/measure/fake_gpu.py: good at m, and bad at every m.
GOOD_UP = {
    1: KernelConfig(16, 128, 64, 1, 4, 3),
    64: KernelConfig(16, 128, 64, 2, 4, 3),
    2048: KernelConfig(128, 128, 64, 1, 4, 3),
}
GOOD_DOWN = {m: replace(config, group_size_m=3 + config.group_size_m) for m, config in GOOD_UP.items()}
SLOW = KernelConfig(128, 32, 128, 1, 8, 2)


def lay(
    root: Path,
    tables: Mapping[str, Mapping[int, KernelConfig]],
    folder: Path = FOLDER,
) -> list[Path]:
    paths = []
    for name, entries in tables.items():
        path = root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ConfigTable.of(entries).render())
        paths.append(path)
    return paths


def request(*paths: Path, **changes: Any) -> VerifyRequest:
    values: dict[str, Any] = {
        "server": "sglang",
        "server_version": "0.5.23",
        "triton_version": "3.6.0",
        "hidden": 3072,
        "topk": 8,
        "max_m": 2048,
        "offline": True,
    }
    return VerifyRequest(paths=paths, **{**values, **changes})


def look(*paths: Path, environ: Mapping[str, str] | None = None, **changes: Any) -> Verified:
    """Verify one problem on a machine without a GPU."""
    (one,) = verify(request(*paths, **changes), environ or {}, gpus=()).problems
    return one


def measure(
    machine: FakeMachine, *paths: Path, gpus: list[Device] | None = None, **changes: Any
) -> Verification:
    return verify(
        request(*paths, state=machine.folder / "state", **changes),
        {},
        gpus=machine.devices() if gpus is None else gpus,
        command=machine.command,
        pool=machine.pool,
    )


def measured(machine: FakeMachine, *paths: Path, **changes: Any) -> dict[int, Entry]:
    (one,) = measure(machine, *paths, **changes).problems
    assert not one.gpu.reason
    return {entry.pick.m: entry for entry in one.entries}


# on a GPU


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


def test_between_the_keys_what_the_server_would_pick_is_measured_too(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    picks = {pick.m: pick for pick in look(*paths, between=True).looked.picks}
    switches = [m for m in SERVER.default_switches(PROBLEM) if m < 2048]
    assert {*MS, 32, 33, *switches, *(m + 1 for m in switches)} <= set(picks)
    assert picks[33].up_key == picks[33].down_key == 64
    entries = measured(FakeMachine(tmp_path), *paths, between=True)
    assert set(entries) == set(picks)


def test_tables_with_different_keys_meet_as_the_server_lets_them_meet(tmp_path: Path) -> None:
    down = {1: GOOD_DOWN[1], 32: GOOD_DOWN[64], 64: GOOD_DOWN[64], 2048: GOOD_DOWN[2048]}
    picks = look(*lay(tmp_path, {UP: GOOD_UP, DOWN: down})).looked.picks
    spans = [(pick.first, pick.last) for pick in picks]
    assert spans[0][0] == 1
    assert spans[-1][1] == 2048
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(spans))
    keys = {(pick.m, pick.up_key, pick.down_key) for pick in picks}
    assert (32, 1, 32) in keys
    assert (33, 64, 32) in keys  # no key of either lies there
    for pick in picks:
        for m in (pick.first, pick.m, pick.last):
            assert SERVER.config_for(ConfigTable.of(GOOD_UP), m) == pick.up
            assert SERVER.config_for(ConfigTable.of(down), m) == pick.down


PICKED = [*GOOD_UP.values(), SLOW]
TABLES = st.none() | st.dictionaries(st.integers(0, 3000), st.sampled_from(PICKED), min_size=1, max_size=6)


@given(up=TABLES, down=TABLES, max_m=st.integers(1, 3000), between=st.booleans())
def test_every_m_is_in_one_stretch_and_there_the_server_picks_what_it_says(
    up: dict[int, KernelConfig] | None, down: dict[int, KernelConfig] | None, max_m: int, between: bool
) -> None:
    if up is None and down is None:
        return
    asked = VerifyRequest(paths=(Path("x"),), max_m=max_m, between=between)
    tables = [None if table is None else ConfigTable(tuple(table.items())) for table in (up, down)]
    picks = picks_of(SERVER, PROBLEM, tables[0], tables[1], asked)
    stretches = list(dict.fromkeys((pick.first, pick.last) for pick in picks))
    assert [first for first, _ in stretches] == [1, *(last + 1 for _, last in stretches[:-1])]
    keys = {key for table in (up, down) if table for key in table}
    assert stretches[-1][1] == max(max_m, *keys)
    assert {key for key in keys if key} <= {pick.m for pick in picks}
    for pick in picks:
        for m in {pick.first, pick.m, pick.last, (pick.first + pick.last) // 2}:
            for kernel, table, config in (("up", tables[0], pick.up), ("down", tables[1], pick.down)):
                kernels: dict[str, Kernel] = {"up": "up", "down": "down"}
                default = SERVER.default_config(PROBLEM, kernels[kernel], m)
                assert config == (default if table is None else SERVER.config_for(table, m))


# which GPU


def test_another_gpu_is_refused_naming_both(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    machine = FakeMachine(tmp_path, gpus=2)
    other = [replace(machine.devices()[0], name="NVIDIA H100 80GB HBM3")]
    with pytest.raises(
        WrongGpuError, match="for NVIDIA H200, and this GPU is NVIDIA H100 80GB HBM3"
    ) as caught:
        measure(machine, *paths, gpus=other)
    assert "--lookup-only" in str(caught.value.hint)
    (one,) = measure(machine, *paths, gpus=other, lookup_only=True).problems
    assert one.gpu.reason == "--lookup-only"
    # Of two kinds the files' own is taken, unless another is asked for.
    both = [other[0], machine.devices()[1]]
    (one,) = measure(machine, *paths, gpus=both).problems
    assert {line["gpu"] for line in machine.log("time")} == {"GPU-1"}
    with pytest.raises(WrongGpuError):
        measure(machine, *paths, gpus=both, devices=(0,))
    with pytest.raises(InputError, match="has 2 GPUs"):
        measure(machine, *paths, gpus=both, devices=(2,))


def test_of_files_for_several_gpus_those_of_this_one_are_measured(tmp_path: Path) -> None:
    other = SERVER.file_name(replace(PROBLEM, gpu=find_gpu("NVIDIA L40S")), "up")
    paths = lay(tmp_path, {UP: GOOD_UP, other: GOOD_UP})
    found = measure(FakeMachine(tmp_path), *paths)
    reasons = {one.looked.files[0].path: one.gpu.reason for one in found.problems}
    assert reasons[str(paths[0])] == ""
    assert "for NVIDIA L40S, and this GPU is NVIDIA H200" in reasons[str(paths[1])]
    with pytest.raises(WrongGpuError, match="NVIDIA L40S"):
        measure(FakeMachine(tmp_path), paths[1])


def test_a_gpu_in_use_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    machine = FakeMachine(tmp_path)
    with pytest.raises(GpuBusyError, match="in use by other processes \\(4242\\)"):
        measure(machine, *paths, gpus=machine.devices(os.getpid(), 4242))
    assert not machine.log("open")
    assert not measure(machine, *paths, gpus=machine.devices(4242), share_gpu=True).is_no


def test_without_k_and_topk_the_lookup_is_verified_and_the_option_that_is_missing_is_named(
    tmp_path: Path,
) -> None:
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    (one,) = measure(machine, *paths, hidden=None, topk=None).problems
    assert all(file.reads for file in one.looked.files)
    assert "--model MODEL, or --hidden and --topk" in one.gpu.reason
    assert not one.is_no
    assert not machine.log("open")


def test_nothing_to_import_is_a_reason_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    machine = FakeMachine(tmp_path)
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    (one,) = measure(machine, *paths).problems
    assert "torch and triton cannot be imported here" in one.gpu.reason
    assert "--python" in one.gpu.reason


# what the files are for


def test_the_model_says_the_rest_by_its_split_or_by_the_name(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    model: dict[str, Any] = {"model": "Qwen/Qwen3.5-122B-A10B", "hidden": None, "topk": None}
    splits: tuple[dict[str, Any], ...] = ({}, {"tp": 4})
    for split in splits:
        one = look(*paths, **model, **split)
        assert one.looked.problem is not None
        assert (one.looked.problem.K, one.looked.problem.topk, one.looked.known_from) == (
            3072,
            8,
            "the model",
        )
    with pytest.raises(InputError, match="looks for E=256,N=512"):
        look(*paths, **model, tp=2)
    other = look(*paths, model="Qwen/Qwen3-30B-A3B", hidden=None, topk=None)
    assert not other.looked.complete
    assert "no shard" in other.gpu.reason


def provenance(path: Path, problem: Any = PROBLEM, text: str | None = None) -> None:
    document = {
        "schema": SCHEMA,
        "kind": "measured",
        "fingerprint": fingerprint(problem),
        "identity": identity(problem),
        "config_sha256": text_sha256(path.read_text() if text is None else text),
        "problem": problem_to_json(problem),
    }
    path.with_name(path.name + SUFFIX).write_text(json.dumps(document))


def test_the_provenance_beside_a_file_tells_its_problem_and_its_release(tmp_path: Path) -> None:
    up, down = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    told: dict[str, Any] = {"hidden": None, "topk": None}
    asked = {"server": None, "server_version": None, "triton_version": None}
    problem = replace(PROBLEM, server_version="0.5.20", routing="zipf:1.2")
    provenance(up, problem)
    one = look(up, down, **told, **asked)
    assert one.looked.problem == problem, "it is measured under the routing that it was tuned for"
    provenance(up, replace(problem, routing="zipf:99"))
    nameless = look(up, down, **told, **asked).looked.problem
    assert nameless == replace(problem, routing="uniform")
    provenance(up, problem)
    assert one.looked.known_from == "the provenance beside it"
    assert (one.looked.server.version, one.looked.server.triton_version) == ("0.5.20", "3.6.0")
    # One of another problem is not believed, and a file that was changed is said to be.
    provenance(up, replace(PROBLEM, N=512, file_n=512))
    assert not look(up, down, **told).looked.complete
    provenance(up, PROBLEM, "{}")
    changed = look(up, **told)
    assert changed.looked.complete
    assert "changed since" in changed.looked.files[0].note
    provenance(up, replace(PROBLEM, K=-1))
    assert not look(up, **told).looked.complete


def test_what_tune_wrote_is_verified_with_nothing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(EFFORTS["quick"], rounds=(2, 2), limit=12, layer_rounds=5, budget_seconds=None)
    monkeypatch.setattr("moetune.applications.tuning_measured.EFFORTS", {**EFFORTS, "quick": quick})
    machine = FakeMachine(tmp_path)
    asked = MeasureRequest(
        "Qwen/Qwen3.5-122B-A10B",
        tp=4,
        server="sglang",
        m="1,64,2048",
        max_m=2048,
        offline=True,
        out=tmp_path / "out",
        state=tmp_path / "state",
    )
    tuned = tune_measured(asked, {}, gpus=machine.devices(), command=machine.command, pool=machine.pool)
    assert tuned.gains
    nothing: dict[str, Any] = {"hidden": None, "topk": None, "server": None}
    nothing |= {"server_version": None, "triton_version": None}
    (one,) = measure(machine, tmp_path / "out", **nothing).problems
    assert one.answer == "yes"
    assert one.looked.known_from == "the provenance beside it"
    assert {entry.verdict for entry in one.entries} <= {Verdict.FASTER, Verdict.SAME}
    assert Verdict.FASTER in {entry.verdict for entry in one.entries}


# the lookup


def test_files_in_place_are_found_and_the_variable_that_points_there_is_told(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    one = look(*paths)
    assert one.answer == "not measured"
    assert [file.reads for file in one.looked.files] == [True, True]
    assert {file.use for file in one.looked.files} == {f"export SGLANG_MOE_CONFIG_DIR={tmp_path}"}
    assert {found.code.code for found in one.looked.findings} == {"MOE141"}
    set_here = look(*paths, environ={"SGLANG_MOE_CONFIG_DIR": str(tmp_path)})
    assert {file.use for file in set_here.looked.files} == {""}
    (tmp_path / "other").mkdir()
    elsewhere = look(*paths, environ={"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "other")})
    assert elsewhere.looked.files[0].use
    gone = look(*paths, environ={"SGLANG_MOE_CONFIG_DIR": str(paths[0])})
    assert "cannot be read as a directory" in gone.looked.files[0].note


def test_a_file_of_another_tritons_directory_is_stale_or_hidden_by_a_newer_one(tmp_path: Path) -> None:
    old = Path("configs", "triton_3_5_1")
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN}, old)
    stale = look(*paths)
    assert all(file.reads for file in stale.looked.files)
    assert "another Triton version" in stale.looked.files[0].says
    assert not stale.is_no
    (newer,) = lay(tmp_path, {UP: GOOD_UP})
    hidden = look(*paths)
    assert not hidden.looked.files[0].reads
    assert str(newer) in hidden.looked.files[0].says
    assert hidden.looked.files[0].mend.startswith("moetune install")
    assert hidden.is_no


def test_a_file_outside_any_tree_is_never_read_and_the_place_is_named(tmp_path: Path) -> None:
    (path,) = lay(tmp_path, {UP: GOOD_UP}, Path("downloads"))
    one = look(path)
    assert one.is_no
    (file,) = one.looked.files
    assert file.lookup is None
    assert f"configs/triton_3_6_0/{UP}" in file.says
    assert "SGLANG_MOE_CONFIG_DIR" in file.says
    assert "moetune install" in file.mend


def test_a_name_that_no_release_looks_for_is_never_read(tmp_path: Path) -> None:
    (path,) = lay(tmp_path, {"E=256,N=256,device_name=NVIDIA_H200,dtype=fp7.json": GOOD_UP})
    one = look(path)
    assert one.is_no
    assert "no dtype tag 'fp7'" in one.looked.files[0].says
    (path,) = lay(tmp_path, {"notes.json": GOOD_UP})
    assert look(path).is_no


def test_a_down_file_of_a_release_with_one_file_is_never_read(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    one = look(*paths, server_version="0.5.3")
    assert [file.reads for file in one.looked.files] == [True, False]
    assert "one file for both kernels" in one.looked.files[1].says
    assert [pick.down for pick in one.looked.picks] == list(GOOD_UP.values())


def test_deterministic_mode_opens_no_file(tmp_path: Path) -> None:
    one = look(*lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN}), deterministic=True)
    assert one.is_no
    assert "opens no file" in one.looked.files[0].says


def test_a_release_without_a_variable_reads_its_own_folder_only(tmp_path: Path) -> None:
    (path,) = lay(tmp_path, {UP: GOOD_UP})
    assert not look(path, server_version="0.5.1").looked.files[0].reads
    home = Path("site-packages", "sglang/srt/layers/moe/fused_moe_triton")
    (path,) = lay(tmp_path, {UP: GOOD_UP}, home / FOLDER)
    assert look(path, server_version="0.5.1").looked.files[0].reads


def test_a_directory_name_that_ends_the_server_is_no(tmp_path: Path) -> None:
    paths = lay(tmp_path, {UP: GOOD_UP})
    (tmp_path / "configs" / "triton_old").mkdir()
    one = look(*paths)
    assert "MOE104" in {found.code.code for found in one.looked.findings}
    assert one.is_no


@pytest.mark.parametrize("text", ["[]", "{", '{"1": {}}', '{"a": 1}', '{"1": {"BLOCK_SIZE_M": 16}}', "\xff"])
def test_what_the_loader_dies_of_is_no(text: str, tmp_path: Path) -> None:
    (path,) = lay(tmp_path, {UP: GOOD_UP})
    path.write_bytes(text.encode("latin-1"))
    machine = FakeMachine(tmp_path)
    (one,) = measure(machine, path).problems
    assert one.is_no
    assert one.looked.files[0].unreadable
    assert one.looked.files[0].is_no
    assert not one.looked.picks
    assert not machine.log("open")


def test_what_lint_calls_fatal_is_no_and_what_costs_speed_is_not(tmp_path: Path) -> None:
    short = {1: GOOD_UP[1], 64: GOOD_UP[64]}
    (path,) = lay(tmp_path, {UP: short})
    one = look(path)
    assert {found.code.code for found in one.looked.findings} == {"MOE141"}
    assert not one.is_no
    huge = {**GOOD_UP, 64: KernelConfig(256, 256, 256, 1, 8, 5)}
    (path,) = lay(tmp_path, {UP: huge})
    assert look(path).is_no


def test_an_empty_file_means_the_default(tmp_path: Path) -> None:
    (path,) = lay(tmp_path, {UP: {}})
    one = look(path)
    assert one.is_no  # lint: the server says that it uses the file, and uses its default
    assert not one.looked.picks


def test_several_problems_are_several_answers_and_a_pair_is_one(tmp_path: Path) -> None:
    other = SERVER.file_name(replace(PROBLEM, N=512, file_n=512), "up")
    lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN, other: GOOD_UP})
    found = verify(request(tmp_path), {}, gpus=())
    assert [len(one.looked.files) for one in found.problems] == [2, 1]


def test_equal_calls_answer_alike(tmp_path: Path) -> None:
    lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    first, second = (verify(request(tmp_path), {}, gpus=()).to_json() for _ in range(2))
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"paths": ()},
        {"lookup_only": True, "require_gpu": True},
        {"lookup_only": True, "devices": (0,)},
        {"devices": (0, 0)},
        {"tp": 2},
        {"model": "Qwen/Qwen3-30B-A3B", "hidden": 2048},
        {"max_m": 0},
        {"seed": -1},
    ],
)
def test_senseless_requests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        VerifyRequest(**{"paths": (Path("x"),), **changes})


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

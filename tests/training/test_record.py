"""Recording landscapes: what is planned fits and shares binaries rightly; a run that is cut short goes on."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from training.record import collect, missing, named_plan, submit_left
from training.record_plan import (
    FORMATS,
    SHAPES,
    Job,
    Unit,
    Where,
    binary_key,
    configs_of,
    fits_rows,
    jobs,
    problem_of,
    units_of,
    with_what_shares,
)
from training.recorder import WORTH_A_SECOND, BrokenGpuError, Record, Recorder, config_values

from moetune.domain.compilation import CompileResult, CompileStatus
from moetune.domain.config import KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.landscape import read_landscape
from moetune.domain.quantization import Dtype
from moetune.measure.protocol import DeviceFacts, Opened, Timed, TimeTask, Workload
from moetune.measure.workload import needed_bytes
from tests.generators import random_configs

if TYPE_CHECKING:
    from pathlib import Path

JOB = Job("qwen3-30b-a3b_tp1", "fp8-tensor")
CONFIGS = [KernelConfig(16, 32 << step, 128, 1, 4, 2) for step in range(4)] + [
    KernelConfig(64, 64, 64, 1, 4, 3)
]


def slowness(config: KernelConfig) -> float:
    return 1.0 + config.block_size_n / 64


@dataclass
class MadeUpGpu:
    """Times that follow from the config; what is in `breaks` ends the CUDA context."""

    breaks: set[KernelConfig] = field(default_factory=set)
    seconds: float = 0.0
    works: bool = True
    seeds: list[int] = field(default_factory=list)
    asked: list[TimeTask] = field(default_factory=list)
    compilations: int = 0

    def facts(self) -> DeviceFacts:
        return DeviceFacts("NVIDIA H200", "", "9.0", 132, 60 << 20, 141 << 30, 140 << 30, "2.11.0", "3.6.0")

    def healthy(self) -> bool:
        return self.works

    def open(self, workload: Workload) -> Opened:
        assert workload.problem == problem_of(JOB)
        return Opened(1, 1, 1)

    def use_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def time(self, task: TimeTask) -> Timed:
        self.asked.append(task)
        config = task.task.launch.config
        if config in self.breaks:
            self.works = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        time.sleep(self.seconds)
        return Timed(10.0 * slowness(config) + self.seeds[-1], 0.001, 3, 16, 1, 1 << 28, 60 << 20)


class AllCompiled:
    """Everything is compiled; what is in `bad` is over the shared memory."""

    def __init__(self, bad: KernelConfig | None = None) -> None:
        self._bad = bad

    def ready(self, unit: Unit) -> bool:  # noqa: ARG002
        return True

    def wait(self, unit: Unit, deadline: float) -> bool:  # noqa: ARG002
        return True

    def result(self, unit: Unit, config: KernelConfig) -> CompileResult:  # noqa: ARG002
        return CompileResult(CompileStatus.OK, 300_000 if config == self._bad else 30_000, 128, 0, 1.0)

    def progress(self) -> str:
        return "all"


class CompiledWhatWasSubmitted(AllCompiled):
    """As `Binaries`, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: dict[Where, set[KernelConfig]] = defaultdict(set)

    def submit(self, unit: Unit, priority: int) -> None:
        assert priority >= 0
        self.submitted[unit.where] |= set(unit.tasks)

    def result(self, unit: Unit, config: KernelConfig) -> CompileResult:
        assert config in self.submitted[unit.where]
        return super().result(unit, config)


def recorder(path: Path, gpu: MadeUpGpu, bad: KernelConfig | None = None, seconds: float = 60.0) -> Recorder:
    return Recorder(gpu, AllCompiled(bad), Record(path), time.monotonic() + seconds)


def plan(configs: list[KernelConfig] = CONFIGS) -> dict[Job, list[Unit]]:
    return {JOB: units_of(JOB, configs, 2)}


def rows_of(path: Path) -> list[dict[str, object]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if "us" in row]


def test_the_first_round_has_one_of_each_format_and_all_are_planned_once() -> None:
    planned = jobs()
    assert {job.format for job in planned[: len(FORMATS)]} == set(FORMATS)
    assert len(set(planned)) == len(planned) == sum(len(kind.shapes) for kind in FORMATS.values())


def test_what_the_issue_asks_for_is_planned() -> None:
    shapes = [SHAPES[job.shape] for job in jobs()]
    assert {8, 16, 64, 128, 256, 512} <= {shape.E for shape in shapes}
    assert min(shape.N for shape in shapes) == 128
    assert max(shape.N for shape in shapes) == 16384
    assert min(min(shape.ms) for shape in shapes) == 1
    assert max(max(shape.ms) for shape in shapes) == 8192


def test_every_problem_fits_into_the_memory_of_the_gpu() -> None:
    for job in jobs():
        assert needed_bytes(problem_of(job), max(SHAPES[job.shape].ms), 1, 1) < 120 << 30


def test_each_format_has_the_defaults_all_sizes_and_only_what_runs() -> None:
    configs = configs_of("int4-g128", [])
    assert {config.block_size_m for config in configs} == {16, 32, 64, 128, 256}
    assert len(configs) == len(set(configs)) > 60
    assert configs == configs_of("int4-g128", [])
    assert max(config.block_size_k for config in configs_of("fp8-block", [])) == 128


def test_few_rows_are_not_timed_with_huge_tiles_but_for_some() -> None:
    huge = [KernelConfig(256, n, 64, g, 8, s) for n in (64, 128) for g in (1, 2, 4, 8, 16) for s in (2, 3, 4)]
    kept = [config for config in huge if fits_rows(config, 1.0)]
    assert 0 < len(kept) < len(huge) / 3
    assert all(fits_rows(config, 64.0) for config in huge)


def test_tasks_share_a_key_exactly_where_triton_compiles_them_into_one_binary() -> None:
    compile_module = pytest.importorskip("moetune.measure.compile")
    sources: dict[tuple[object, ...], set[str]] = defaultdict(set)
    keys: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    rng = random.Random(5)
    for job in jobs():
        configs = [KernelConfig(64, 64, 64, 1, 4, 3), KernelConfig(64, 64, 128, 1, 4, 3)]
        for unit in rng.sample(units_of(job, configs, 1), 8):
            for task in unit.tasks.values():
                source = f"{compile_module.kernel_source(task).hash()} {task.launch.config}"
                sources[binary_key(task)].add(source)
                keys[source].add(binary_key(task))
    assert len(keys) > 60
    assert all(len(found) == 1 for found in sources.values())
    assert all(len(found) == 1 for found in keys.values())


def test_two_passes_and_the_second_without_what_is_hopeless(tmp_path: Path) -> None:
    gpu = MadeUpGpu()
    assert recorder(tmp_path / "r.jsonl", gpu).run(plan())
    rows = rows_of(tmp_path / "r.jsonl")
    units = len(SHAPES[JOB.shape].ms) * 2
    assert gpu.seeds == [1] * units + [2] * units
    first = [row for row in rows if row["pass"] == 1]
    second: set[object] = {tuple(row["config"]) for row in rows if row["pass"] == 2}  # type: ignore[arg-type]
    assert {tuple(row["config"]) for row in first} == {tuple(config_values(config)) for config in CONFIGS}  # type: ignore[arg-type]
    best = min(slowness(config) for config in CONFIGS)
    worth = {
        tuple(config_values(c)) for c in CONFIGS if 10 * slowness(c) + 1 <= WORTH_A_SECOND * (10 * best + 1)
    }
    assert second == worth
    assert len(worth) < len(CONFIGS)


def test_what_was_timed_is_not_timed_again_and_a_line_that_was_cut_off_is(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert recorder(path, MadeUpGpu()).run(plan())
    whole = path.read_text()
    again = MadeUpGpu()
    assert recorder(path, again).run(plan())
    assert again.asked == []
    path.write_text(whole[: len(whole) * 2 // 3])
    rest = MadeUpGpu()
    assert recorder(path, rest).run(plan())
    assert 0 < len(rest.asked) < len(rows_of(path))
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7, 0.9, 1.0])
def test_what_is_left_is_compiled_and_nothing_else(tmp_path: Path, share: float) -> None:
    path = tmp_path / "r.jsonl"
    assert recorder(path, MadeUpGpu()).run(plan())
    whole = path.read_text()
    path.write_text(whole[: int(len(whole) * share)])
    compiler, record, gpu = CompiledWhatWasSubmitted(), Record(path), MadeUpGpu()
    submit_left(compiler, record, plan(), plan())
    assert Recorder(gpu, compiler, record, time.monotonic() + 60).run(plan())
    asked = {(task.task.launch.kernel, task.m, task.task.launch.config) for task in gpu.asked}
    submitted = {(kernel, m, c) for (_, kernel, m), found in compiler.submitted.items() for c in found}
    assert asked == submitted


def test_landscapes_that_miss_a_pass_or_an_m_are_missing_and_whole_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert missing(Record(path), plan()) == [JOB]
    assert recorder(path, MadeUpGpu()).run(plan())
    rows = path.read_text().splitlines()
    assert missing(Record(path), plan()) == []
    more = {JOB: units_of(JOB, [*CONFIGS, KernelConfig(32, 64, 64, 1, 4, 3)], 2)}
    assert missing(Record(path), more) == []
    largest = max(SHAPES[JOB.shape].ms)
    for lost in ('"pass":2', f'"m":{largest},'):
        path.write_text("".join(row + "\n" for row in rows if lost not in row))
        assert missing(Record(path), plan()) == [JOB]


def test_jobs_that_share_binaries_come_behind_one_another() -> None:
    configs = [KernelConfig(64, 64, 64, 1, 4, 3), KernelConfig(16, 64, 128, 1, 4, 3)]
    order = with_what_shares({job: units_of(job, configs, 1) for job in jobs()}, few=1)
    assert sorted(map(str, order)) == sorted(map(str, jobs()))
    # They differ in the number of experts alone.
    first, second = (
        order.index(Job(shape, "int4-g128")) for shape in ("qwen3-30b-a3b_tp1", "synthetic-e512-n768")
    )
    assert second == first + 1


def test_what_a_file_names_is_planned_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "picks.json"
    path.write_text(
        json.dumps({JOB.name: {"up 64": [[256, 64, 64, 1, 8, 3]], "down 1": [[16, 64, 64, 1, 4, 2]]}})
    )
    (units,) = named_plan(path).values()
    assert [(unit.number, unit.kernel, unit.m) for unit in units] == [
        *((1, "up", 64), (1, "down", 1)),
        *((2, "up", 64), (2, "down", 1)),
    ]
    assert list(units[0].tasks) == [KernelConfig(256, 64, 64, 1, 8, 3)]


def test_a_run_out_of_time_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert not recorder(path, MadeUpGpu(seconds=0.02), seconds=0.2).run(plan())
    assert 0 < len(rows_of(path)) < 20


def test_a_lost_gpu_ends_the_process_and_the_next_goes_on_behind_the_culprit(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    breaks = {CONFIGS[1]}
    broken = 0
    while True:
        try:
            assert recorder(path, MadeUpGpu(breaks)).run(plan())
            break
        except BrokenGpuError:
            broken += 1
    assert broken == sum(CONFIGS[1] in unit.tasks for unit in units_of(JOB, CONFIGS, 1)) > 3
    errors = [row for row in rows_of(path) if row.get("error")]
    assert {tuple(row["config"]) for row in errors} == {tuple(config_values(CONFIGS[1]))}  # type: ignore[arg-type]
    assert {row["pass"] for row in errors} == {1}


def test_what_does_not_fit_is_not_launched(tmp_path: Path) -> None:
    gpu = MadeUpGpu()
    assert recorder(tmp_path / "r.jsonl", gpu, bad=CONFIGS[0]).run(plan())
    assert CONFIGS[0] not in {task.task.launch.config for task in gpu.asked}
    assert "OutOfResources" in (tmp_path / "r.jsonl").read_text()


def test_a_record_becomes_landscapes_that_replay_reads(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert recorder(path, MadeUpGpu(), bad=CONFIGS[0]).run(plan())
    (written,) = collect([path], tmp_path)
    landscape = read_landscape(written)
    assert landscape.problem.quantization.dtype is Dtype.FP8_W8A8
    assert landscape.problem.quantization.block_shape is None
    assert landscape.problem.gpu == find_gpu("NVIDIA H200")
    times, again = landscape.times_us["up", 64], landscape.second_us["up", 64]
    assert times[CONFIGS[0]] is None
    assert times[CONFIGS[1]] == 10 * slowness(CONFIGS[1]) + 1
    assert again[CONFIGS[1]] == 10 * slowness(CONFIGS[1]) + 2
    assert CONFIGS[0] not in again
    first = written.read_bytes()
    assert collect([path], tmp_path)[0].read_bytes() == first


def test_of_two_times_of_the_same_the_later_counts_and_is_counted(tmp_path: Path) -> None:
    first, second = tmp_path / "r.jsonl", tmp_path / "again.jsonl"
    assert recorder(first, MadeUpGpu()).run(plan())
    collect([first], tmp_path)
    beside = tmp_path / f"{JOB.name}_h200_own-kernel.json"
    assert json.loads(beside.read_text())["timed_again"] == 0
    named = {"job": JOB.name, "kernel": "up", "m": 64, "config": config_values(CONFIGS[1])}
    second.write_text("".join(json.dumps({**named, "pass": n, "us": 7.5}) + "\n" for n in (1, 2)))
    (written,) = collect([first, second], tmp_path)
    landscape = read_landscape(written)
    assert landscape.times_us["up", 64][CONFIGS[1]] == 7.5
    assert landscape.second_us["up", 64][CONFIGS[1]] == 7.5
    assert landscape.times_us["up", 64][CONFIGS[2]] == 10 * slowness(CONFIGS[2]) + 1
    assert json.loads(beside.read_text())["timed_again"] == 2


def test_the_space_of_configs_is_not_the_plan_alone() -> None:
    """Whatever the configs are, their binaries are those that SGLang launches."""
    for job in jobs()[:8]:
        for unit in units_of(job, random_configs(10, 3), 1):
            assert all(task.launch.kernel == unit.kernel for task in unit.tasks.values())
            assert all(task.launch.pdl is (not task.grouped) for task in unit.tasks.values())

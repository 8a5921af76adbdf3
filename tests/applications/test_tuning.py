"""From a request to files: the server's own layout, whole or not at all, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications import compiling, planning, tuning
from moetune.applications.output import State
from moetune.applications.request import Request, TuneRequest
from moetune.applications.tuning import measure_command, tune_request
from moetune.cli.options import request_from
from moetune.cli.tune import tune as tune_command
from moetune.domain.compilation import CompileResult, CompileStatus
from moetune.domain.errors import OutputError, UnknownGpuError
from moetune.domain.predict import PerformanceModel
from moetune.servers.registry import open_server
from tests.doubles import ModelDouble, padded_rows_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import click

    from moetune.applications.tuning import Tuned
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem

    Check = Callable[[Launch], CompileResult]

MODEL = "Qwen/Qwen3.5-122B-A10B"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
OK = CompileResult(CompileStatus.OK, shared_bytes=1024)
FAILS = CompileResult(CompileStatus.COMPILER_FAILURE, message="PassManager::run failed")


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> ModelDouble:
    double = ModelDouble()
    monkeypatch.setattr(PerformanceModel, "load", lambda: double)
    return double


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_installed", lambda _: None)
    monkeypatch.setattr(tuning, "find_installed", lambda _: None)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Check], list[Launch]]:
    """Puts a function in the compiler's place, and lists what it was given."""

    def place(check: Check) -> list[Launch]:
        seen: list[Launch] = []

        def compile_check(
            launches: Iterable[Launch], problem: Problem, pool: object
        ) -> dict[Launch, CompileResult]:
            del problem, pool
            seen.extend(launches := list(launches))
            return {launch: check(launch) for launch in launches}

        monkeypatch.setattr(compiling, "compile_check", compile_check)
        return seen

    return place


def tune(out: Path, model: str = MODEL, **fields: Any) -> Tuned:
    for name, value in {"gpu": RTX, "tp": 4, "server": "sglang", "compile_configs": False}.items():
        fields.setdefault(name, value)
    return tune_request(TuneRequest(model, out=out, **fields), {})


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class TestFiles:
    def test_sglang_reads_a_pair_back_as_it_was_chosen(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path / "out")
        server = open_server("sglang")
        predicted = tuned.plan.gpus[0].predicted
        assert predicted is not None
        up, down = (server.read_table(file.path.read_text(), file.path.name) for file in tuned.files)
        assert up == predicted.choices.up
        assert down == predicted.choices.down
        assert [file.state for file in tuned.files] == [State.WRITTEN, State.WRITTEN]
        assert tuned.files[1].path.name.endswith("_down.json")
        assert tuned.found

    def test_vllm_gets_one_file_in_the_directory_itself(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path, server="vllm", gpu="NVIDIA H200")
        (file,) = tuned.files
        assert file.path == tmp_path / "E=256,N=256,device_name=NVIDIA_H200.json"
        assert tuned.use_command == f"export VLLM_TUNED_CONFIG_FOLDER={tmp_path}"
        assert tuned.found
        assert not tuned.replaces_shipped

    def test_three_gpus_at_once(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path, gpu=(RTX, "NVIDIA H200", "NVIDIA L40S"))
        assert len(tuned.files) == 6
        assert len({file.path for file in tuned.files}) == 6
        assert tuned.found

    def test_provenance_says_predicted_and_which_problem(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path)
        provenance = json.loads(tuned.files[0].provenance.read_text())
        assert provenance["kind"] == "predicted"
        assert provenance["model"] == MODEL
        assert provenance["problem"]["gpu"]["torch_name"] == RTX
        assert provenance["familiarity"]["distance"] == 0.25
        assert provenance["conditions"]["repeats"] is None

    def test_equal_inputs_give_equal_bytes_wherever_they_go(self, tmp_path: Path) -> None:
        tune(tmp_path / "a", gpu=(RTX, "NVIDIA H200"))
        tune(tmp_path / "b" / "c", gpu=(RTX, "NVIDIA H200"))
        assert digest(tmp_path / "a") == digest(tmp_path / "b" / "c")
        assert len(digest(tmp_path / "a")) == 8

    def test_a_second_run_changes_nothing(self, tmp_path: Path) -> None:
        tune(tmp_path)
        before = digest(tmp_path)
        tuned = tune(tmp_path)
        assert {file.state for file in tuned.files} == {State.UNCHANGED}
        assert digest(tmp_path) == before

    def test_sglang_forgets_its_own_files_and_that_is_said(self, tmp_path: Path) -> None:
        assert tune(tmp_path).replaces_shipped

    def test_a_release_without_a_variable_is_told_where_to_copy(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path, server_version="0.5.2")
        assert tuned.use_command.startswith("cp ")
        words = shlex.split(tuned.use_command)
        assert words[-1].endswith("configs/triton_3_4_0")
        assert words[1:-1] == [str(file.path) for file in tuned.files]

    def test_the_directory_is_quoted_for_pasting(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path / "with space; rm")
        assert shlex.split(tuned.use_command) == [
            "export",
            f"SGLANG_MOE_CONFIG_DIR={tmp_path}/with space; rm",
        ]


class TestNothingIsWritten:
    def test_where_another_runner_does_the_work(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path / "out", "deepseek-ai/DeepSeek-V3", tp=8, gpu="NVIDIA B200")
        assert tuned.files == ()
        assert tuned.use_command == ""
        assert not tuned.plan.gains
        assert not (tmp_path / "out").exists()

    def test_case_45_where_the_default_is_best(self, tmp_path: Path, model: ModelDouble) -> None:
        server = open_server("sglang")

        def default_us(kernel: Kernel, m: int, launch: Launch) -> float:
            del kernel
            default = "16x32x64 g1 w4 s3" if m <= 256 else "64x64x32 g8 w4 s3"
            return 1.0 if str(launch.config) == default else 2.0

        model.time_us = default_us
        tuned = tune(tmp_path / "out")
        assert server.version == tuned.plan.server.version
        assert tuned.files == ()
        assert not tuned.plan.gains
        assert not (tmp_path / "out").exists()

    def test_for_the_others_when_one_gpu_is_unknown(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownGpuError):
            tune(tmp_path / "out", gpu=(RTX, "NVIDIA Thing 9"))
        assert not (tmp_path / "out").exists()

    def test_over_a_file_of_another_origin(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path / "first")
        other = tmp_path / "out" / tuned.files[1].path.relative_to(tmp_path / "first")
        other.parent.mkdir(parents=True)
        other.write_text("{}")
        before = digest(tmp_path / "out")
        with pytest.raises(OutputError) as caught:
            tune(tmp_path / "out")
        assert "--force" in (caught.value.hint or "")
        assert digest(tmp_path / "out") == before
        forced = tune(tmp_path / "out", force=True)
        assert [file.state for file in forced.files] == [State.WRITTEN, State.REPLACED]

    def test_case_24_over_another_problem_of_the_same_name(self, tmp_path: Path, model: ModelDouble) -> None:
        sizes = {"experts": 256, "topk": 8, "intermediate": 2048}
        tune(tmp_path, "one", tp=8, hidden=6144, **sizes)
        model.time_us = lambda kernel, m, launch: padded_rows_us(kernel, m, launch) / launch.config.num_warps
        with pytest.raises(OutputError, match="K is 7168 here and 6144 there"):
            tune(tmp_path, "two", tp=8, hidden=7168, **sizes)

    @pytest.mark.parametrize("place", ["file", "below a file"])
    def test_where_a_file_stands_in_the_way(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(OutputError):
            tune(tmp_path / "file" if place == "file" else tmp_path / "file" / "below")
        assert (tmp_path / "file").read_text() == "mine"

    def test_others_are_written_when_one_gpu_has_another_runner(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path, "deepseek-ai/DeepSeek-V3", tp=8, gpu=("NVIDIA B200", "NVIDIA H200"))
        assert tuned.plan.gains
        assert {"H200" in file.path.name for file in tuned.files} == {True}


class TestCompiling:
    def test_everything_chosen_is_compiled_before_it_is_written(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        seen = compiler(lambda _: OK)
        tuned = tune(tmp_path, compile_configs=True)
        predicted = tuned.plan.gpus[0].predicted
        assert predicted is not None
        chosen = {("up", choice.pair.up) for choice in predicted.choices.entries}
        chosen |= {("down", choice.pair.down) for choice in predicted.choices.entries}
        assert {(launch.kernel, launch.config) for launch in seen} == chosen
        assert tuned.compiled[0].compiled == len(chosen)

    def test_what_does_not_compile_is_replaced_by_the_next_best(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        first = tune(tmp_path / "first").plan.gpus[0].predicted
        assert first is not None
        bad = first.choices.entries[0].pair.up
        compiler(lambda launch: FAILS if (launch.kernel, launch.config) == ("up", bad) else OK)
        tuned = tune(tmp_path / "out", compile_configs=True)
        text = tuned.files[0].path.read_text()
        table = open_server("sglang").read_table(text, "up.json")
        assert bad not in {config for _, config in table.entries}
        assert len(tuned.compiled[0].replaced) == 1
        assert "PassManager" in tuned.compiled[0].replaced[0]
        assert "1 did not compile" in tuned.compiled[0].text

    def test_what_fails_is_not_tried_again_with_another_group_size(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        seen = compiler(
            lambda launch: FAILS if launch.kernel == "up" and launch.config.num_stages == 3 else OK
        )
        tune(tmp_path, compile_configs=True)
        failed = [launch.config for launch in seen if launch.kernel == "up" and launch.config.num_stages == 3]
        assert failed
        assert len({replace(config, group_size_m=1) for config in failed}) == len(failed)

    def test_what_compiles_but_does_not_fit_is_replaced(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        first = tune(tmp_path / "first").plan.gpus[0].predicted
        assert first is not None
        bad = first.choices.entries[-1].pair.down
        large = CompileResult(CompileStatus.OK, shared_bytes=200_000)
        compiler(lambda launch: large if (launch.kernel, launch.config) == ("down", bad) else OK)
        tuned = tune(tmp_path / "out", compile_configs=True)
        assert any("200000 bytes" in why for why in tuned.compiled[0].replaced)

    def test_a_compiler_that_refuses_everything_ends_without_files(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        seen = compiler(lambda _: FAILS)
        tuned = tune(tmp_path / "out", compile_configs=True)
        assert tuned.files == ()
        assert not tuned.plan.gains
        assert "PassManager" in tuned.plan.gpus[0].reason
        assert len(seen) < 500
        assert not (tmp_path / "out").exists()

    def test_what_could_not_be_compiled_is_said(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        compiler(lambda _: CompileResult(CompileStatus.NOT_CHECKED, message="no Triton here"))
        tuned = tune(tmp_path, compile_configs=True)
        assert tuned.compiled[0].text == "not compiled: no Triton here"
        checks = json.loads(tuned.files[0].provenance.read_text())["checks"]
        assert [check["passed"] for check in checks if check["name"].startswith("compiles")] == [None]

    def test_no_compile_compiles_nothing(
        self, tmp_path: Path, compiler: Callable[[Check], list[Launch]]
    ) -> None:
        seen = compiler(lambda _: FAILS)
        tuned = tune(tmp_path, compile_configs=False)
        assert seen == []
        assert tuned.files
        assert tuned.compiled[0].text == "not compiled: --no-compile"

    def test_the_real_compiler_takes_what_is_chosen(self, tmp_path: Path) -> None:
        tuned = tune(tmp_path, compile_configs=True, m="16,2048")
        assert tuned.compiled[0].compiled > 0
        assert tuned.compiled[0].replaced == ()


def parse(command: str) -> TuneRequest:
    """The request that a printed command makes."""
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("moetune", "tune")
    context: click.Context = tune_command.make_context("tune", arguments)
    # What is measured, installed and shown is not part of the request.
    known = {field.name for field in fields_of(TuneRequest)} | {"server_env"}
    values = {name: value for name, value in context.params.items() if name in known}
    return request_from(values, TuneRequest)


SIZES = st.none() | st.integers(1, 4096)
TEXTS = st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "tp": st.integers(1, 64),
            "ep": st.integers(1, 64),
            "dp": st.integers(1, 64),
            "redundant_experts": st.integers(0, 64),
            "quant": TEXTS,
            "experts": SIZES,
            "topk": SIZES,
            "hidden": SIZES,
            "intermediate": SIZES,
            "latent": SIZES,
            "shared_experts": SIZES.filter(lambda size: size is None or size <= 1024),
            "gated": st.none() | st.booleans(),
            "server": TEXTS,
            "server_version": TEXTS,
            "triton_version": TEXTS,
            "m": st.lists(
                st.tuples(st.integers(1, 4096), st.sampled_from([1.0, 2.5, 7.0])),
                unique_by=lambda key: key[0],
            ).map(lambda keys: tuple(sorted(keys))),
            "max_m": st.integers(1, 65536),
            "runner_backend": TEXTS.filter(bool),
            "a2a_backend": TEXTS.filter(bool),
            "server_quantization": TEXTS,
            "deterministic": st.booleans(),
            "disable_shared_experts_fusion": st.booleans(),
            "lora": st.booleans(),
            "enable_fused_moe_sum_all_reduce": st.booleans(),
            "server_environment": st.dictionaries(
                st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), st.text("ab =;'", max_size=6), max_size=2
            ),
            "flashinfer": st.none() | st.booleans(),
            "assume_triton": st.booleans(),
        },
    )
)
def test_the_printed_command_asks_the_same_again(fields: dict[str, Any]) -> None:
    request = TuneRequest("org/model name", out="x", gpu="NVIDIA H200", **fields)
    assert parse(measure_command(request)) == TuneRequest("org/model name", **fields)


def test_the_printed_command_leaves_out_the_gpu_that_is_not_here() -> None:
    assert measure_command(Request(MODEL, tp=4, gpu=RTX, offline=True)) == f"moetune tune {MODEL} --tp 4"

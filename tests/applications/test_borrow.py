"""borrow makes files of elsewhere safe: what it writes passes lint by construction, and says what it is."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.applications import borrow_sources, environment, lint, planning
from moetune.applications.borrow import borrow
from moetune.applications.borrow_answer import Borrow, BorrowRequest
from moetune.applications.borrow_tables import Action, Borrower
from moetune.applications.file_meaning import Sizes, meaning_of
from moetune.applications.lint_file import FileJudge
from moetune.applications.lint_report import LintRequest
from moetune.applications.provenance import Kind, read_provenance
from moetune.domain.config import ConfigTable, KernelConfig, pair_mismatches
from moetune.domain.errors import InputError, MoetuneError, OutputError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.findings import Severity
from moetune.domain.gpu import find_gpu
from moetune.domain.launch import Launch
from moetune.domain.problem import KERNELS, Problem
from moetune.domain.quantization import Dtype, Quantization
from moetune.domain.rules import nearest_runnable
from moetune.servers.registry import open_server
from tests.applications.mutated_files import mutated
from tests.doubles import ModelDouble, padded_rows_us
from tests.published_trees import config_text, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.applications.environment import Installed
    from moetune.servers.protocol import Server

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
H100 = "E=128,N=192,device_name=NVIDIA_H100_80GB_HBM3"
ENTRY = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
KEYS = ("1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024", "2048", "4096", "8192")
GOOD = dict.fromkeys(KEYS, ENTRY)
HUGE = ENTRY | {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_warps": 8}  # 147,456 B
SIZES: dict[str, Any] = {"hidden": 2048, "topk": 8}


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lint, planning, borrow_sources):
        monkeypatch.setattr(module, "find_installed", lambda _: None)


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("lent")
    for package in ("sglang", "vllm"):
        unpack(package, site)
    return site


def write(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def run(*paths: Path, model: ModelDouble | None = None, **asked: Any) -> Borrow:
    gpu = asked.pop("gpu", ())
    asked.setdefault("server", "sglang")
    asked["gpu"] = (gpu,) if isinstance(gpu, str) else gpu
    return borrow(BorrowRequest(paths=paths, **asked), {}, model or ModelDouble())


def from_file(tmp_path: Path, table: Any, name: str = f"{H100}.json", **asked: Any) -> Borrow:
    asked.setdefault("out", tmp_path / "out")
    return run(write(tmp_path / "configs" / "triton_3_5_1" / name, table), **asked)


def result(answer: Borrow, place: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(answer.lent[0].files[place].path.read_text())
    return document


def actions(answer: Borrow) -> dict[str, str]:
    return {str(change.m): change.action.value for change in answer.lent[0].changes}


def worst(answer: Borrow, **asked: Any) -> Severity | None:
    linted = lint.lint(LintRequest(paths=(answer.out,), **asked), {})
    assert linted.files == len(list(answer.out.rglob("E=*"))) // 2
    return linted.worst()


class TestEntries:
    def test_what_runs_stays_as_it_is(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD, gpu="NVIDIA H200")
        assert set(actions(answer).values()) == {"kept"}
        assert result(answer) == GOOD
        (file,) = answer.lent[0].files
        assert file.path == tmp_path / "out/configs/triton_3_8_0/E=128,N=192,device_name=NVIDIA_H200.json"

    def test_what_cannot_run_is_repaired_with_the_nearest_that_the_model_likes(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD | {"2048": HUGE}, gpu=RTX, **SIZES)
        (change,) = (change for change in answer.lent[0].changes if change.action is Action.REPAIRED)
        assert (change.m, change.kernel) == (2048, "up")
        assert "101,376" in change.why
        assert change.after is not None
        problem = replace(a_problem(open_server("sglang")), gpu=find_gpu(RTX))
        judge = FileJudge(open_server("sglang"), max_m=8192)
        huge = KernelConfig.from_json(HUGE, "")
        near = nearest_runnable(huge, lambda new: not any(judge.faults_of(problem, k, new) for k in KERNELS))
        liked = [sum(padded_rows_us(kernel, 2048, Launch(kernel, new)) for kernel in KERNELS) for new in near]
        assert change.after == near[liked.index(min(liked))]
        assert change.after != near[0]
        assert answer.lent[0].predicted

    def test_another_taste_of_the_model_repairs_otherwise(self, tmp_path: Path) -> None:
        def likes_wide_k(kernel: Any, m: int, launch: Any) -> float:
            return padded_rows_us(kernel, m, launch) + (100 if launch.config.block_size_k < 128 else 0)

        answer = from_file(tmp_path, GOOD | {"2048": HUGE}, gpu=RTX, model=ModelDouble(likes_wide_k), **SIZES)
        assert result(answer)["2048"]["BLOCK_SIZE_K"] == 128
        assert worst(answer) is None

    def test_without_k_and_topk_it_is_dropped_and_said(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD | {"1536": HUGE}, gpu=RTX)
        assert "1536" not in result(answer)
        assert actions(answer)["1536"] == "dropped"
        assert any("--hidden and --topk" in note for note in answer.lent[0].notes)
        assert not answer.lent[0].predicted

    def test_case_27_and_44_wrong_numbers_never_pass(self, tmp_path: Path) -> None:
        text = config_text("vllm", "E=128,N=768,device_name=NVIDIA_B200,", "block_shape")
        name = "E=128,N=768,device_name=NVIDIA_B200,dtype=fp8_w8a8,block_shape=[128,128].json"
        path = write(tmp_path / name, text)
        for asked in ({}, SIZES):
            answer = run(path, gpu="NVIDIA L40S", out=tmp_path / f"out{len(asked)}", **asked)
            table = result(answer)
            assert max(entry["BLOCK_SIZE_K"] for entry in table.values()) == 128
            assert "triton_version" not in table
            assert answer.lent[0].files[0].path.name.endswith("block_shape=[128, 128].json")
            assert worst(answer) is None
        assert Counter(actions(answer).values())["repaired"] == 8
        # vLLM clamps, so that for vLLM all of it stays.
        kept = run(path, server="vllm", gpu="NVIDIA L40S", out=tmp_path / "vllm")
        assert Counter(actions(kept).values())["kept"] == 18

    def test_case_30_and_31_gaps_are_filled_with_the_default(self, tmp_path: Path) -> None:
        table = dict.fromkeys(("96", "128", "256", "512", "1024"), ENTRY)
        answer = from_file(tmp_path, table, gpu="NVIDIA H200")
        written = result(answer)
        server = open_server("sglang")
        problem = replace(a_problem(server), gpu=find_gpu("NVIDIA H200"))
        for m in (1, 8192):
            default = server.default_config(problem, "up", m)
            assert KernelConfig.from_json(written[str(m)], "") == default
        assert all(written[key] == ENTRY for key in table)
        assert worst(answer) is None

    def test_the_model_decides_where_the_default_was_best(self, tmp_path: Path) -> None:
        table = dict.fromkeys(("96", "128", "256", "512", "1024"), ENTRY)
        default_is_bad = ModelDouble(lambda *asked: 9.0 if asked[2].config.block_size_n != 64 else 5.0)
        answer = from_file(tmp_path, table, gpu="NVIDIA H200", model=default_is_bad, **SIZES)
        assert result(answer)["1"] == ENTRY
        assert actions(answer)["1"] == "as its neighbour"
        default_is_good = ModelDouble(lambda *asked: 5.0 if asked[2].config.block_size_n != 64 else 9.0)
        answer = from_file(
            tmp_path, table, gpu="NVIDIA H200", model=default_is_good, out=tmp_path / "other", **SIZES
        )
        assert result(answer)["1"]["BLOCK_SIZE_N"] == 32
        assert actions(answer)["1"] == "the server's default"

    def test_where_the_default_cannot_run_either_the_neighbour_stands_in(self, tmp_path: Path) -> None:
        # SGLang 0.5.13's fp8 default of many tokens needs 147,456 bytes.
        name = "E=8,N=192,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json"
        table = dict.fromkeys(KEYS[:7], ENTRY)
        answer = from_file(tmp_path, table, name, gpu="NVIDIA L40S", server_version="0.5.13")
        assert actions(answer)["8192"] == "as its neighbour"
        assert worst(answer, server_version="0.5.13") is None

    @pytest.mark.parametrize(
        ("extra", "source", "server", "gpu", "kept"),
        [
            ({"SPLIT_K": 1}, "vllm", "sglang", "NVIDIA H200", False),
            ({"USE_TMA": True}, "sglang", "vllm", "NVIDIA H200", False),
            ({"USE_TMA": True}, "sglang", "sglang", "NVIDIA H200", False),
            ({"maxnreg": 128}, "sglang", "sglang", "NVIDIA H200", True),
            ({"num_ctas": 2}, "sglang", "sglang", "NVIDIA H200", False),
            ({"enable_fp_fusion": False}, "sglang", "sglang", "NVIDIA H200", False),
        ],
    )
    def test_case_29_keys(
        self, tmp_path: Path, extra: dict[str, Any], source: str, server: str, gpu: str, kept: bool
    ) -> None:
        table = GOOD | {"64": ENTRY | extra}
        answer = from_file(tmp_path, table, gpu=gpu, server=server, from_server=source)
        (key,) = extra
        assert (key in result(answer)["64"]) is kept
        change = next(change for change in answer.lent[0].changes if change.m == 64)
        assert change.action is (Action.KEPT if kept else Action.CLEANED)
        assert kept or key in change.why
        assert worst(answer, server=server) is None

    @pytest.mark.parametrize(("gpu", "kept"), [("AMD Instinct MI325X", True), ("NVIDIA H200", False)])
    def test_case_29_keys_of_amd(self, tmp_path: Path, gpu: str, kept: bool) -> None:
        entry = ENTRY | {"waves_per_eu": 2, "num_stages": 2}
        name = "E=128,N=192,device_name=AMD_Instinct_MI300X.json"
        answer = from_file(tmp_path, dict.fromkeys(KEYS, entry), name, gpu=gpu)
        assert ("waves_per_eu" in result(answer)["64"]) is kept
        assert worst(answer) is None

    def test_case_29_the_grouped_kernel_gets_its_split_k(self, tmp_path: Path) -> None:
        name = "E=8,N=256,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
        answer = from_file(tmp_path, GOOD, name, server="vllm")
        table = result(answer)
        assert table.pop("triton_version") == "3.8.0"
        assert {entry["SPLIT_K"] for entry in table.values()} == {1}

    def test_case_17_int4_is_packed_in_one_servers_name_and_not_in_the_others(self, tmp_path: Path) -> None:
        name = "E=8,N=256,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
        there = from_file(tmp_path, GOOD, name, server="vllm").lent[0].files[0].path
        assert there.name == "E=8,N=512,device_name=NVIDIA_H200,dtype=int4_w4a16.json"
        back = run(there, server="sglang", out=tmp_path / "back").lent[0].files[0].path
        assert back.name == name

    def test_case_10_fused_shared_experts_are_counted_as_the_target_does(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json", GOOD
        )
        answer = run(path, out=tmp_path / "out")
        assert answer.lent[0].files[0].path.name.startswith("E=256,")
        answer = borrow(
            BorrowRequest(
                paths=(path,),
                server="sglang",
                out=tmp_path / "fused",
                model="deepseek-ai/DeepSeek-V3",
                offline=True,
            ),
            {},
            ModelDouble(),
        )
        assert answer.lent[0].files[0].path.name.startswith("E=257,")
        assert any("257" in note for note in answer.lent[0].notes)

    def test_an_entry_that_the_source_could_not_read_is_left_out(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD | {"24": {}, "x": ENTRY}, gpu="NVIDIA H200")
        assert set(result(answer)) == set(KEYS)
        assert len(answer.lent[0].notes) == 2

    @pytest.mark.parametrize("table", [{}, [], "{", {"8": {}}])
    def test_a_file_without_entries_is_passed_over(self, tmp_path: Path, table: Any) -> None:
        answer = from_file(tmp_path, table, gpu="NVIDIA H200")
        assert (answer.lent, len(answer.passed_over), answer.use_command) == ((), 1, "")
        assert not (tmp_path / "out").exists()

    def test_where_nothing_is_left_nothing_is_written(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, {"64": HUGE}, gpu=RTX)
        assert answer.lent == ()
        assert "no entry runs" in answer.passed_over[0].reason


class TestPairs:
    def pair(self, tmp_path: Path, up: Any, down: Any, **asked: Any) -> Borrow:
        folder = tmp_path / "configs" / "triton_3_5_1"
        paths = [write(folder / f"{H100}{end}.json", table) for end, table in (("", up), ("_down", down))]
        return run(*paths, out=tmp_path / "out", **asked)

    def tables(self, answer: Borrow) -> list[ConfigTable]:
        return [ConfigTable.parse(file.path.read_text(), file.path.name) for file in answer.lent[0].files]

    @pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
    def test_case_32_the_down_file_is_made_to_agree(self, tmp_path: Path, version: str) -> None:
        up = GOOD | {"64": ENTRY | {"BLOCK_SIZE_M": 64}, "96": ENTRY | {"BLOCK_SIZE_M": 32}}
        answer = self.pair(tmp_path, up, GOOD, gpu="NVIDIA H200", server_version=version)
        of_up, of_down = self.tables(answer)
        assert pair_mismatches(of_up, of_down, 10_000) == ()
        assert of_up.get(64) == KernelConfig.from_json(up["64"], "")
        assert worst(answer, server_version=version) is None

    def test_a_repaired_up_entry_takes_its_down_entry_along(self, tmp_path: Path) -> None:
        likes_small = ModelDouble(lambda kernel, m, launch: float(launch.config.block_size_m))  # noqa: ARG005
        down = GOOD | {"2048": HUGE | {"num_stages": 1}}
        answer = self.pair(tmp_path, GOOD | {"2048": HUGE}, down, gpu=RTX, model=likes_small, **SIZES)
        of_up, of_down = self.tables(answer)
        up, low = of_up.get(2048), of_down.get(2048)
        assert up is not None
        assert low is not None
        assert up.block_size_m == low.block_size_m < 128
        assert worst(answer) is None

    def test_use_tma_stays_in_a_pair_on_its_own_gpu_only(self, tmp_path: Path) -> None:
        down = {key: ENTRY | {"USE_TMA": True} for key in KEYS}
        home = self.pair(tmp_path, GOOD, down)
        assert all(entry["USE_TMA"] for entry in json.loads(home.lent[0].files[1].path.read_text()).values())
        away = run(home.lent[0].files[0].path, gpu="NVIDIA H200", out=tmp_path / "away")
        assert "USE_TMA" not in away.lent[0].files[1].path.read_text()

    def test_one_file_takes_the_better_of_both(self, tmp_path: Path) -> None:
        down = {key: ENTRY | {"BLOCK_SIZE_N": 128} for key in KEYS}
        wide = ModelDouble(lambda *asked: 5.0 if asked[2].config.block_size_n == 128 else 9.0)
        answer = self.pair(tmp_path, GOOD, down, server="vllm", gpu="NVIDIA H200", model=wide, **SIZES)
        (file,) = answer.lent[0].files
        table = json.loads(file.path.read_text())
        assert {entry["BLOCK_SIZE_N"] for key, entry in table.items() if key in KEYS} == {128}
        plain = self.pair(tmp_path / "b", GOOD, down, server="vllm", gpu="NVIDIA H200")
        table = json.loads(plain.lent[0].files[0].path.read_text())
        assert {entry["BLOCK_SIZE_N"] for key, entry in table.items() if key in KEYS} == {64}

    def test_a_down_file_alone_is_no_pair(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD, f"{H100}_down.json", gpu="NVIDIA H200")
        assert "up file is not there" in answer.passed_over[0].reason


class TestChoosing:
    def test_the_nearest_gpu_lends_and_unlike_silicon_does_not(self, tmp_path: Path) -> None:
        for device, n in (("NVIDIA_H100_80GB_HBM3", 32), ("NVIDIA_H200", 64), ("NVIDIA_A100-SXM4-80GB", 128)):
            table = {key: ENTRY | {"BLOCK_SIZE_N": n} for key in KEYS}
            write(tmp_path / "configs/triton_3_5_1" / f"E=128,N=192,device_name={device}.json", table)
        answer = run(tmp_path / "configs", gpu="NVIDIA H200 NVL", out=tmp_path / "out")
        (lent,) = answer.lent
        assert lent.from_gpu == "NVIDIA H200"
        assert "confidence" in lent.kinship
        reasons = [passed.reason for passed in answer.passed_over]
        assert any("no sibling" in reason for reason in reasons)
        assert any("nearer" in reason for reason in reasons)

    def test_unlike_silicon_that_is_named_lends_with_a_warning(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD, gpu=RTX)
        assert "no sibling" in answer.lent[0].kinship

    def test_case_23_editions_lend_to_one_another_and_say_so(self, tmp_path: Path) -> None:
        name = "E=128,N=192,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition.json"
        answer = from_file(tmp_path, GOOD, name, gpu=RTX)
        assert "power" in answer.lent[0].kinship
        assert answer.lent[0].from_gpu != answer.lent[0].gpu

    def test_a_mig_slice_is_lent_to_by_its_whole_gpu_with_low_confidence(self, tmp_path: Path) -> None:
        name = "E=128,N=192,device_name=NVIDIA_H100_80GB_HBM3.json"
        path = write(tmp_path / "configs/triton_3_5_1" / name, GOOD)
        answer = run(path.parents[1], gpu="NVIDIA H100 80GB HBM3 MIG 3g.40gb", out=tmp_path / "out")
        assert "(confidence low)" in answer.lent[0].kinship
        sliced = answer.lent[0].files[0].path
        other = run(sliced.parent, gpu="NVIDIA H100 80GB HBM3 MIG 1g.10gb", out=tmp_path / "other")
        assert other.lent == ()

    def test_the_newest_triton_lends(self, tmp_path: Path) -> None:
        for directory, n in (("triton_3_5_1", 32), ("triton_3_10_0", 64), ("triton_3_7_1", 128)):
            table = {key: ENTRY | {"BLOCK_SIZE_N": n} for key in KEYS}
            write(tmp_path / "configs" / directory / f"{H100}.json", table)
        answer = run(tmp_path / "configs", out=tmp_path / "out")
        assert {entry["BLOCK_SIZE_N"] for entry in result(answer).values()} == {64}

    def test_several_gpus_at_once(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD, gpu=("NVIDIA H200", "NVIDIA H20"))
        assert [lent.gpu for lent in answer.lent] == ["NVIDIA H20", "NVIDIA H200"]


class TestWhatStandsBeside:
    def test_it_is_labelled_unmeasured(self, tmp_path: Path) -> None:
        answer = from_file(tmp_path, GOOD | {"2048": HUGE}, gpu=RTX, **SIZES)
        file = answer.lent[0].files[0]
        document = json.loads(file.provenance.read_text())
        assert (document["kind"], document["verified"]) == ("borrowed", False)
        assert document["origins"][0]["file_name"] == f"{H100}.json"
        assert document["origins"][0]["directory"] == "triton_3_5_1"
        measured = next(check for check in document["checks"] if check["name"] == "measured")
        assert measured["passed"] is None
        assert next(entry for entry in document["entries"] if entry["m"] == 2048)["action"] == "repaired"
        recorded = read_provenance(file.provenance.read_text(), "it")
        assert recorded.kind is Kind.BORROWED
        assert recorded.problem is not None
        assert recorded.problem.K == 2048

    def test_without_k_the_problem_is_not_made_up(self, tmp_path: Path) -> None:
        file = from_file(tmp_path, GOOD, gpu="NVIDIA H200").lent[0].files[0]
        assert json.loads(file.provenance.read_text())["problem"] is None

    def test_equal_inputs_give_equal_bytes(self, tmp_path: Path) -> None:
        contents = []
        for place in ("one", "two"):
            from_file(tmp_path, GOOD | {"2048": HUGE}, gpu=RTX, out=tmp_path / place, **SIZES)
            files = sorted((tmp_path / place).rglob("*.json"))
            contents.append([(path.name, path.read_bytes()) for path in files])
        assert contents[0] == contents[1]
        assert len(contents[0]) == 2

    def test_a_file_of_somebody_else_is_not_replaced_unasked(self, tmp_path: Path) -> None:
        target = write(tmp_path / "out/configs/triton_3_8_0/E=128,N=192,device_name=NVIDIA_H200.json", "{}")
        with pytest.raises(OutputError, match="moetune did not write it"):
            from_file(tmp_path, GOOD, gpu="NVIDIA H200")
        assert target.read_text() == "{}"
        from_file(tmp_path, GOOD, gpu="NVIDIA H200", force=True)
        assert json.loads(target.read_text()) == GOOD

    def test_the_servers_lookup_finds_it(self, tmp_path: Path) -> None:
        from_file(tmp_path, GOOD, gpu="NVIDIA H200")
        server = open_server("sglang")
        tree = environment.read_tree(tmp_path / "out", nested=True)
        problem = replace(a_problem(server), gpu=find_gpu("NVIDIA H200"))
        from moetune.servers.protocol import Outcome, ServerOptions

        assert server.lookup(problem, "up", (tree,), ServerOptions()).outcome is Outcome.EXACT


def a_problem(server: Server) -> Problem:
    name = parse_file_name(f"{H100}.json")
    assert name is not None
    meaning = meaning_of(server, name, find_gpu("NVIDIA H100 80GB HBM3"), Sizes(hidden=2048, topk=8))
    assert meaning is not None
    return meaning.problem


@pytest.mark.parametrize(
    ("source", "server", "version", "gpu", "sizes"),
    [
        ("sglang", "vllm", "0.33.0", "NVIDIA L40S", {}),
        ("vllm", "sglang", "0.5.23", "NVIDIA H20-3e", SIZES),
        ("sglang", "sglang", "0.5.12", "NVIDIA B300 SXM6 AC", SIZES),
        ("sglang", "sglang", "0.5.4", RTX, {}),
        ("vllm", "vllm", "0.10.2", "AMD Instinct MI325X", {}),
    ],
)
def test_what_is_borrowed_from_the_shipped_trees_passes_lint(
    tmp_path: Path, shipped: Path, source: str, server: str, version: str, gpu: str, sizes: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    answer = run(shipped / source, server=server, server_version=version, gpu=gpu, out=out, **sizes)
    assert answer.lent
    linted = lint.lint(LintRequest(paths=(out,), server=server, server_version=version), {})
    assert linted.files == sum(len(lent.files) for lent in answer.lent)
    assert [found for found in linted.findings if found.code.severity is not Severity.INFO] == []


configs = st.builds(
    KernelConfig,
    st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from([16, 32, 64, 128, 256]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([(), (("SPLIT_K", 1),), (("waves_per_eu", 2),), (("maxnreg", 64),), (("num_ctas", 2),)]),
)
UNTAGGED = Quantization(Dtype.INT8_W8A8)
some_tables = st.dictionaries(st.integers(1, 10_000), configs, min_size=1, max_size=8).map(ConfigTable.of)


@settings(max_examples=200)
@given(
    up=some_tables,
    down=st.none() | some_tables,
    server=st.sampled_from(
        [("sglang", "0.5.23"), ("sglang", "0.5.12"), ("sglang", "0.5.4"), ("vllm", "0.33.0")]
    ),
    gpu=st.sampled_from([RTX, "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "AMD Instinct MI300X"]),
    quantization=st.sampled_from(
        [
            Quantization(),
            Quantization(Dtype.FP8_W8A8),
            Quantization(Dtype.FP8_W8A8, block_shape=(128, 128)),
            Quantization(Dtype.FP8_W8A8, block_shape=(64, 32)),
            Quantization(Dtype.INT8_W8A8, block_shape=(128, 128)),
            Quantization(Dtype.INT8_W8A8),
            Quantization(Dtype.INT4_W4A16, group_size=128),
        ]
    ),
    same_gpu=st.booleans(),
    predicts=st.booleans(),
    max_m=st.integers(1, 20_000),
)
def test_what_is_made_of_any_tables_passes_lint(
    up: ConfigTable,
    down: ConfigTable | None,
    server: tuple[str, str],
    gpu: str,
    quantization: Quantization,
    same_gpu: bool,
    predicts: bool,
    max_m: int,
) -> None:
    release = open_server(*server)
    problem = replace(a_problem(release), gpu=find_gpu(gpu), quantization=quantization)
    judge = FileJudge(release, max_m=max_m)
    borrower = Borrower(
        release,
        problem,
        judge,
        same_gpu=same_gpu,
        same_vendor=same_gpu,
        max_m=max_m,
        model=ModelDouble() if predicts and gpu.startswith("NVIDIA") else None,
        # vLLM has no tag for int8_w8a8: bf16 experts read the same file.
        shared_with=(replace(problem, quantization=Quantization()),) if quantization == UNTAGGED else (),
    )
    made = borrower.make(up, down)
    if not made.up.entries:
        return
    of_up = None
    for kernel, table in zip(KERNELS, (made.up, made.down), strict=True):
        if table is None:
            continue
        text = release.render_table(problem, table)
        name = release.file_name(problem, kernel)
        judged = judge.judge(name, name, text.encode(), of_up)
        bad = [found for found in judged.findings if found.code.severity is not Severity.INFO]
        assert bad == []
        of_up = judged.table
    if made.down is not None:
        assert pair_mismatches(made.up, made.down, max_m) == ()
    for change in made.changes:
        if change.action is Action.KEPT and change.kernel != "down":
            assert change.before is not None
            extra = tuple(pair for pair in change.before.extra if pair[0] != "SPLIT_K")
            assert made.up.get(change.m) == replace(change.before, extra=extra)


class TestInstalled:
    def test_case_53_an_upgrade_leaves_all_stale_and_borrow_mends_it(
        self, tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def find(name: str) -> Installed | None:
            known = {
                "sglang": environment.Installed("sglang", "0.5.23", shipped / "sglang"),
                "triton": environment.Installed("triton", "3.8.0"),
            }
            return known.get(name)

        for module in (lint, planning, borrow_sources):
            monkeypatch.setattr(module, "find_installed", find)
        gpu = "NVIDIA H20"
        before = lint.lint(LintRequest(installed=True), {})
        assert len([found for found in before.findings if found.code.code == "MOE142"]) == 1
        out = tmp_path / "out"
        answer = borrow(BorrowRequest(installed=True, gpu=(gpu,), out=out), {})
        assert answer.server == ("sglang", "0.5.23", "3.8.0")
        own = [lent for lent in answer.lent if lent.from_gpu == gpu]
        assert len(own) > 20
        assert all(not lent.kinship for lent in own)
        after = lint.lint(LintRequest(installed=True, gpu=gpu), {"SGLANG_MOE_CONFIG_DIR": str(out)})
        mine = [found for found in after.findings if found.where.startswith(str(out))]
        assert [found for found in mine if found.code.severity is not Severity.INFO] == []

    def test_nothing_installed_and_nothing_named_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="installed"):
            borrow(BorrowRequest(installed=True, out=tmp_path), {})
        with pytest.raises(InputError, match="nothing is named"):
            borrow(BorrowRequest(out=tmp_path), {})


def test_a_name_alone_says_little(tmp_path: Path) -> None:
    del tmp_path
    name = FileName(8, 64, "NVIDIA_H200", dtype="float8")
    assert meaning_of(open_server("sglang"), name, find_gpu("NVIDIA H200"), Sizes()) is None


def test_mutated_files_are_borrowed_from_passed_over_or_refused(tmp_path: Path) -> None:
    rng = random.Random(20261204)
    seen: Counter[str] = Counter()
    for number in range(400):
        folder = tmp_path / str(number) / "configs" / "triton_3_5_1"
        folder.mkdir(parents=True)
        for _ in range(2):
            name, content = mutated(rng)
            if "/" not in name and "\x00" not in name:
                (folder / name).write_bytes(content)
        try:
            answer = run(
                folder, gpu="NVIDIA H200", server=rng.choice(("sglang", "vllm")), out=folder.parents[1]
            )
        except MoetuneError as error:
            seen[type(error).__name__] += 1
            continue
        seen["lent"] += len(answer.lent)
        seen["passed over"] += len(answer.passed_over)
        assert all(passed.reason for passed in answer.passed_over)
    assert seen["lent"] > 15
    assert seen["passed over"] > 20

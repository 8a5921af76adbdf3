"""What is said of files without a GPU: what they are for, the server's lookup, its loader, lint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.measure_request import MeasureRequest
from moetune.applications.provenance import SCHEMA, SUFFIX, text_sha256
from moetune.applications.tuning_efforts import EFFORTS
from moetune.applications.tuning_measured import tune_measured
from moetune.applications.verify_answer import Verdict
from moetune.applications.verifying import verify
from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError
from moetune.domain.identity import fingerprint, identity, problem_to_json
from tests.applications.fake_machine import PROBLEM, SERVER, FakeMachine
from tests.applications.verify_world import (
    DOWN,
    FOLDER,
    GOOD_DOWN,
    GOOD_UP,
    UP,
    lay,
    look,
    measure,
    request,
)


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

"""Config files are written under names that servers look for, and never over what is not ours to replace."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.output import State, TableFile, check_path, write_tables
from moetune.applications.provenance import (
    Conditions,
    Kind,
    Provenance,
    provenance_name,
    read_provenance,
    text_sha256,
)
from moetune.domain.errors import OutputError
from moetune.domain.identity import fingerprint
from moetune.domain.problem import KERNELS
from moetune.servers.sglang import open_sglang
from moetune.servers.vllm import open_vllm
from tests import wheels
from tests.generators import choices, problem
from tests.servers.sglang_loader import World, load_lookup
from tests.servers.vllm_loader import real as vllm_functions

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.domain.config import ConfigTable
    from moetune.domain.problem import Problem

NAME = "E=256,N=256,device_name=NVIDIA_H200"
UP = f"configs/triton_3_6_0/{NAME}.json"
DOWN = f"configs/triton_3_6_0/{NAME}_down.json"


def table(
    path: str = UP, *, seed: int = 0, of: Problem | None = None, kind: Kind = Kind.PREDICTED
) -> TableFile:
    """A file whose text follows from the seed, for a problem."""
    some = choices(seed)
    provenance = Provenance(kind, ("up",), of or problem(), some, Conditions(noise=0.013))
    return TableFile(path, some.up.render(), provenance)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_pair_is_written_with_its_provenance(tmp_path: Path) -> None:
    written = write_tables([table(UP), table(DOWN, seed=1)], tmp_path / "out")
    assert [one.state for one in written] == [State.WRITTEN, State.WRITTEN]
    assert [one.path for one in written] == [tmp_path / "out" / UP, tmp_path / "out" / DOWN]
    assert set(tree(tmp_path / "out")) == {UP, DOWN, provenance_name(UP), provenance_name(DOWN)}
    for one in written:
        recorded = read_provenance(one.provenance.read_bytes(), "here")
        assert recorded.config_sha256 == text_sha256(one.path.read_text())
        assert recorded.problem == problem()
    # SGLang dies on entries of `configs/` that begin with `triton_` and are no Triton version.
    assert [path.name for path in (tmp_path / "out" / "configs").iterdir()] == ["triton_3_6_0"]


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tables([table(UP), table(DOWN)], tmp_path / name)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    write_tables([table()], tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    assert write_tables([table()], tmp_path)[0].state is State.UNCHANGED
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_better_configs_of_the_same_problem_replace_the_old_ones(tmp_path: Path) -> None:
    write_tables([table()], tmp_path)
    written = write_tables([table(seed=1)], tmp_path)
    assert written[0].state is State.REPLACED
    assert (tmp_path / UP).read_text() == table(seed=1).text
    assert read_provenance((tmp_path / provenance_name(UP)).read_bytes(), "x").config_sha256 == text_sha256(
        table(seed=1).text
    )


def test_case_24_two_models_that_share_a_file_name_never_overwrite_each_other(tmp_path: Path) -> None:
    write_tables([table(of=problem(K=6144))], tmp_path)
    before = tree(tmp_path)
    with pytest.raises(OutputError) as caught:
        write_tables([table(DOWN, of=problem(K=7168)), table(seed=1, of=problem(K=7168))], tmp_path)
    assert "K is 7168 here and 6144 there" in caught.value.message
    assert "--force" in (caught.value.hint or "")
    assert tree(tmp_path) == before  # not even the other file of the set
    written = write_tables([table(seed=1, of=problem(K=7168))], tmp_path, force=True)
    assert written[0].state is State.REPLACED
    assert read_provenance((tmp_path / provenance_name(UP)).read_bytes(), "x").fingerprint == fingerprint(
        problem(K=7168)
    )


def test_case_24_two_models_that_want_the_same_configs_are_told_that_they_share(tmp_path: Path) -> None:
    write_tables([table(of=problem(K=6144))], tmp_path)
    before = tree(tmp_path)
    written = write_tables([table(of=problem(K=7168))], tmp_path)
    assert written[0].state is State.UNCHANGED
    assert written[0].shared_with == "K is 7168 here and 6144 there"
    assert tree(tmp_path) == before


def test_case_22_two_gpus_of_one_call_that_share_a_file_name_are_refused(tmp_path: Path) -> None:
    h200 = problem(server="vllm")
    nvl = problem(server="vllm", gpu=replace(h200.gpu, torch_name="NVIDIA H200 NVL"))
    files = [table(f"{NAME}.json", of=h200), table(f"{NAME}.json", seed=1, of=nvl)]
    for force in (False, True):
        with pytest.raises(OutputError, match="gpu is NVIDIA H200 NVL here and NVIDIA H200 there"):
            write_tables(files, tmp_path, force=force)
    assert tree(tmp_path) == {}


def test_the_same_file_asked_for_twice_is_written_once(tmp_path: Path) -> None:
    assert len(write_tables([table(), table()], tmp_path)) == 1
    with pytest.raises(OutputError, match="the same problem with other configs"):
        write_tables([table(), table(seed=1)], tmp_path)


def test_predicted_configs_do_not_replace_measured_ones(tmp_path: Path) -> None:
    write_tables([table(kind=Kind.MEASURED)], tmp_path)
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="holds measured configs"):
        write_tables([table(seed=1)], tmp_path)
    assert write_tables([table()], tmp_path)[0].state is State.UNCHANGED  # the provenance stays too
    assert tree(tmp_path) == before
    assert write_tables([table(seed=2, kind=Kind.MEASURED)], tmp_path)[0].state is State.REPLACED
    assert write_tables([table(seed=1)], tmp_path, force=True)[0].state is State.REPLACED


def test_measured_times_of_the_same_configs_improve_the_provenance(tmp_path: Path) -> None:
    write_tables([table()], tmp_path)
    assert write_tables([table(kind=Kind.MEASURED)], tmp_path)[0].state is State.UNCHANGED
    assert read_provenance((tmp_path / provenance_name(UP)).read_bytes(), "x").kind is Kind.MEASURED


def test_a_file_that_was_changed_by_hand_is_kept(tmp_path: Path) -> None:
    write_tables([table()], tmp_path)
    (tmp_path / UP).write_text("{}\n")
    with pytest.raises(OutputError, match="was changed since moetune wrote it"):
        write_tables([table()], tmp_path)
    assert (tmp_path / UP).read_text() == "{}\n"


@pytest.mark.parametrize("beside", [None, "not JSON", "{}", '{"schema": "other/1"}'])
def test_a_file_that_moetune_did_not_write_is_kept(tmp_path: Path, beside: str | None) -> None:
    (tmp_path / UP).parent.mkdir(parents=True)
    (tmp_path / UP).write_text("{}\n")
    if beside is not None:
        (tmp_path / provenance_name(UP)).write_text(beside)
    with pytest.raises(OutputError, match="moetune did not write it"):
        write_tables([table()], tmp_path)
    assert (tmp_path / UP).read_text() == "{}\n"
    assert write_tables([table()], tmp_path, force=True)[0].state is State.REPLACED
    assert write_tables([table()], tmp_path)[0].state is State.UNCHANGED


def test_a_lost_provenance_is_written_again(tmp_path: Path) -> None:
    write_tables([table()], tmp_path)
    (tmp_path / provenance_name(UP)).unlink()
    assert write_tables([table()], tmp_path)[0].state is State.UNCHANGED
    assert read_provenance((tmp_path / provenance_name(UP)).read_bytes(), "x").problem == problem()


def test_a_hostile_provenance_cannot_steer_the_terminal(tmp_path: Path) -> None:
    write_tables([table(of=problem(K=6144))], tmp_path)
    path = tmp_path / provenance_name(UP)
    document = json.loads(path.read_text())
    document["identity"]["server_version"] = "\x1b]0;owned\x07" + "x" * 10_000
    document["identity"]["K"] = {"torch_name": "\u202e[bold red]"}
    path.write_text(json.dumps(document))
    with pytest.raises(OutputError) as caught:
        write_tables([table(seed=1)], tmp_path)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 2000


def test_every_conflict_is_named_at_once(tmp_path: Path) -> None:
    paths = [f"E={experts},N=8,device_name=X.json" for experts in range(1, 8)]
    for path in paths:
        (tmp_path / path).write_text("{}")
    with pytest.raises(OutputError) as caught:
        write_tables([table(path) for path in paths], tmp_path)
    assert caught.value.message.count("moetune did not write it") == 4
    assert "and 3 more files" in caught.value.message


@pytest.mark.parametrize(
    "path",
    [
        "E=256,N=256,device_name=NVIDIA_H200.json",
        UP,
        DOWN,
        f"configs/triton_3_6_0/{NAME},dtype=fp8_w8a8,block_shape=[128, 128],per_channel_quant=True_down.json",
        f"{NAME},dtype=fp8_w8a8,block_shape=[128,128].json",
        "E=8,N=8,device_name=Orin_(nvgpu).json",  # case 39
        "E=8,N=8,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics.json",
    ],
)
def test_names_that_servers_look_for_are_accepted(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "passwd",
        f"/etc/{NAME}.json",
        f"../{NAME}.json",
        f"configs/../../{NAME}.json",
        f"configs//{NAME}.json",
        f"./{NAME}.json",
        f"a..b/{NAME}.json",
        f".hidden/{NAME}.json",
        f"configs\\x/{NAME}.json",
        f"a b/{NAME}.json",
        f"{'x' * 65}/{NAME}.json",
        "/".join("a" * 9) + f"/{NAME}.json",
        f"{NAME}.json/",
        f"{NAME}.txt",
        f"{NAME}.json\n",
        f"{NAME}.json.provenance.json",
        "E=0,N=8,device_name=X.json",
        "E=8,N=8,device_name=.json",
        "E=8,N=8,device_name=A/B.json",
        "E=8,N=8,device_name=A\\B.json",
        "E=8,N=8,device_name=A B.json",
        "E=8,N=8,device_name=A..B.json",
        "E=8,N=8,device_name=A\x1b[31m.json",
        "E=8,N=8,device_name=A\0.json",
        "E=8,N=8,device_name=A\u202eB.json",
        f"E=8,N=8,device_name={'A' * 129}.json",
        f"E=8,N=8,device_name={'大' * 100}.json",
        "E=8,N=8,device_name=X,block_shape=[0, 128].json",
        "E=8,N=8,device_name=X,block_shape=[128,  128].json",
        "E=8,N=8,device_name=X,dtype=FP8.json",
        "E=8,N=8,device_name=X_down_down.jso",
    ],
)
def test_anything_else_is_refused_before_anything_is_touched(tmp_path: Path, path: str) -> None:
    with pytest.raises(OutputError) as caught:
        write_tables([table(), table(path)], tmp_path / "out")
    assert caught.value.message.isprintable()
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_accepted_path_leaves_its_directory(folder: str, device: str) -> None:
    path = f"{folder}/E=8,N=8,device_name={device}.json"
    try:
        check_path(path)
    except OutputError:
        return
    assert ".." not in path
    assert path.count("/") == 1 + folder.count("/")
    assert not path.startswith("/")
    assert path.isprintable()


@pytest.mark.parametrize(("package", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_every_name_that_a_server_ships_is_accepted(package: str, version: str) -> None:
    names = [
        name.rsplit("/", 1)[-1]
        for name in wheels.members(package, version)
        if "moe" in name and "/configs/" in name and "/E=" in name and "backend=flydsl" not in name
    ]
    assert len(names) > 200
    refused = []
    for name in names:
        try:
            check_path(name)
        except OutputError:
            refused.append(name)
    # Files that were saved on a machine whose GPU had no name; no server ever looks for them.
    assert [name for name in refused if "device_name=," not in name] == []


def as_loaded(table: ConfigTable) -> dict[int, dict[str, object]]:
    return {m: dict(config.to_json()) for m, config in table.entries}


@pytest.mark.parametrize("version", ["0.5.6", "0.5.10", "0.5.12", "0.5.23"])
def test_sglangs_own_loader_reads_a_written_pair_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    server = open_sglang(version, "3.6.0")
    some = replace(problem(), server_version=version)
    tables = {"up": choices(1).up, "down": choices(1).down}
    files = []
    for kernel in KERNELS:
        wanted = tables[kernel]
        assert wanted is not None
        provenance = Provenance(Kind.PREDICTED, (kernel,), some, choices(1), Conditions(noise=0.013))
        text = server.render_table(some, wanted)
        files.append(TableFile(server.file_path(some, kernel), text, provenance))
    write_tables(files, tmp_path)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    # Once as the Triton that is meant, and once as a newer one: then `configs/` is listed.
    for triton in ("3.6.0", "3.8.0") if version not in ("0.5.6", "0.5.10") else ("3.6.0",):
        real = load_lookup(version, World("NVIDIA H200", triton))
        for kernel in KERNELS:
            wanted = tables[kernel]
            assert wanted is not None
            assert real.get_moe_configs(some.E, some.N, None, down_moe=kernel == "down") == as_loaded(wanted)


@pytest.mark.parametrize("version", ["0.10.2", "0.13.0", "0.33.0"])
def test_vllms_own_loader_reads_a_written_file(tmp_path: Path, version: str) -> None:
    server = open_vllm(version)
    some = replace(problem(), server="vllm", server_version=version)
    one = choices(1, one_file=True)
    provenance = Provenance(Kind.PREDICTED, KERNELS, some, one, Conditions(noise=0.013))
    file = TableFile(server.file_path(some, "up"), server.render_table(some, one.up), provenance)
    write_tables([file], tmp_path)
    functions = vllm_functions(version)
    with functions.world("NVIDIA H200", folder=str(tmp_path)):
        assert functions.get_moe_configs(some.E, some.N, None, 0, 0) == as_loaded(one.up)

"""`moetune borrow` on the command line: reports, documents, the list, and the evening after an upgrade."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.cli.conftest import MODEL, RTX, moetune
from tests.cli.test_lint import ENTRY, GOOD
from tests.cli.test_schemas import validate
from tests.published_trees import unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

H100 = "E=256,N=256,device_name=NVIDIA_H100_80GB_HBM3.json"
HUGE = ENTRY | {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128}


def lay(root: Path, table: Any, name: str = H100) -> str:
    path = root / "lent" / "configs" / "triton_3_5_1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return str(path)


def test_the_table_says_what_became_of_each_entry(command: Callable[..., Result], tmp_path: Path) -> None:
    file = lay(tmp_path, GOOD | {"2048": HUGE})
    result = command("borrow", file, "--gpu", RTX, "--model", MODEL, "--out", "out")
    assert result.code == 0
    assert "128x256x128 g1 w4 s3" in result.out
    assert "101,376" in result.out
    assert "no sibling" in result.out
    assert "unmeasured" in result.out
    assert "export SGLANG_MOE_CONFIG_DIR=" in result.out
    assert command("lint", "out", "--fail-on", "costs-speed").code == 0


def test_documents_obey_their_schemas(command: Callable[..., Result], tmp_path: Path) -> None:
    file = lay(tmp_path, GOOD | {"2048": HUGE, "1536": HUGE})
    for number, sizes in enumerate(((), ("--hidden", "3072", "--topk", "8"))):
        result = command("borrow", file, "--gpu", RTX, "--out", f"out{number}", "--json", *sizes)
        document = json.loads(result.out)
        validate(document, "borrow", strict=False)
        assert document["verified"] is False
        assert bool(document["lent"][0]["counts"].get("repaired")) is bool(sizes)
    for path in tmp_path.rglob("*.provenance.json"):
        validate(json.loads(path.read_text()), "borrowed", strict=False)


def test_nothing_to_borrow_is_1_and_what_cannot_be_tried_is_2(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    file = lay(tmp_path, {"64": HUGE})
    assert command("borrow", file, "--gpu", RTX, "--out", "out").code == 1
    assert command("borrow", file, "--gpu", RTX, "--out", "out", "--exit-zero").code == 0
    assert not (tmp_path / "out").exists()
    for arguments in (("missing.json",), (), (file, "--list", MODEL), (file, "--server", "tgi")):
        result = command("borrow", *arguments, "--gpu", RTX)
        assert result.code == 2
        assert result.err.startswith("error: ")


def test_the_list_ranks_with_reasons(command: Callable[..., Result]) -> None:
    arguments = (
        "borrow",
        "--list",
        "Qwen/Qwen3-30B-A3B",
        "--tp",
        "2",
        "--server",
        "vllm",
        "--gpu",
        "NVIDIA H200",
    )
    result = command(*arguments)
    assert result.code == 0
    first = result.out.splitlines()[2]
    assert first.split()[:3] == ["high", "NVIDIA", "H200"]
    assert "the same GPU; the same shape" in first
    document = json.loads(command(*arguments, "--json").out)
    validate(document, "borrow-list", strict=False)
    assert document["gpus"][0]["file_name"] == "E=128,N=384,device_name=NVIDIA_H200.json"


def test_the_plan_shows_what_is_nearby(command: Callable[..., Result]) -> None:
    document = json.loads(
        command("plan", MODEL, "--tp", "4", "--gpu", RTX, "--server", "sglang", "--json").out
    )
    nearby = document["gpus"][0]["files"][0]["nearby"]
    assert nearby[0]["gpu"] == RTX
    assert "N 512 instead of 256" in nearby[0]["reason"]
    assert nearby[0]["confidence"] == "medium"


def test_tune_starts_from_a_file(command: Callable[..., Result], tmp_path: Path) -> None:
    """A config outside the search space wins where it is given and the model likes it."""
    odd = ENTRY | {"num_stages": 3, "GROUP_SIZE_M": 3}
    file = lay(tmp_path, {"64": odd})
    arguments = ("tune", MODEL, "--tp", "4", "--gpu", RTX, "--server", "sglang", "--no-compile", "--json")
    plain = json.loads(command(*arguments, "--out", "plain").out)
    started = json.loads(command(*arguments, "--out", "started", "--start-from", file).out)
    ranked = [document["gpus"][0]["predicted"]["ranked"]["up"] for document in (plain, started)]
    assert ranked[1] == ranked[0] + 1
    assert command(*arguments, "--start-from", "missing.json").code == 2


def test_evening_an_upgrade_leaves_all_files_stale(tmp_path: Path) -> None:
    """From Triton 3.6 to 3.8: lint says so in one finding, and borrow writes what is safe for the new one."""
    site = unpack("sglang", tmp_path / "site")
    (site / "triton-3.8.0.dist-info").mkdir()
    (site / "triton-3.8.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: triton\nVersion: 3.8.0\n"
    )

    def upgraded(*arguments: str, **variables: str) -> Result:
        return moetune(*arguments, cwd=tmp_path, PYTHONPATH=str(site), **variables)

    gpu = ("--gpu", "NVIDIA H20")
    seen = json.loads(upgraded("lint", "--installed", *gpu, "--json").out)
    stale = [found for found in seen["findings"] if found["code"] == "MOE142"]
    assert len(stale) == 1
    assert seen["servers"] == [{"name": "sglang", "version": "0.5.23", "triton_version": "3.8.0"}]
    answer = upgraded("borrow", "--installed", *gpu, "--out", "safe", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    validate(document, "borrow", strict=False)
    own = [lent for lent in document["lent"] if lent["from_gpu"] == "NVIDIA H20"]
    assert len(own) > 20
    assert {set(lent["counts"]) <= {"kept", "the server's default", "keys changed"} for lent in own} == {True}
    assert all("triton_3_8_0" in file["path"] for lent in document["lent"] for file in lent["files"])
    assert document["use_command"] == f"export SGLANG_MOE_CONFIG_DIR={tmp_path / 'safe'}"
    checked = upgraded("lint", "safe", "--fail-on", "costs-speed", "--json")
    assert checked.code == 0, checked.out
    again = upgraded("lint", "--installed", *gpu, "--json", SGLANG_MOE_CONFIG_DIR=str(tmp_path / "safe"))
    codes = {found["code"] for found in json.loads(again.out)["findings"] if "safe" in found["where"]}
    assert codes <= {"MOE152"}

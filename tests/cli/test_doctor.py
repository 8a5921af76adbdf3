"""`moetune doctor` and `moetune explain` as a user calls them."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from moetune.domain.finding_codes import all_codes
from tests.cli.conftest import clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

LOGS = Path(__file__).parents[1] / "logs"
RTX = LOGS / "sglang-0.5.6-rtx-pro-6000.log"
AWQ = LOGS / "vllm-0.12.0-awq-ep.log"
CRASH = LOGS / "sglang-0.5.12-rtx-4090-crash.log"


def schema(name: str) -> dict[str, Any]:
    text = resources.files("moetune").joinpath("schemas").joinpath(f"{name}.schema.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def closed(value: Any) -> Any:
    """The schema, in which an object may hold nothing that is not described."""
    if isinstance(value, list):
        return [closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: closed(item) for key, item in value.items()}
    if value.get("type") == "object" and "properties" in value:
        result["additionalProperties"] = False
    return result


def test_exit_codes(command: Callable[..., Result], tmp_path: Path) -> None:
    assert command("doctor", str(RTX)).code == 1
    assert command("doctor", str(RTX), "--exit-zero").code == 0
    assert command("doctor", str(RTX), "--fail-on", "crash").code == 0
    assert command("doctor", str(RTX), "--fail-on", "nothing").code == 0
    assert command("doctor", str(CRASH), "--fail-on", "crash").code == 1
    assert command("doctor", str(AWQ)).code == 0
    assert command("doctor", str(AWQ), "--fail-on", "info").code == 1
    assert command("doctor", str(tmp_path / "absent.log")).code == 2
    assert command("doctor", str(tmp_path)).code == 2
    (tmp_path / "empty.log").write_text("")
    assert command("doctor", str(tmp_path / "empty.log")).code == 2
    (tmp_path / "other.log").write_text("Dec 01 10:00:00 host sshd[1]: Accepted publickey\n" * 50)
    result = command("doctor", str(tmp_path / "other.log"))
    assert result.code == 2
    assert "no line of" in result.err
    assert "hint:" in result.err


def test_the_worst_comes_first_with_its_command(command: Callable[..., Result]) -> None:
    out = command("doctor", str(CRASH)).out
    assert out.index("MOE001") < out.index("MOE036")
    assert "sglang between 0.5.11 and 0.5.13" in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("  moetune tune ")]
    assert len(commands) == 1
    assert "--gpu 'NVIDIA GeForce RTX 4090'" in commands[0]


def test_several_logs_gzip_and_standard_input_say_the_same(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    packed = tmp_path / "server.log.gz"
    packed.write_bytes(gzip.compress(RTX.read_bytes()))
    plain = json.loads(command("doctor", str(RTX), "--json").out)
    zipped = json.loads(command("doctor", str(packed), "--json").out)
    piped = subprocess.run(
        [sys.executable, "-m", "moetune.cli.main", "doctor", "-", "--json"],
        input=RTX.read_bytes(),
        capture_output=True,
        env=clean_environment(),
        check=False,
        timeout=60,
    )
    assert piped.returncode == 1
    for document in (plain, zipped, others := json.loads(piped.stdout)):
        for lookup in document["servers"][0]["lookups"]:
            assert lookup.pop("where").endswith((":10", ":11"))  # after the log's own name
    for other in (zipped, others):
        assert other["servers"] == plain["servers"]
        assert [f["mend"] for f in other["findings"]] == [f["mend"] for f in plain["findings"]]
    both = json.loads(command("doctor", str(RTX), str(CRASH), "--json").out)
    assert [log["lines"] for log in both["logs"]] == [path.read_text().count("\n") for path in (RTX, CRASH)]
    assert {f["code"] for f in both["findings"]} >= {"MOE001", "MOE020"}


@pytest.mark.parametrize("log", sorted(LOGS.rglob("*.log")), ids=lambda path: path.stem)
def test_documents_obey_the_schema(log: Path, command: Callable[..., Result]) -> None:
    document = json.loads(command("doctor", str(log), "--json").out)
    Draft202012Validator(closed(schema("doctor"))).validate(document)


def test_control_sequences_of_a_log_do_not_reach_the_terminal(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "evil.log"
    path.write_text(
        "[2026-12-01 09:00:00] server_args=ServerArgs(model_path='x\x1b]0;owned\x07\x9b2J\u202ey', "
        "tp_size=2)\n"
        "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at "
        "/a\x1b[2J\u202e/triton_3_6_0/E=8,N=64,device_name=NVIDIA_\x9b2J\u202eX.json, you can\n"
    )
    for arguments in ((), ("--json",)):
        out = command("doctor", str(path), *arguments).out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)


def test_a_model_by_hand_and_a_config_that_the_server_read(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    log = LOGS / "public" / "sglang-19003.log"
    assert "--model MODEL" in command("doctor", str(log)).out
    assert "--tp 4" in command("doctor", str(log), "--model", "Qwen/Qwen3-30B-A3B").out
    assert (
        command("doctor", str(log), "--model", "no/such-model-anywhere", "--config", str(tmp_path / "x")).code
        == 2
    )


def test_this_machine(command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_TOKEN", "planted-secret-1")
    monkeypatch.setenv("VLLM_API_KEY", "planted-secret-2")
    monkeypatch.setenv("VLLM_PROXY", "http://user:planted-secret-3@host")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    result = command("doctor")
    assert result.code == 0
    assert "VLLM_USE_DEEP_GEMM=0" in result.out
    document = command("doctor", "--json").out
    assert "planted-secret" not in result.out + document
    Draft202012Validator(closed(schema("machine"))).validate(json.loads(document))
    assert json.loads(document)["variables"]["VLLM_API_KEY"] == "(redacted)"


def test_explain_tells_every_code(command: Callable[..., Result]) -> None:
    listed = command("explain")
    assert listed.code == 0
    for code in all_codes():
        assert code in listed.out
        told = command("explain", code.lower())
        assert told.code == 0
        assert told.out.startswith(f"{code}: ")
        assert max(map(len, told.out.splitlines())) <= 100
    document = json.loads(command("explain", "MOE021", "--json").out)
    Draft202012Validator(closed(schema("explain"))).validate(document)
    wrong = command("explain", "MOE999")
    assert wrong.code == 2
    assert "moetune explain" in wrong.err


def test_codes_are_stable_and_whole() -> None:
    """001 to 099 are doctor's, 101 to 199 lint's; each has a story that is one."""
    codes = all_codes()
    assert all(re.fullmatch(r"MOE\d{3}", name) for name in codes)
    assert {"MOE001", "MOE101"} <= set(codes)
    for code in codes.values():
        assert len(code.story) > 60
        assert code.title


def test_every_code_that_doctor_gives_is_known() -> None:
    source = Path(__file__).parents[2] / "src" / "moetune"
    used = set()
    for path in [*source.glob("applications/doctor*.py"), source / "servers" / "log_crashes.py"]:
        used |= set(re.findall(r'"(MOE\d{3})"', path.read_text("utf-8")))
    known = {name for name in all_codes() if name < "MOE100"}
    assert used == known

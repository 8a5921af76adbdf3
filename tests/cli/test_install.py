"""install, uninstall and status as a person types them."""

from __future__ import annotations

import json
import os
import pty
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.applications.install_world import (
    DOWN,
    FOLDER,
    UP,
    install_package,
    pair,
    plain_environment,
    shipped_files,
    snapshot,
    table,
    texts,
    write,
)
from tests.cli.conftest import MODEL, RTX, clean_environment, moetune
from tests.cli.test_schemas import validate
from tests.servers.sglang_loader import World, load_lookup

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

HOME = "sglang/srt/layers/moe/moe_runner/triton_utils"
VERSIONS = ("--server", "sglang", "--server-version", "0.5.12", "--triton-version", "3.6.0")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain_environment(monkeypatch)
    monkeypatch.setenv("MOETUNE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(os, "fsync", int)


def below_root(tmp_path: Path, *more: str) -> tuple[str, ...]:
    write(tmp_path / "source", pair(16))
    return ("install", "source", "--root", "root", *VERSIONS, *more)


def test_install_status_and_uninstall_below_a_root(command: Callable[..., Result], tmp_path: Path) -> None:
    write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
    before = snapshot(tmp_path / "root")
    installed = command(*below_root(tmp_path))
    assert installed.code == 0, installed.err
    assert f"export SGLANG_MOE_CONFIG_DIR={tmp_path / 'root'}" in installed.out
    assert "64x64x64 g1 w4 s3  16x64x64 g1 w4 s3" in installed.out
    assert "sglang's own finds them there" in installed.out
    assert "--copy-shipped" in installed.err
    listed = command("status")
    assert listed.code == 0
    assert listed.out.count("intact") >= 1
    # The command that is shown is the command that works.
    (line,) = [line for line in installed.out.splitlines() if "take it back" in line]
    back = command(*shlex.split(line.partition("moetune ")[2]))
    assert back.code == 0, back.err
    assert snapshot(tmp_path / "root") == before


def test_documents_obey_their_schemas(command: Callable[..., Result], tmp_path: Path) -> None:
    write(tmp_path / "root", {f"{FOLDER}/{UP}": table(64)})
    for more in (("--dry-run",), (), ()):
        document = json.loads(command(*below_root(tmp_path, "--json", *more)).out)
        validate(document, "install")
        assert document["found_by_lookup"]
    (tmp_path / "root" / FOLDER / DOWN).write_text(table(32))
    answer = command("status", "--json")
    assert answer.code == 1
    validate(json.loads(answer.out), "status")
    assert command("status", "--exit-zero").code == 0
    answer = command("uninstall", "root", "--json")
    validate(json.loads(answer.out), "uninstall")


def test_case_54_what_is_left_is_named_and_exits_with_one(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    command(*below_root(tmp_path))
    for name in (UP, DOWN):
        (tmp_path / "root" / FOLDER / name).write_text(table(32))
    back = command("uninstall", "root")
    assert back.code == 1
    assert back.err.count("changed since") == 2
    assert texts(tmp_path / "root")[f"{FOLDER}/{UP}"] == table(32)
    assert command("uninstall", "root", "--forget").code == 1
    assert "nothing is installed" in command("status").out


def test_without_a_terminal_somebody_must_have_said_yes(tmp_path: Path) -> None:
    write(tmp_path / "mine source", pair(16))
    variables = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "mine"), "MOETUNE_STATE": str(tmp_path / "state")}
    refused = moetune("install", "mine source", *VERSIONS, cwd=tmp_path, **variables)
    assert refused.code == 2
    assert "no terminal" in refused.err
    assert "moetune install 'mine source' --yes" in refused.err
    assert not (tmp_path / "mine").exists()
    done = moetune("install", "mine source", *VERSIONS, "--yes", cwd=tmp_path, **variables)
    assert done.code == 0, done.err
    assert texts(tmp_path / "mine") == pair(16, FOLDER)


@pytest.mark.parametrize(("answers", "code", "files"), [("n\nn\n", 2, 0), ("n\ny\n", 0, 2), ("y\ny\n", 0, 6)])
def test_a_person_is_asked_and_offered_the_shipped_files(
    answers: str, code: int, files: int, tmp_path: Path
) -> None:
    """On a terminal: SGLang is installed with four files, and its variable names an empty directory."""
    write(tmp_path / "source", pair(16))
    shipped = {
        f"{HOME}/configs/triton_3_4_0/E={E},N=256,device_name=NVIDIA_H200.json": table(64)
        for E in (8, 16, 32, 128)
    }
    with pytest.MonkeyPatch.context() as own:
        install_package(tmp_path / "site", own, "sglang", "0.5.12", shipped)
    environment = clean_environment(
        SGLANG_MOE_CONFIG_DIR=str(tmp_path / "mine"),
        MOETUNE_STATE=str(tmp_path / "state"),
        PYTHONPATH=str(tmp_path / "site"),
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        words = [sys.executable, "-m", "moetune", "install", "source", "--triton-version", "3.6.0"]
        os.execve(sys.executable, words, environment)
    os.write(terminal, answers.encode())
    said = b""
    try:
        while chunk := os.read(terminal, 4096):
            said += chunk
    except OSError:
        pass  # the other end is closed
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == code, said.decode()
    assert b"4 shipped files" in said
    assert len(texts(tmp_path / "mine")) == files


@pytest.mark.parametrize("verb", ["install", "uninstall", "status"])
def test_help_fits_100_columns(verb: str, tmp_path: Path) -> None:
    result = moetune(verb, "--help", cwd=tmp_path, COLUMNS="100")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 100


BAD: dict[str, tuple[tuple[str, ...], str, str]] = {
    "no path": (("install",), "PATH", "--help"),
    "a path that is not there": (("install", "nothing", "--root", "r"), "nothing", ""),
    "no server": (("install", "source"), "not installed", "--root"),
    "an unknown server": (("install", "source", "--root", "r", "--server", "x"), "", "--server"),
    "an old release": (
        ("install", "source", "--root", "r", "--server", "sglang", "--server-version", "0.1"),
        "0.1",
        "",
    ),
    "nothing to take back": (("uninstall",), "nothing is installed", "moetune status"),
    "a root for tune alone": (("tune", MODEL, "--gpu", RTX, "--root", "r"), "--root", "--install"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_an_error_with_a_hint(case: str, command: Callable[..., Result], tmp_path: Path) -> None:
    write(tmp_path / "source", pair(16))
    arguments, message, hint = BAD[case]
    result = command(*arguments)
    assert result.code == 2
    assert message in result.err
    assert hint in result.err.partition("hint: ")[2]
    assert "Traceback" not in result.err
    assert "unexpected" not in result.err


def test_control_characters_of_files_never_reach_the_terminal(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    name = "E=8,N=256,device_name=NVIDIA_\x1b[31mH200.json"
    write(tmp_path / "source", {name: table(16)})
    result = command("install", "source", "--root", "root", *VERSIONS)
    assert result.code == 2
    assert "\x1b" not in result.out + result.err


def test_tune_installs_what_it_wrote(command: Callable[..., Result], tmp_path: Path) -> None:
    words = ("tune", MODEL, "--tp", "4", "--server", "sglang", "--gpu", RTX, "--no-compile", "--out", "out")
    result = command(*words, "--install", "--root", "root", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    validate(document, "tune")
    assert document["installed"]["found_by_lookup"]
    assert texts(tmp_path / "root") == texts(tmp_path / "out")
    assert command("uninstall", "root").code == 0
    assert not (tmp_path / "root").exists()


def test_tune_asks_before_it_works(command: Callable[..., Result], tmp_path: Path) -> None:
    result = command("tune", MODEL, "--gpu", RTX, "--install")
    assert result.code == 2
    assert "--yes" in result.err
    assert not (tmp_path / "moetune-configs").exists()


def test_evening_of_a_predicted_pair_from_tune_to_server_and_back(
    tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RTX PRO 6000, SGLang 0.5.23 as published: tuned without the GPU, installed, found, taken back."""
    site = tmp_path / "site"
    install_package(site, monkeypatch, "sglang", "0.5.23", shipped_files("sglang", "0.5.23"))
    before = snapshot(site)
    tuned = command(
        *("tune", MODEL, "--tp", "4", "--server", "sglang", "--triton-version", "3.8.0"),
        *("--gpu", RTX, "--no-compile", "--out", "out"),
    )
    assert tuned.code == 0, tuned.err
    installed = command("install", "out", "--triton-version", "3.8.0", "--yes")
    assert installed.code == 0, installed.err

    def found() -> tuple[Any, Any]:
        real = load_lookup("0.5.23", World(device=RTX, triton="3.8.0", folder=str(site / HOME)))
        return real.get_moe_configs(256, 256, None), real.get_moe_configs(256, 256, None, down_moe=True)

    up, down = found()
    out = tmp_path / "out" / "configs" / "triton_3_8_0"
    name = f"E=256,N=256,device_name={RTX.replace(' ', '_')}"
    assert up == {int(key): entry for key, entry in json.loads((out / f"{name}.json").read_text()).items()}
    assert down == {
        int(key): entry for key, entry in json.loads((out / f"{name}_down.json").read_text()).items()
    }
    listed = command("status")
    assert listed.code == 0, listed.err
    assert listed.out.count("; found") == 2
    back = command("uninstall")
    assert back.code == 0, back.err
    assert snapshot(site) == before
    assert found() == (None, None)

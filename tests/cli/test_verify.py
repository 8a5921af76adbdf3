"""`moetune verify` on the command line: the table, the exit codes, the document, its schema, its page."""

from __future__ import annotations

import functools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from moetune.applications import verifying
from moetune.cli.main import run
from moetune.cli.verify import verify as verify_command
from moetune.domain.config import KernelConfig
from tests.applications.fake_machine import FakeMachine
from tests.applications.verify_world import DOWN, GOOD_DOWN, GOOD_UP, SLOW, UP, lay
from tests.cli.conftest import moetune
from tests.cli.test_schemas import validate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"
ARGUMENTS = (
    *("verify", "configs", "--server", "sglang", "--server-version", "0.5.23", "--triton-version", "3.6.0"),
    *("--hidden", "3072", "--topk", "8", "--max-m", "2048"),
)


@pytest.fixture
def laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pair of files; commands run in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOETUNE_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    lay(tmp_path, {UP: GOOD_UP, DOWN: GOOD_DOWN})
    return tmp_path


@pytest.fixture
def machine(laid: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """The same on a machine with a GPU that is not there."""
    made = FakeMachine(laid)
    on_it = functools.partial(verifying.verify, gpus=made.devices(), command=made.command, pool=made.pool)
    monkeypatch.setattr(verifying, "verify", on_it)
    return made


def change(folder: Path, m: int, config: KernelConfig) -> None:
    lay(folder, {UP: {**GOOD_UP, m: config}, DOWN: {**GOOD_DOWN, m: config}})


def test_the_table_shows_what_was_measured(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ARGUMENTS) == 0
    shown = capsys.readouterr()
    for text in ("default us", "file us", "file/default", "numerics", "verdict", "3 faster (of 3)"):
        assert text in shown.out
    assert re.search(r"^ +64 +33-1056 .* 0\.\d{3} \+-\d\.\d% .* right +faster$", shown.out, re.M)
    for phase in ("each kernel alone", "numerics", "the layer, beside the default"):
        assert phase in shown.err
    assert "yes: read, right, and nowhere slower" in shown.out
    assert run(ARGUMENTS) == 0
    assert "nothing new, all was in the journal" in capsys.readouterr().out
    assert len(machine.log("open")) == 1


@pytest.mark.parametrize(
    ("config", "faults", "word"),
    [
        (SLOW, {}, "slower"),
        (replace(SLOW, num_stages=3), {f"up {replace(SLOW, num_stages=3)}": "wrong numbers"}, "wrong"),
        (replace(SLOW, num_stages=4), {f"down {replace(SLOW, num_stages=4)}": "abort"}, "cannot run"),
    ],
)
def test_an_entry_that_is_no_is_exit_code_1(
    config: KernelConfig,
    faults: dict[str, str],
    word: str,
    machine: FakeMachine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(machine.folder, 64, config)
    machine.set(faults=faults)
    assert run(ARGUMENTS) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^ +64 .* {word}$", out, re.M)
    assert f"2 faster, 1 {word}" in out or f"1 faster, 1 {word}, 1 faster" in out
    assert run([*ARGUMENTS, "--exit-zero"]) == 0


def test_documents_obey_the_schema(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    change(machine.folder, 64, replace(SLOW, use_tma=False))
    wanted: list[tuple[tuple[str, ...], int]] = [((), 1), (("--lookup-only",), 0), (("--deterministic",), 1)]
    for more, code in wanted:
        assert run([*ARGUMENTS, *more, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        validate(document, "verify")
        assert document["verified"] is (code == 0)
        assert document["measured"] is (more != ("--lookup-only",))
    (machine.folder / "configs/triton_3_6_0" / DOWN).write_text("[]")
    assert run([*ARGUMENTS[:8], "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    validate(document, "verify")
    assert document["problems"][0]["problem"] is None


def test_without_a_gpu_only_who_asked_for_one_gets_2(laid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del laid
    assert run(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert "this machine has no GPU" in out
    assert "which entry each m uses" in out
    for asked in (["--require-gpu"], ["--devices", "0"], ["--share-gpu"]):
        assert run([*ARGUMENTS, *asked]) == 2
        assert "not everything was measured: this machine has no GPU" in capsys.readouterr().err
    assert run([*ARGUMENTS, "--lookup-only", "--require-gpu"]) == 2


def test_what_is_never_read_is_1_with_the_command_that_mends_it(
    laid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (laid / "configs/triton_3_6_0" / UP).rename(laid / UP)
    assert run(["verify", UP, *ARGUMENTS[2:]]) == 1
    out = capsys.readouterr().out
    assert "never read" in out
    mend = next(line.split("mend")[1].strip() for line in out.splitlines() if "moetune install" in line)
    words = shlex.split(mend)
    assert run([*words[1:], "--json"]) == 0
    capsys.readouterr()
    (found,) = (laid / "moe-configs").rglob(UP)
    assert run(["verify", str(found), *ARGUMENTS[2:]]) == 0


def test_missing_sizes_name_the_option(laid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del laid
    assert run(ARGUMENTS[:8]) == 0
    assert "add --model MODEL, or --hidden and --topk" in " ".join(capsys.readouterr().out.split())


def test_another_gpu_is_an_error_that_names_both(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [replace(machine.devices()[0], name="NVIDIA H100 80GB HBM3")]
    on_it: Any = functools.partial(verifying.verify, gpus=other)
    monkeypatch.setattr(verifying, "verify", on_it)
    assert run(ARGUMENTS) == 2
    shown = capsys.readouterr().err
    assert "NVIDIA H200" in shown
    assert "NVIDIA H100 80GB HBM3" in shown
    assert "--lookup-only" in shown


def test_hostile_names_steer_no_terminal(command: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "triton_3_6_0"
    folder.mkdir(parents=True)
    name = "E=8,N=64,device_name=NVIDIA_\u202e[bold]H200.json"
    (folder / name).write_text('{"1": {"BLOCK_SIZE_M": 16, "\x1b[31m": 1}}')
    result = command("verify", ".", "--server", "sglang")
    assert result.code == 1
    assert "\x1b" not in result.out
    assert "\u202e" not in result.out


# The page's first: they write the files that all of them verify.
EXAMPLES = list(
    dict.fromkeys(
        [
            *re.findall(r"^\$ (moetune .*)$", PAGE.read_text("utf-8"), re.M),
            *re.findall(r"^  (moetune .*)$", verify_command.epilog or "", re.M),
        ]
    )
)


def test_the_examples_run(tmp_path: Path) -> None:
    """Where they speak of a GPU they say that there is none here."""
    assert len(EXAMPLES) >= 4
    for example in EXAMPLES:
        result = moetune(*shlex.split(example)[1:], cwd=tmp_path)
        expected = (2,) if "--require-gpu" in example else (0, 1)
        assert result.code in expected, f"{example}: {result.err}"
        assert "Traceback" not in result.err
        assert result.out


def test_every_option_stands_in_the_page_and_no_other() -> None:
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*)", PAGE.read_text("utf-8")))
    options = {
        name
        for parameter in verify_command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }
    assert named == options - {"--no-color"}


def test_help_fits_100_columns(tmp_path: Path) -> None:
    result = moetune("verify", "--help", cwd=tmp_path, COLUMNS="100")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 100

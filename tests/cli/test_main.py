"""Exit codes, errors and interrupts of the real command line."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetune.cli.errors import report_error, report_interrupt
from moetune.domain.errors import MoetuneError
from tests.cli.conftest import MODEL, RTX, clean_environment, moetune

GOOD = (MODEL, "--tp", "4", "--server", "sglang", "--gpu", RTX, "--offline")


def test_help_names_every_verb_and_loads_nothing_heavy(tmp_path: Path) -> None:
    result = moetune("--help", cwd=tmp_path)
    assert result.code == 0
    assert all(f"\n  {verb} " in result.out for verb in ("plan", "tune", "replay"))
    code = (
        "import sys; from moetune.cli.main import run; run(['--help']);"
        "heavy = {'numpy', 'rich', 'pynvml', 'moetune.api', 'moetune.applications', 'asyncio'};"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_no_verb_is_help_and_version_is_the_packages(tmp_path: Path) -> None:
    import moetune as package

    assert "Commands:" in moetune(cwd=tmp_path).out
    assert moetune("--version", cwd=tmp_path).out.strip() == f"moetune, version {package.__version__}"


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moetune", "--version"]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert child.stdout == moetune("--version", cwd=tmp_path).out


# Command line to what stands in the error and in the hint.
BAD = {
    "unknown verb": (("tun",), "tun", "--help"),
    "unknown option": (("plan", MODEL, "--gpus", "x"), "--gpus", "moetune plan --help"),
    "no number": (("plan", MODEL, "--tp", "four"), "four", "--help"),
    "unknown model": (("plan", "no/such-model", "--offline", "--gpu", RTX), "no/such-model", ""),
    "no model at all": (("plan", "--gpu", RTX), "--experts", ""),
    "a folder without config.json": (("plan", ".", "--gpu", RTX), "config.json", ""),
    "broken JSON": (("plan", "broken.json", "--gpu", RTX), "broken.json", ""),
    "a dense model": (("plan", "dense.json", "--gpu", RTX), "dense", ""),
    "tp that does not divide": (("plan", MODEL, "--tp", "3", "--gpu", RTX), "3", "8"),
    "unknown GPU": (("plan", MODEL, "--gpu", "NVIDIA Thing 9"), "Thing 9", "--compute-capability"),
    "a GPU that is no file name": (("plan", MODEL, "--gpu", "../../x"), "", ""),
    "a wrong compute capability": (("plan", MODEL, "--gpu", RTX, "--compute-capability", "9.0"), "12.0", ""),
    "unknown server": (("plan", MODEL, "--gpu", RTX, "--server", "llamacpp"), "llamacpp", "sglang"),
    "no version": (("plan", MODEL, "--gpu", RTX, "--server-version", "new"), "new", ""),
    "a version too old": (("plan", MODEL, "--gpu", RTX, "--server-version", "0.1.0"), "0.1.0", ""),
    "no key": (("plan", MODEL, "--gpu", RTX, "--m", "1,x"), "x", "--m"),
    "a dtype without a string": (
        ("plan", MODEL, "--tp", "4", "--gpu", "NVIDIA B200", "--quant", "nvfp4", "--assume-triton"),
        "nvfp4",
        "",
    ),
    "output is a file": (("tune", *GOOD, "--no-compile", "--out", "dense.json"), "dense.json", "--out"),
    "output is below a file": (
        ("tune", *GOOD, "--no-compile", "--out", "dense.json/x"),
        "dense.json",
        "--out",
    ),
    "no landscape": (("replay", "none.csv.gz"), "none", ""),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_one_line_and_a_hint_and_exit_2(case: str, tmp_path: Path) -> None:
    arguments, message, hint = BAD[case]
    (tmp_path / "broken.json").write_text('{"num_experts": ')
    (tmp_path / "dense.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}')
    before = sorted(path.name for path in tmp_path.rglob("*"))
    result = moetune(*arguments, cwd=tmp_path)
    assert result.code == 2, result
    first, *rest = result.err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert len(rest) <= 1
    assert all(line.startswith("hint: ") for line in rest)
    assert hint in "".join(rest)
    assert "Traceback" not in result.err
    assert result.out == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_with_json_an_error_is_a_document(tmp_path: Path) -> None:
    result = moetune("plan", "no/such-model", "--offline", "--gpu", RTX, "--json", cwd=tmp_path)
    assert result.code == 2
    document = json.loads(result.out)
    assert document["schema"] == "moetune.error/1"
    assert document["error"]["type"] == "ModelError"
    assert result.err.startswith("error: ")


def test_a_hostile_config_steers_no_terminal(tmp_path: Path) -> None:
    config = {"architectures": ["\x1b]0;owned\x07\x1b[2J[red]x"], "hidden_size": 4096, "\x1b[31mkey": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = moetune("plan", "config.json", "--gpu", RTX, cwd=tmp_path)
    assert result.code == 2
    assert "\x1b" not in result.err + result.out


def test_no_error_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2Jwords\nmore"
    assert report_error(MoetuneError(hostile, hostile), []) == 2
    assert report_error(ValueError(hostile), []) == 2
    assert report_interrupt([hostile]) == 130
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert len(err.splitlines()) == 6


def test_where_another_runner_works_the_answer_is_no(tmp_path: Path) -> None:
    no = ("deepseek-ai/DeepSeek-V3", "--tp", "8", "--server", "sglang", "--gpu", "NVIDIA B200", "--offline")
    for verb in ("plan", "tune"):
        result = moetune(verb, *no, cwd=tmp_path)
        assert result.code == 1
        assert "NOT APPLICABLE" in result.out
        assert "--moe-runner-backend triton" in result.out
    assert list(tmp_path.iterdir()) == []
    assert moetune("tune", *no, "--exit-zero", cwd=tmp_path).code == 0


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    # Not by permissions: tests may run as root.
    result = moetune("tune", *GOOD, "--no-compile", "--out", "/proc/nowhere", cwd=tmp_path)
    assert result.code == 2
    assert "/proc/nowhere" in result.err
    assert "--out" in result.err


def test_the_debug_variable_shows_the_traceback(tmp_path: Path) -> None:
    result = moetune("plan", "no/such-model", "--offline", "--gpu", RTX, cwd=tmp_path, MOETUNE_DEBUG="1")
    assert result.code == 2
    assert "Traceback" in result.err


def test_a_fault_of_moetune_is_said_to_be_one() -> None:
    code = (
        "from moetune.cli import main, errors; import moetune.applications.planning as p;"
        "p.make_plan = lambda request: 1 / 0;"
        f"import sys; sys.exit(main.run(['plan', {MODEL!r}]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(), check=False
    )
    assert result.returncode == 2
    assert "ZeroDivisionError" in result.stderr
    assert "MOETUNE_DEBUG=1" in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_leaves_nothing_and_says_how_to_go_on(tmp_path: Path) -> None:
    # Someone else holds the lock of the output folder: the command waits in the middle of its work.
    folder = tmp_path / "out" / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    arguments = ["tune", *GOOD, "--no-compile", "--out", "out"]
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "moetune.cli.main", *arguments],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            _wait_for_lock_attempt(process.pid, folder)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    finally:
        os.close(lock)
    assert process.returncode == 130, err
    assert out == ""
    assert err.lstrip().startswith("interrupted: ")
    assert f"moetune tune {MODEL} --tp 4" in err
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []


def _wait_for_lock_attempt(pid: int, folder: Path) -> None:
    """Until the process has the folder open."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            places = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            places = []
        if str(folder) in places:
            return
        time.sleep(0.02)
    pytest.fail("the command never came to the output folder")

"""What reaches the terminal: never a control sequence, never half a document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.cli.output import Prose, Sink, clean
from moetune.cli.tables import Column, Table, render_table

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07rest",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31mred",
    "a\r\x1b[2Kb",
    "\x1bPq#0\x1b\\x",
    "abc\u202edef",
    "\x1b[" + "9" * 500,
    "\x1b",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_control_sequence_survives(text: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", clean(text))


def test_the_words_between_the_sequences_stay() -> None:
    assert clean("\x1b[31mred\x1b[0m rose\nnext") == "red rose next"
    assert clean("[bold]not markup[/bold]") == "[bold]not markup[/bold]"


@given(st.text())
def test_clean_text_is_stable_and_one_line(text: str) -> None:
    assert clean(clean(text)) == clean(text)
    assert len(clean(text).splitlines()) <= 1


def test_a_table_lines_up_and_shortens_nothing() -> None:
    table = Table((Column("m", right=True), Column("config")), (("1", "16x64x128"), ("4096", "x" * 300)))
    lines = list(render_table(table))
    assert lines[1].startswith("   1  16x64x128")
    assert lines[2] == "4096  " + "x" * 300
    assert all(line == line.rstrip() for line in lines)


def test_a_rule_is_drawn_only_when_asked_for() -> None:
    table = Table((Column("m"), Column("config")), (("1", "16"),))
    assert len(list(render_table(table))) == 2
    assert list(render_table(table, rule="-"))[1] == "-  ------"


def test_json_mode_keeps_the_report_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Sink(as_json=True)
    sink.heading("Report")
    sink.fields([("name", "value")])
    sink.warning("look here")
    sink.document({"schema": "x", "b": 1, "a": "\x1b[31m"})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"schema": "x", "b": 1, "a": "\x1b[31m"}
    assert "\x1b" not in captured.out
    assert captured.err == "warning: look here\n"


def test_report_mode_prints_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Sink()
    sink.document({"schema": "x"})
    sink.line("\x1b[2Jtext")
    assert capsys.readouterr().out == "text\n"


def test_fields_leave_out_empty_values_and_repeated_names(capsys: pytest.CaptureFixture[str]) -> None:
    Sink().fields([("one", "1"), ("none", ""), ("long name", "2"), ("long name", "3")])
    assert capsys.readouterr().out == "  one           1\n  long name     2\n                3\n"


def test_prose_is_broken_between_words_and_other_values_never(capsys: pytest.CaptureFixture[str]) -> None:
    text = "many words " * 20
    Sink().fields([("prose", Prose(text)), ("path", text)])
    *prose, path = capsys.readouterr().out.splitlines()
    assert max(map(len, prose)) <= 80
    assert len(path) > 200
    assert " ".join(" ".join(prose).split()[1:]) == text.strip()


def test_colour_only_on_a_terminal_or_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Sink().heading("plain")
    Sink(color=True).heading("bold")
    assert capsys.readouterr().out == "plain\n\x1b[1mbold\x1b[0m\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    Sink().heading("terminal")
    monkeypatch.setenv("NO_COLOR", "1")
    Sink().heading("no colour")
    assert capsys.readouterr().out == "\x1b[1mterminal\x1b[0m\nno colour\n"


def _python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, check=False, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_work_goes_on_when_the_reader_has_gone() -> None:
    code = "from moetune.cli.output import Sink\nfor i in range(9000): Sink().line('x' * 60)\nexit(7)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 7
        assert process.stderr.read() == ""


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        code = "from moetune.cli.main import main; import sys; sys.argv = ['moetune', '--help']; main()"
        result = _python(code, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 2
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr

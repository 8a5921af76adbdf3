"""The report: a table, a page and a document that say the same, with nothing raw in them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments.pasting import pasteable
from moetune.applications.experiments.progress import duration_of, spoken
from moetune.applications.experiments.record import Facts
from moetune.applications.experiments.report import (
    HEADINGS,
    Report,
    arm_details,
    arm_rows,
    report_of,
    to_markdown,
)
from moetune.cli.experiment import show_report
from moetune.cli.output import Sink
from moetune.domain.experiment_plan import BASELINE, COMBINED, Intervention, LoadPlan, Plan, ServerPlan
from tests.applications.experiments.test_judging import FAST, MIXED, PLAN, SIZE, TUNED, blocks, facts, start
from tests.cli.test_schemas import validate


def report(plan: Plan = PLAN, **more: Any) -> Report:
    record = Facts(starts=blocks("fast", MIXED, 1.2), size=dict(SIZE), **more)
    return report_of(plan, "e0123456789ab", Path("/state/experiments/e0123456789ab"), record)


def finished(**more: Any) -> Report:
    known = {"combined": ("fast",), "first_combined": 9, "keeping": ("fast",), "done": True}
    return report(**{**known, **more})


def test_the_document_obeys_its_schema() -> None:
    for one in (report(), finished(), finished(refused={"tuned": "no"}), finished(taken_back=True)):
        document = json.loads(json.dumps(one.to_json()))
        validate(document, "experiment")


def test_the_same_record_gives_the_same_bytes() -> None:
    first, second = (json.dumps(finished().to_json(), sort_keys=True) for _ in range(2))
    assert first == second
    assert to_markdown(finished()) == to_markdown(finished())


def test_the_table_has_a_row_for_each_arm_and_a_ratio_for_each_metric() -> None:
    rows = arm_rows(finished())
    assert [len(row) for row in rows] == [len(HEADINGS)] * 2
    arm, verdict, throughput, ttft, itl, pairs = rows[0]
    assert (arm, verdict, pairs) == ("fast", "helps", "4")
    assert throughput.startswith("1.199 [1.19")
    assert ttft.startswith("0.834 [0.83")
    assert itl == "-"
    assert rows[1] == ("tuned", "inconclusive", "-", "-", "-", "-")


def test_what_else_changed_and_what_proves_the_arm_stand_below_it() -> None:
    more = replace(FAST, may_change=("kv_tokens", "decode_graphs"))
    plan = replace(PLAN, interventions=(more, TUNED))
    seen = replace(MIXED, kv_tokens=50_000, decode_graphs=(1, 2))
    record = Facts(starts=blocks("fast", seen, 1.2), size=dict(SIZE))
    made = report_of(plan, "e0", Path("/x"), record)
    details = arm_details(made, made.judgements[0])
    changed = [text for name, text in details if name == "also changed"]
    assert any("kv_tokens" in text and "50,000" in text.replace("50000", "50,000") for text in changed)
    # The flag itself is no news there: the evidence shows it.
    assert not any("enable_mixed_chunk" in text for text in changed)
    assert any("enable_mixed_chunk" in text for name, text in details if name == "evidence")


def test_flags_that_helped_are_printed_with_the_whole_command() -> None:
    one = Intervention("both", ("--a", "two words"), ("--old",), {"NAME": "x", "GONE": ""})
    server = ServerPlan(
        "other", ("serve", "--old", "--port", "{port}"), {"HF_TOKEN": "hf_abcdefgh1234"}, port=7
    )
    plan = Plan("p", server, LoadPlan("guidellm"), (one,))
    made = report_of(plan, "e0", Path("/x"), Facts(keeping=("both",), combined=("both",), done=True))
    assert made.flags == (("take out", "--old"), ("add", "--a 'two words'"), ("set", "NAME=x GONE="))
    assert made.command == "env -u GONE 'HF_TOKEN=(redacted)' NAME=x serve --port 7 --a 'two words'"
    assert made.helps
    assert not report_of(plan, "e0", Path("/x"), Facts(done=True)).helps


def test_a_command_on_another_host_is_quoted_twice() -> None:
    server = ServerPlan("other", ("serve", "it's"), host="gpu-box", folder="/my srv")
    shown = pasteable(server, ())
    assert shown.startswith("ssh gpu-box ")
    (inner,) = shlex.split(shown)[2:]
    assert shlex.split(inner) == ["cd", "/my srv", "&&", "serve", "it's"]


def test_no_secret_is_in_a_command_to_be_pasted() -> None:
    server = ServerPlan("other", ("serve", "--api-key", "much-secret"), {"HF_TOKEN": "also-secret"})
    shown = pasteable(
        server, (Intervention("x", ("--token=third-secret",), environment={"MY_KEY": "fourth-secret"}),)
    )
    assert "secret" not in shown
    assert shown.count("(redacted)") == 4


def test_config_files_for_another_host_are_named_not_installed() -> None:
    plan = replace(PLAN, server=replace(PLAN.server, host="gpu-box"))
    made = report_of(plan, "e0", Path("/x"), Facts(keeping=("tuned",), combined=("tuned",), done=True))
    assert made.far_configs == TUNED.configs
    assert finished().far_configs == ()


HOSTILE = "\x1b[31m|<script>alert(1)</script>`*_[x](javascript:y)\n# heading"


def test_hostile_names_and_logs_stay_text(capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(PLAN, name=HOSTILE, interventions=(replace(FAST, name=HOSTILE), TUNED))
    made = report_of(plan, "e0", Path("/x"), Facts(refused={HOSTILE: HOSTILE, "tuned": HOSTILE}, done=True))
    page = to_markdown(made)
    assert "\x1b" not in page
    assert "<script" not in page
    assert "[x](" not in page
    assert page.count("\n# ") == 0  # one heading of that level, the first line
    show_report(Sink(), made)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


@given(st.text(max_size=60))
def test_any_name_keeps_the_table_whole(name: str) -> None:
    plan = replace(PLAN, interventions=(replace(FAST, name=name), TUNED))
    made = report_of(plan, "e0", Path("/x"), Facts(refused={name: "no", "tuned": "no"}, done=True))
    table = [line for line in to_markdown(made).splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert {line.replace("\\|", "").count("|") for line in table} == {len(HEADINGS) + 1}


def test_the_text_report_ends_with_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(Sink(), finished())
    out = capsys.readouterr().out
    assert "left in place: fast" in out
    assert "add           --enable-mixed-chunk" in out
    assert "noise         " in out
    show_report(Sink(), finished(keeping=()))
    assert "nothing helped, and nothing is left in place" in capsys.readouterr().out
    show_report(Sink(), finished(taken_back=True))
    assert "taken back since" in capsys.readouterr().out


def test_a_report_of_the_last_arm_names_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    starts = [*blocks("fast", MIXED, 1.2), *blocks(COMBINED, MIXED, 1.3, 4, 4)]
    record = Facts(starts=starts, size=dict(SIZE), combined=("fast", "tuned"), left_out=("a is not in it",))
    record.first_combined = record.planned_combined = 4
    made = report_of(PLAN, "e0", Path("/x"), record)
    assert [one.arm for one in made.judgements] == ["fast", "tuned", COMBINED]
    show_report(Sink(), made)
    assert "a is not in it" in capsys.readouterr().err


def test_how_long_a_start_takes() -> None:
    unknown = duration_of(PLAN, [])
    assert (unknown.measured, unknown.start_s) == (False, 1800 + 2 * 1800 + 60)
    known = [
        start(0, 0, BASELINE, 1, facts(), ready_s=10.0, took_s=seconds) for seconds in (50.0, 60.0, 100.0)
    ]
    known.append(start(0, 0, BASELINE, 1, facts(), took_s=1e6, preparing=True))
    measured = duration_of(PLAN, known)
    assert (measured.measured, measured.start_s, measured.ready_s) == (True, 60.0, 10.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.41, "0.4 s"), (42, "42 s"), (99.4, "99 s"), (125, "2 min"), (5940, "99 min"), (12_000, "3 h 20 min")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert spoken(seconds) == text

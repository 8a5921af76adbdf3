"""Prefixes of container engines and ranks, and lines that were wrapped."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.log_lines import body, joinings, read_line, records

RECORD = "[2026-12-01 10:00:00 TP3] Using MoE kernel config from /a/E=8,N=64,device_name=X.json."

PREFIXED = {
    "plain": RECORD,
    "CRLF": RECORD + "\r",
    "docker compose": f"sglang-1  | {RECORD}",
    "docker compose, coloured": f"\x1b[36msglang-1  | \x1b[0m{RECORD}",
    "docker compose, timestamps": f"sglang-1  | 2026-12-01T10:00:00.123456789Z {RECORD}",
    "docker json-file": json.dumps(
        {"log": RECORD + "\n", "stream": "stderr", "time": "2026-12-01T10:00:00Z"}
    ),
    "kubectl --prefix": f"[pod/sglang-0/server] {RECORD}",
    "kubectl --prefix --timestamps": f"[pod/sglang-0/server] 2026-12-01T10:00:00.5Z {RECORD}",
    "CRI": f"2026-12-01T10:00:00.123456789+01:00 stderr F {RECORD}",
    "journald short": f"Dec 01 10:00:00 node-7 sglang[4711]: {RECORD}",
    "journald short-iso": f"2026-12-01T10:00:00+0100 node-7 sglang.service[4711]: {RECORD}",
    "journald json": json.dumps({"MESSAGE": RECORD, "_PID": "4711", "__REALTIME_TIMESTAMP": "1"}),
    "json logs": json.dumps({"level": "info", "msg": RECORD}),
    "ray": f"\x1b[36m(RayWorkerWrapper pid=4711, ip=10.0.0.7)\x1b[0m {RECORD}",
    "quoted in a mail": f"> > {RECORD}",
    "ANSI colours": f"\x1b[33m{RECORD}\x1b[0m",
}


@pytest.mark.parametrize("raw", PREFIXED.values(), ids=PREFIXED.keys())
def test_case_52_prefixes_are_stripped(raw: str) -> None:
    line = read_line(raw.encode())
    assert line.text == RECORD
    assert line.starts_record


def test_ranks_of_both_servers() -> None:
    assert read_line(b"[2026-12-01 10:00:00 DP1 TP3 EP3] x").rank == "DP1 TP3 EP3"
    assert read_line(b"(Worker_DP0_TP1_EP1 pid=7) INFO 12-01 10:00:00 [a.py:1] x").rank == "DP0 TP1 EP1"
    assert read_line(b"(EngineCore_0 pid=7) (Worker_TP5 pid=8) INFO 12-01 10:00:00 x").rank == "TP5"
    assert read_line(b"(VllmWorker rank=2 pid=19714) WARNING 05-07 09:05:19 x").rank == "rank=2"
    assert read_line(b"no rank here").rank == ""


def test_pieces_of_a_cut_line_are_marked() -> None:
    assert read_line(b"2026-12-01T10:00:00.1Z stdout P first ").continues
    assert not read_line(b"2026-12-01T10:00:00.1Z stdout F last").continues
    assert read_line(json.dumps({"log": "first"}).encode()).continues
    assert not read_line(json.dumps({"log": "last\n"}).encode()).continues
    # Another log driver's message has no newline at all.
    assert not read_line(json.dumps({"msg": "whole"}).encode()).continues


def test_records_inside_a_line_are_found() -> None:
    bar = "Capturing: 0%|   | 0/35 [00:00<?, ?it/s]"
    assert records(f"{bar}{RECORD}") == [bar, RECORD]
    two = "(Worker_TP0 pid=1) INFO 01-01 00:00:00 a (Worker_TP1 pid=2) INFO 01-01 00:00:00 b"
    assert len(records(two)) == 2
    assert records(RECORD) == [RECORD]


def test_equal_messages_of_two_ranks_have_one_body() -> None:
    assert body("[2026-12-01 10:00:00 TP0] x") == body("[2026-12-01 10:00:09 TP1] x") == "x"


@given(st.text(alphabet="abc =,_/", min_size=2, max_size=60), st.data())
def test_some_joining_gives_a_line_back_that_a_terminal_cut(text: str, data: st.DataObject) -> None:
    text = "[" + text.strip().replace("  ", " ") + "]"
    cut = data.draw(st.integers(1, len(text) - 1))
    pieces = [text[:cut].rstrip(), text[cut:].lstrip()]
    assert text in list(joinings(pieces))


def test_many_pieces_do_not_multiply() -> None:
    assert len(list(joinings(["a"] * 40))) == 2
    assert len(list(joinings(["a"] * 6))) == 32


@given(st.binary(max_size=400))
def test_any_bytes_are_a_line(raw: bytes) -> None:
    line = read_line(raw)
    assert isinstance(line.text, str)
    assert list(records(line.text))


@pytest.mark.parametrize(
    "hostile",
    [
        b"{" * 200_000,
        b"[" * 200_000,
        b"a " * 200_000 + b"|",
        b"\x1b[" + b"0;" * 200_000,
        b"((" * 100_000 + b"pid=",
    ],
)
@pytest.mark.timeout(60)  # a quadratic expression takes far longer for these
def test_hostile_lines_end(hostile: bytes) -> None:
    assert records(read_line(hostile).text)

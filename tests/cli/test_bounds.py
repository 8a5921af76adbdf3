from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.applications.made_traces import MadeStep, events, write_trace
from tests.applications.test_at_most import decode_line
from tests.cli.conftest import MODEL, Result
from tests.cli.test_schemas import validate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Command = Callable[..., Result]

ASKED = ("plan", MODEL, "--tp", "4", "--server", "sglang", "--gpu", "NVIDIA H200", "--offline")


def test_a_trace_and_a_log_are_told_and_documented(command: Command, tmp_path: Path) -> None:
    trace, log = write_trace(tmp_path / "t.json", events([MadeStep()])), tmp_path / "server.log"
    log.write_text(decode_line(64, 400.0) * 6)
    files = ("--trace", str(trace), "--server-log", str(log))
    shown = command(*ASKED, *files)
    assert shown.code == 0
    for text in (
        "t.json",
        "server.log",
        "25.0%",
        "an ESTIMATE",
        "measured in the trace",
        "can give throughput at most",
    ):
        assert text in shown.out
    document = json.loads(command(*ASKED, *files, "--json").out)
    validate(document, "plan")
    traced, estimated = document["at_most"]
    assert (traced["kind"], estimated["kind"]) == ("traced", "estimated")
    assert traced["saved_if_free"] == 0.25
    assert traced["phases"][0]["up_us"] == 48.0


def test_without_them_the_plan_is_as_before(command: Command) -> None:
    assert "at_most" not in json.loads(command(*ASKED, "--json").out)


def test_a_bound_within_the_noise_is_a_no(command: Command, tmp_path: Path) -> None:
    layer = (("attention_kernel", 990.0), ("fused_moe_kernel", 6.0), ("fused_moe_kernel", 4.0))
    trace = write_trace(tmp_path / "t.json", events([MadeStep(kernels=layer)]))
    assert command(*ASKED).code == 0
    result = command(*ASKED, "--trace", str(trace))
    assert result.code == 1
    assert "not worth tuning" in result.out


def test_a_bad_trace_is_an_error_with_the_next_step(command: Command, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    result = command(*ASKED, "--trace", str(tmp_path / "t.json"))
    assert result.code == 2
    assert "no traceEvents" in result.err
    assert "/start_profile" in result.err

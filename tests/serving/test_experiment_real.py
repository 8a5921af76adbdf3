"""Whole experiments on a real server under real load: a real effect is found, and none where none is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.cli.main import run
from moetune.domain.experiment_plan import LoadPlan, ServerPlan

if TYPE_CHECKING:
    import pytest

    from tests.serving.conftest import Real

REQUESTS = 4
OUTPUT_TOKENS = 4
LOAD = (REQUESTS, 48, OUTPUT_TOKENS)
"""Long prompts and short answers: a prefill with `batched_mm` copies the weights of 4 experts for each token
of the prompt and takes about six times as long, which stands out from the noise of any machine."""


def write_plan(
    path: Path,
    server: ServerPlan,
    load: LoadPlan,
    decision: Mapping[str, float],
    arm: Mapping[str, Any],
    starts: int,
) -> Path:
    """Write a plan of one intervention."""
    path.write_text(
        f"""name = "{path.stem}"
seed = 3

[server]
name = "other"
command = {words(server.command)}
environment = {table(server.environment)}
model = {json.dumps(server.model)}
port = {server.port}
ready_s = {server.ready_s}
stop_s = {server.stop_s}

[load]
generator = "{load.generator}"
command = {words(load.command)}
arguments = {words(load.arguments)}
environment = {table(load.environment)}
requests = {load.requests}
concurrency = {load.concurrency}
input_tokens = {load.input_tokens}
output_tokens = {load.output_tokens}
limit_s = {load.limit_s}

[budget]
starts = {starts}  # 0: what the decision needs

[decision]
{chr(10).join(f"{name} = {value}" for name, value in decision.items())}

[[intervention]]
name = {json.dumps(arm["name"])}
arguments = {words(arm["arguments"])}
proof = {json.dumps(arm["proof"])}
"""
    )
    return path


def words(values: Sequence[str]) -> str:
    return json.dumps(list(values))


def table(values: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"


def experiment(plan: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run a plan with the command line; its exit code and its report."""
    code = run(["experiment", str(plan), "--state", str(plan.parent / "state"), "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    report = json.loads(captured.out)
    assert report["done"], captured.err
    return code, report


def check_starts(report: dict[str, Any], expected: int) -> None:
    """Every start ended well, and every pass did all of its work."""
    measured = [start["result"] for start in report["starts"] if not start["preparing"]]
    assert len(measured) == expected
    for start in measured:
        assert (start["ending"], start["reason"]) == ("done", "")
        assert len(start["passes"]) == 1
        assert start["passes"][0]["completed"] == REQUESTS
        assert start["passes"][0]["output_tokens"] == REQUESTS * OUTPUT_TOKENS


def test_a_faster_kernel_helps_and_its_flag_is_told(
    real: Real, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three blocks are the fewest that can say "helps", and with a third of the usual strictness at that:
    # nine starts of a real server are as many as a test may take.
    plan = write_plan(
        tmp_path / "grouped.toml",
        real.server("batched_mm"),
        real.load(*LOAD),
        {"alpha": 0.4, "noise": 0.1, "smallest_effect": 0.4},
        {
            "name": "grouped",
            "arguments": ["--experts", real.config("grouped_mm")],
            "proof": "experts_implementation=grouped_mm",
        },
        starts=0,
    )

    code, report = experiment(plan, capsys)

    check_starts(report, 9)
    (arm,) = report["arms"]
    assert (arm["arm"], arm["verdict"], arm["validity"]["proof"]) == ("grouped", "helps", "active")
    assert arm["comparisons"][0]["metric"] == "output_tokens_per_s"
    assert arm["comparisons"][0]["ratio"] > 1.2
    assert code == 0
    assert report["kept"]["interventions"] == ["grouped"]
    assert real.config("grouped_mm") in json.dumps(report["kept"]["flags"])


def test_a_server_against_itself_neither_helps_nor_hurts(
    real: Real, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The same kernels by another file. Two blocks, by the usual strictness, never suffice for a claim:
    # whatever the noise of this machine is, one would be an error of moetune. Two more starts fill caches.
    again = real.model / "config.again.json"
    shutil.copy(real.config("eager"), again)
    plan = write_plan(
        tmp_path / "again.toml",
        real.server("eager"),
        real.load(*LOAD),
        {"alpha": 0.05, "noise": 0.05, "smallest_effect": 0.2},
        {
            "name": "again",
            "arguments": ["--experts", str(again)],
            "proof": "experts_implementation=eager",
        },
        starts=8,
    )

    code, report = experiment(plan, capsys)

    check_starts(report, 6)
    (arm,) = report["arms"]
    assert arm["verdict"] in ("inconclusive", "equivalent")
    assert arm["comparisons"][0]["blocks"] == 2
    assert code == 1
    assert report["kept"]["interventions"] == []

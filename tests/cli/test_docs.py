"""The examples of the help texts and of docs/cli.md are real: each runs, and none is forgotten."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from moetune.cli import plan, replay, tune
from moetune.cli.main import cli
from tests.applications.made_traces import MadeStep, events, write_trace
from tests.applications.test_at_most import decode_line
from tests.cli.conftest import LANDSCAPE, moetune

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
COMMANDS = {"plan": plan.plan, "tune": tune.tune, "replay": replay.replay}


def examples() -> Iterator[str]:
    """Every command of the help texts and of the page, once."""
    for command in (cli, *COMMANDS.values()):
        yield from re.findall(r"^  (moetune .*)$", command.epilog or "", re.M)
    yield from re.findall(r"^\$ (moetune .*)$", PAGE.read_text("utf-8"), re.M)


EXAMPLES = list(dict.fromkeys(examples()))


OPTIONS = {
    name
    for command in COMMANDS.values()
    for parameter in command.params
    if isinstance(parameter, click.Option)
    for name in (*parameter.opts, *parameter.secondary_opts)
}


def test_there_are_examples_of_every_verb() -> None:
    assert {example.split()[1] for example in EXAMPLES} == set(COMMANDS)
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    _, *arguments = shlex.split(example)
    for name in ("landscape.csv.gz", "landscape.json"):
        suffix = name.removeprefix("landscape")
        source = LANDSCAPE.with_name(LANDSCAPE.name.removesuffix(".csv.gz") + suffix)
        (tmp_path / name).write_bytes(source.read_bytes())
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(
        '{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128,'
        ' "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768,'
        ' "torch_dtype": "bfloat16"}'
    )
    write_trace(tmp_path / "rank0.trace.json.gz", events([MadeStep()]))
    (tmp_path / "server.log").write_text(decode_line(64, 400.0) * 6)
    result = moetune(*arguments, cwd=tmp_path)
    assert result.code in (0, 1), result.err
    assert result.err == ""
    assert result.out


def test_every_option_stands_in_the_page() -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]*", PAGE.read_text("utf-8")))
    assert OPTIONS - {"--compile", "--effort"} <= named


def test_the_page_names_no_option_that_is_not_there() -> None:
    known = set(OPTIONS)
    # Flags of the servers that the page speaks of.
    known |= {"--moe-runner-backend", "--moe-backend", "--moe-a2a-backend", "--all2all-backend"}
    known |= {"--quantization", "--enable-expert-parallel"}
    assert set(re.findall(r"--[a-z][a-z0-9-]*", PAGE.read_text("utf-8"))) <= known


def test_help_of_every_verb_fits_100_columns(tmp_path: Path) -> None:
    for verb in COMMANDS:
        result = moetune(verb, "--help", cwd=tmp_path, COLUMNS="100")
        assert result.code == 0
        assert max(map(len, result.out.splitlines())) <= 100
